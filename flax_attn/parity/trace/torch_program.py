"""The PyTorch side as a program: every ATen operation of a run, with its value and its line."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._decomp import get_decompositions
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flax_attn.parity.trace import torch_names
from flax_attn.parity.trace.program import Node, Place, Program, place_of

aten = torch.ops.aten
# A line of a traceback.
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Operations that are recorded as what they are made of: their values are compared as well.
COMPOSED = [
    aten.native_layer_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._softmax,
    aten._log_softmax,
    aten._safe_softmax,
    aten.gelu,
    aten.silu,
    aten.addcmul,
    aten.glu,
    aten.hardswish,
    aten.hardsigmoid,
    aten.softplus,
    aten.elu,
    aten.leaky_relu,
    aten.rsub,
    aten._weight_norm_interface,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.masked_fill,
    aten.lerp,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.mish,
    aten.hardtanh,
    aten.threshold,
    aten.softshrink,
    aten.hardshrink,
    aten._prelu_kernel,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.grid_sampler_2d,
    aten.upsample_nearest2d,
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.replication_pad2d,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
]


def _addmm(bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = left @ right
    if alpha != 1:
        product = product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    axes = tuple(range(x.ndim)) if dim is None else tuple(dim)
    mean = x.mean(axes, keepdim=True)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    squares = (x - mean).square().sum(axes, keepdim=True)
    variance = squares / (count - (1 if correction is None else correction))
    if keepdim:
        return variance, mean
    shape = [size for axis, size in enumerate(x.shape) if axis not in {a % x.ndim for a in axes}]
    return variance.reshape(shape), mean.reshape(shape)


def _var(x: Any, dim: Any = None, **options: Any) -> Any:
    return _var_mean(x, dim, **options)[0]


def _std(x: Any, dim: Any = None, **options: Any) -> Any:
    return _var(x, dim, **options).sqrt()


def _group_norm(x, weight, bias, batch, channels, pixels, groups, eps):
    grouped = x.reshape(batch, groups, -1)
    variance, mean = _var_mean(grouped, (2,), correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    normed = ((grouped - mean) * inverse).reshape(x.shape)
    each = (1, channels, *(1 for _ in x.shape[2:]))
    if weight is not None:
        normed = normed * weight.reshape(each)
    if bias is not None:
        normed = normed + bias.reshape(each)
    return normed, mean.reshape(batch, groups), inverse.reshape(batch, groups)


def _flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    out = _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = torch.where(hidden, -torch.inf, scores)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return out, scores.logsumexp(-1)


def _convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    if bias is None:
        return NotImplemented
    each = (1, -1, *(1 for _ in weight.shape[2:]))
    return aten.convolution.default(x, weight, None, *options) + bias.reshape(each)


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten.convolution.default: _convolution,
    aten.native_group_norm.default: _group_norm,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
}


class _Attention(TorchFunctionMode):
    """Computes attention by its formula, whose steps have values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    else:
        scores = torch.where(attn_mask, scores, -torch.inf)
    weights = scores.softmax(-1)
    # A row that sees nothing returns zeros. Asked in NumPy, this is no step of the run.
    hidden = np.isneginf(_numpy(scores)).all(-1, keepdims=True)
    if hidden.any():
        weights = torch.where(torch.from_numpy(hidden), 0.0, weights)
    return weights @ value


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
            formula = self.formulas.get(func)
            with self:
                found = (
                    func.decompose(*args, **kwargs) if formula is None else formula(*args, **kwargs)
                )
            return self._recorded(func, args, kwargs) if found is NotImplemented else found
        finally:
            self._place = outer

    def source(self, name: str, tensor: torch.Tensor) -> Node:
        """Keep a tensor that the run is given."""
        node = Node("source", (), _numpy(tensor), name=name)
        self.nodes.append(node)
        self._keep(tensor, node)
        return node

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor: of itself, or of what was written into its memory."""
        key = _identity(tensor)
        node, version = self._known.get(key, (None, -1))
        if node is not None and version == tensor._version:
            return node
        value = _numpy(tensor)
        # Another part of the same memory was written: PyTorch counts that as a change of the whole.
        if node is not None and np.array_equal(node.value, value, equal_nan=True):
            return node
        written = self._written.get(key[0])
        if written is None:
            node = Node("constant", (), value, place=self._place)
        elif written.value.size == _room(tensor):
            node = Node("view", (written,), value, place=self._place)
        else:
            # A part of the memory was written after the whole was.
            before = () if node is None else (node,)
            node = Node("assigned", (*before, written), value, place=written.place)
        self.nodes.append(node)
        self._keep(tensor, node)
        return node

    def _recorded(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = torch_names.name_of(func)
        given = list(_operands(func, args, kwargs))
        operands = [self._operand(value) for value in given]
        found = func(*args, **kwargs)
        if _is_same(name, found, given) and not self._is_detached(name):
            self._keep(found, operands[0])
            return found
        results = found if isinstance(found, tuple | list) else [found]
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        if not tensors:
            return found
        first = next((value for value in given if isinstance(value, torch.Tensor)), None)
        parameters = torch_names.parameters_of(func, args, kwargs, first, tensors[0])
        for i, tensor in enumerate(tensors):
            index = {"result": i} if len(tensors) > 1 else {}
            node = Node(name, tuple(operands), _numpy(tensor), {**parameters, **index}, self._place)
            self.nodes.append(node)
            self._keep(tensor, node, written=_writes(func))
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
        place = place_of(frames, self.modules[-1] if self.modules else "")
        if place is not None:
            self._modules_of_lines[place.file, place.line] = place.module
        return place

    def _forward_place(self, node: Any) -> Place | None:
        """Return the line of the operation whose backward pass runs, which autograd has kept."""
        kept = FRAME.findall("".join(node.metadata.get("traceback_", [])))
        frames = [(file, int(line)) for file, line in reversed(kept) if file != __file__]
        place = place_of(frames)
        if place is None:
            return None
        return replace(place, module=self._modules_of_lines.get((place.file, place.line), ""))


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        # What is recorded is called through the recorder.
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _identity(tensor: torch.Tensor) -> tuple:
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _room(tensor: torch.Tensor) -> int:
    """Return how many numbers the memory of a tensor holds."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    # A copy: PyTorch may change it in place.
    return np.array(tensor.numpy(force=True))


def _is_same(name: str, found: Any, given: list[Any]) -> bool:
    """Whether an operation returns the same numbers in other memory."""
    if not isinstance(found, torch.Tensor) or not given:
        return False
    unchanged = name == "cast" and found.dtype == given[0].dtype
    return unchanged or name in torch_names.SAME


def _operands(func: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield the tensors and numbers that an operation computes with."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.name in torch_names.SETTINGS:
            continue
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (inner for inner in value if isinstance(inner, torch.Tensor))
        elif _computes_with(argument, value):
            yield value


def _computes_with(argument: Any, value: Any) -> bool:
    # A number is taken where a tensor is, too.
    kind = str(argument.type)
    return isinstance(value, int | float) and kind in ("number", "Scalar", "Tensor")


def _writes(func: Any) -> bool:
    views = any(argument.alias_info for argument in func._schema.arguments)
    written = any(
        argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments
    )
    return written or not views


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
        stack.enter_context(_Attention())
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
    return copy.deepcopy(module).eval().requires_grad_(True)
