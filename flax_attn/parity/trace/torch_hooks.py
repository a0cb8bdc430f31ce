"""Observe a PyTorch module while it runs, forward and backward.

A copy of the module has forward hooks, and two modes of PyTorch, which hold for one thread, see the
functions that it calls. No class, no module and no function is patched, and no setting of the
process is changed.

Steps are what a function called `checkpoint_name(x, name)` is given, if it asks `torch.overrides`
as `torch_ref.functional.tags` does; what `scaled_dot_product_attention` takes and returns; and the
input and output of every softmax of PyTorch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from types import FunctionType
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.trace.hooks import (
    ROOT,
    ActivationRecorder,
    Frame,
    floats,
    numpy64,
    replaced,
    weighs,
)

SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
NO_FORWARD = torch.nn.Module.forward


def paths(module: Any) -> list[str]:
    """Return the paths of the submodules that can be called.

    Example:
        >>> paths(torch.nn.ModuleList([torch.nn.Linear(2, 3)]))
        ['0']
    """
    if not isinstance(module, torch.nn.Module):
        return []
    return [
        path
        for path, inner in module.named_modules()
        if path and type(inner).forward is not NO_FORWARD
    ]


def tensors(module: Any) -> Arrays:
    """Return the floating parameters and buffers of a module, in float64."""
    if not isinstance(module, torch.nn.Module):
        return {}
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: numpy64(tensor) for name, tensor in named.items() if tensor.is_floating_point()}


class TorchRecorder(ActivationRecorder):
    """Keeps every value of a run, and the cotangents of its backward pass.

    Attributes:
        cotangents: cotangents of the outputs of nodes, by node name; 0 where none arrives.
    """

    def __init__(self, names: Mapping[str, str]):
        super().__init__("torch", names)
        self.cotangents: Arrays = {}

    def entered(self, frame: Frame) -> tuple[Any, ...]:
        given, frame.inputs = (
            frame.inputs,
            tuple(numpy64(x) for x in frame.inputs),
        )  # PyTorch may change them in place
        return given

    def left(self, frame: Frame, output: torch.Tensor) -> torch.Tensor:
        return self._passed(frame.name, super().left(frame, output))

    def stepped(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._passed(name, super().stepped(name, value))

    def keep(self, name: str, kind: str, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        super().keep(name, kind, inputs, output)
        kept = self.activations[name]
        self.activations[name] = type(kept)(name, kind, inputs, numpy64(output), kept.dtype)

    def below_autograd(self, value: torch.Tensor, step: str) -> None:
        """Keep a step that has no cotangent."""
        self.keep(self._numbered(f"{self.enclosing.name}/{step}"), "step", (), value)

    def _passed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        # A tensor of its own for every node: a module that returns what it was given has a
        # cotangent of its own, and one behind a `detach` still has the cotangent that arrives
        # there.
        alias = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        self.cotangents[name] = np.zeros(tuple(value.shape))
        alias.register_hook(lambda gradient: self.cotangents.update({name: numpy64(gradient)}))
        return alias


def record(
    adapter: TorchAdapter,
    inputs: Arrays,
    extras: Mapping[str, np.ndarray],
    cotangents: Arrays,
    names: Mapping[str, str],
) -> TorchRecorder:
    """Return the activations of a run in float64 and eval mode, with their cotangents."""
    recorder, module = TorchRecorder(names), copy.deepcopy(adapter.module)
    arrays = {
        name: x.requires_grad_(x.is_floating_point()) for name, x in adapter.arrays(inputs).items()
    }
    with ExitStack() as stack:
        if isinstance(module, torch.nn.Module):
            _hook(module.eval().requires_grad_(True), recorder)
        stack.enter_context(_Functions(recorder))
        stack.enter_context(_Operations(recorder))
        arrays = _entered(recorder, ROOT, arrays)
        found = adapter.call(module, arrays, adapter.arrays(extras))
        outputs = _left(recorder, dict(sorted(found.items())))  # in the order in which JAX has them
    weigh = adapter.arrays(cotangents)
    torch.stack(
        [(outputs[name] * c.to(outputs[name].dtype)).sum() for name, c in weigh.items()]
    ).sum().backward()
    return recorder


def _hook(module: torch.nn.Module, recorder: TorchRecorder) -> None:
    def before(path: str) -> Callable:
        return lambda module, args, kwargs: _entered(recorder, path, (args, kwargs))

    for path, inner in module.named_modules():
        if path:
            inner.register_forward_pre_hook(before(path), with_kwargs=True)
            inner.register_forward_hook(lambda module, args, output: _left(recorder, output))
            if weighs(inner):
                own: Any = inner
                own.attend = _observed(recorder, path, own.attend)


def _observed(recorder: TorchRecorder, path: str, attend: Callable) -> Callable:
    """Return the `attend` of a module, observed where it is not called by the module itself."""

    @wraps(attend)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if recorder.path == path:
            return attend(*args, **kwargs)
        args, kwargs = _entered(recorder, path, (args, kwargs))
        return _left(recorder, attend(*args, **kwargs))

    return observed


def _entered(recorder: TorchRecorder, path: str, arguments: Any) -> Any:
    given = floats(arguments)
    return replaced(arguments, given, recorder.enter(path, given))


def _left(recorder: TorchRecorder, output: Any) -> Any:
    first = floats(output)[:1]
    return replaced(output, first, recorder.leave(first))


class _Functions(TorchFunctionMode):
    """Sees named values and the attention of PyTorch's own."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "checkpoint_name":
            return self._named(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with self:
                return _unguarded(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.recorder.step(x, name)

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options
    ):
        query, key, value = (
            self._step(query, "query"),
            self._step(key, "key"),
            self._step(value, "value"),
        )
        # The one kernel that has a softmax to observe, called by its name: the choice of kernels is
        # process-wide.
        kernel = torch.ops.aten._scaled_dot_product_attention_math
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        context, _ = kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return self._step(context, "context")

    def _step(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if x.ndim != 4:
            return x
        # The heads of PyTorch's own attention stand before the tokens.
        return rearrange(
            self.recorder.step(rearrange(x, "b n t h -> b t n h"), name), "b t n h -> b n t h"
        )


def _unguarded(function: FunctionType) -> FunctionType:
    """Return a function of `torch.nn.functional` that bypasses a mode.

    The functions that it calls are still offered to the mode.
    """
    names = {**function.__globals__, "has_torch_function": lambda arguments: False}
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


class _Operations(TorchDispatchMode):
    """Sees every softmax, and what is computed below float64."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            casts = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
            name = "cast" if casts else func.__name__.split(".")[0]
            self.recorder.computed(name, str(out.dtype).removeprefix("torch."))
        if func in SOFTMAX:
            # Where a weight is exactly 0 the score was hidden, whatever number was used to hide it.
            self.recorder.below_autograd(torch.where(out == 0, -torch.inf, args[0]), "masked")
            self.recorder.below_autograd(out, "weights")
        return out
