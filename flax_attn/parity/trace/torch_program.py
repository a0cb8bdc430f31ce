"""The PyTorch side as a program: every ATen operation of a run, with its value and its line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from flax_attn.parity.adapters.torch_tensors import copy_module
from flax_attn.parity.trace import torch_formulas, torch_names
from flax_attn.parity.trace.program import Node, Place, Program, place_of
from flax_attn.parity.trace.torch_formulas import COMPOSED, FORMULAS, Attention, as_numpy

# What is recorded is called through these files.
RECORDING = (__file__, torch_formulas.__file__)
# A line of a traceback.
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class _Recorder(TorchDispatchMode):
    """Keeps every operation below it."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.modules: list[str] = []
        self.formulas = {**get_decompositions(COMPOSED), **FORMULAS}
        self._known: dict[Any, tuple[Node, int]] = {}
        self._written: dict[int, Node] = {}
        # What is kept alive keeps its address.
        self._alive: list[torch.Tensor] = []
        self._place: Place | None = None
        self._modules_of_lines: dict[tuple[str, int], str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outer = self._place
        self._place = outer or self._here()
        try:
            formula = self.formulas.get(func, func.decompose)
            with self:
                found = formula(*args, **kwargs)
            if found is NotImplemented:
                found = self._recorded(func, args, kwargs)
            return found
        finally:
            self._place = outer

    def source(self, name: str, tensor: torch.Tensor) -> Node:
        """Keep a tensor that the run is given."""
        return self._added(tensor, Node("source", (), as_numpy(tensor), name=name))

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor: of itself, or of what was written into its memory."""
        key = _identity(tensor)
        node, version = self._known.get(key, (None, -1))
        if node is not None and version == tensor._version:
            return node
        value = as_numpy(tensor)
        # Another part of the same memory was written: PyTorch counts that as a change of the whole.
        if node is not None and np.array_equal(node.value, value, equal_nan=True):
            return node
        written = self._written.get(key[0])
        if written is None:
            made = Node("constant", (), value, place=self._place)
        elif written.value.size == _room(tensor):
            made = Node("view", (written,), value, place=self._place)
        else:
            # A part of the memory was written after the whole was.
            operands = (written,) if node is None else (node, written)
            made = Node("assigned", operands, value, place=written.place)
        return self._added(tensor, made)

    def _added(self, tensor: torch.Tensor, node: Node, written: bool = True) -> Node:
        self.nodes.append(node)
        self._keep(tensor, node, written)
        return node

    def _recorded(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return what an operation computes, and keep it."""
        name = torch_names.name_of(func)
        given = list(_operands(func, args, kwargs))
        operands = tuple(self._operand(value) for value in given)
        found = func(*args, **kwargs)
        if _is_same(name, found, given) and not self._is_detached(name):
            self._keep(found, operands[0])
            return found
        results = found if isinstance(found, tuple | list) else [found]
        tensors = list(_tensors(results))
        if not tensors:
            return found
        first = next(_tensors(given), None)
        parameters = torch_names.parameters_of(func, args, kwargs, first, tensors[0])
        for i, tensor in enumerate(tensors):
            index = {"result": i} if len(tensors) > 1 else {}
            node = Node(name, operands, as_numpy(tensor), parameters | index, self._place)
            node.compute = _repeated(func, args, kwargs, given, i)
            self._added(tensor, node, written=_writes(func))
        return found

    def _is_detached(self, name: str) -> bool:
        # Autograd detaches for itself, too.
        return name == "detach" and self._place is not None and "detach" in self._place.source

    def _operand(self, value: Any) -> Node:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        node = Node("constant", (), np.asarray(value), place=self._place)
        self.nodes.append(node)
        return node

    def _keep(self, tensor: torch.Tensor, node: Node, written: bool = True) -> None:
        key = _identity(tensor)
        self._known[key] = node, tensor._version
        self._alive.append(tensor)
        if written or key[0] not in self._written:
            self._written[key[0]] = node

    def _here(self) -> Place | None:
        backward = torch._C._current_autograd_node()
        if backward is not None:
            return self._forward_place(backward)
        # Read here, where no frame of the harness is between.
        frames = list(_frames())
        module = self.modules[-1] if self.modules else ""
        place = place_of(frames, module)
        if place is not None:
            self._modules_of_lines[place.file, place.line] = place.module
        return place

    def _forward_place(self, node: Any) -> Place | None:
        """Return the line of the operation whose backward pass runs, which autograd has kept."""
        kept = FRAME.findall("".join(node.metadata.get("traceback_", [])))
        # A traceback ends with the innermost line.
        frames = [(file, int(line)) for file, line in reversed(kept) if file not in RECORDING]
        place = place_of(frames)
        if place is None:
            return None
        module = self._modules_of_lines.get((place.file, place.line), "")
        return replace(place, module=module)


def _repeated(
    func: Any, args: tuple, kwargs: dict, given: list[Any], result: int
) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Return a function that computes one of the tensors of an operation from other operands."""

    def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
        instead = {}
        for value, operand in zip(given, operands, strict=True):
            if isinstance(value, torch.Tensor):
                instead[id(value)] = torch.as_tensor(operand.copy(), dtype=value.dtype)
        arguments = tree_map(lambda leaf: instead.get(id(leaf), leaf), (args, kwargs))
        found = func(*arguments[0], **arguments[1])
        results = found if isinstance(found, tuple | list) else [found]
        return as_numpy(list(_tensors(results))[result])

    return compute


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in RECORDING:
            yield file, frame.f_lineno
        frame = frame.f_back


def _identity(tensor: torch.Tensor) -> tuple:
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _room(tensor: torch.Tensor) -> int:
    """Return how many numbers the memory of a tensor holds."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_same(name: str, found: Any, given: list[Any]) -> bool:
    """Whether an operation returns the same numbers in other memory."""
    if not isinstance(found, torch.Tensor) or not given:
        return False
    unchanged = name == "cast" and found.dtype == given[0].dtype
    return unchanged or name in torch_names.SAME


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _operands(func: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield the tensors and numbers that an operation computes with."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in torch_names.SETTINGS:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, int | float) and torch_names.takes_number(argument):
            yield value


def _writes(func: Any) -> bool:
    """Whether the memory of a result is filled, which a view only reads."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info]
    return not aliases or any(alias.is_write for alias in aliases)


def torch_program(
    module: Any, call: Callable[[Any], Mapping[str, torch.Tensor]], sources: Mapping[str, Any]
) -> Program:
    """Return the run of a PyTorch module.

    Args:
        module: module, whose submodules are followed; it is changed by hooks, so pass a copy.
        call: function of the module that returns its outputs by name.
        sources: tensors that the run is given, by name: parameters, buffers and inputs.
    """
    recorder = _Recorder()
    for name, tensor in sources.items():
        recorder.source(name, tensor)
    with ExitStack() as stack:
        if isinstance(module, torch.nn.Module):
            _follow(module, recorder)
        stack.enter_context(Attention())
        # Autograd keeps the lines of the forward pass; numbers that are not finite are no error.
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        stack.enter_context(recorder)
        found = call(module)
        outputs = {name: recorder.node(tensor) for name, tensor in sorted(found.items())}
    return Program(recorder.nodes, outputs)


def _follow(module: torch.nn.Module, recorder: _Recorder) -> None:
    def enter(path: str) -> Callable:
        return lambda *given: recorder.modules.append(path)

    def leave(*given: Any) -> None:
        recorder.modules.pop()

    for path, inner in module.named_modules():
        inner.register_forward_pre_hook(enter(path))
        inner.register_forward_hook(leave)


def copied(module: Any) -> Any:
    """Return a copy of a module in eval mode, all of whose parameters take part in autograd."""
    if not isinstance(module, torch.nn.Module):
        return module
    return copy_module(module).eval().requires_grad_(True)
