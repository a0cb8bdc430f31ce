"""Listening to a PyTorch module while it runs, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.trace.hooks import ROOT, Record, Recorder, numpy64
from torch_ref.functional import tags

SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)


def paths(module: Any) -> list[str]:
    """Return the paths of the submodules that can be called.

    Example:
        >>> paths(torch.nn.ModuleList([torch.nn.Linear(2, 3)]))
        ['0']
    """
    if not isinstance(module, torch.nn.Module):
        return []
    return [path for path, inner in module.named_modules() if path and type(inner).forward is not _NO_FORWARD]


_NO_FORWARD = torch.nn.Module.forward


def record(
    side: TorchAdapter, inputs: Arrays, extras: Mapping[str, np.ndarray], cotangents: Arrays, names: Mapping[str, str]
) -> tuple[dict[str, Record], Arrays]:
    """Return all nodes of a run in float64 and eval mode, and the cotangents that arrive at them."""
    recorder = TorchRecorder("torch", names)
    module = copy.deepcopy(side.module)
    if isinstance(module, torch.nn.Module):
        module.eval().requires_grad_(True)
        _hook(module, recorder)
    arrays = {name: x.requires_grad_(x.is_floating_point()) for name, x in side.arrays(inputs).items()}
    arrays = recorder.enter(ROOT, (), arrays)[1]
    with _steps(recorder):
        outputs = side.call(module, arrays, side.arrays(extras))
    outputs = recorder.leave(outputs)
    weigh = side.arrays(cotangents)
    torch.stack([(outputs[name] * c.to(outputs[name].dtype)).sum() for name, c in weigh.items()]).sum().backward()
    return recorder.records, recorder.cotangents


class TorchRecorder(Recorder):
    """A `Recorder` that notes the cotangents of the backward pass too.

    Attributes:
        cotangents: by name of the node whose output they belong to; 0 where none arrives.
    """

    def __init__(self, framework: str, names: Mapping[str, str]):
        super().__init__(framework, names)
        self.cotangents: Arrays = {}

    def passed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        # A tensor of its own for every node: a module that returns what it was given has a cotangent of its own, and
        # one behind a `detach` still has the cotangent that arrives there.
        alias = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        self.cotangents[name] = np.zeros(tuple(value.shape))
        alias.register_hook(lambda gradient: self.cotangents.update({name: numpy64(gradient)}))
        return alias

    def observe(self, value: torch.Tensor, step: str) -> None:
        """Record a step below autograd, where nothing can be passed on."""
        self._keep(self._numbered(f"{self.enclosing.name}/{step}"), "step", (), value)


def _hook(module: torch.nn.Module, recorder: TorchRecorder) -> None:
    def before(path: str) -> Callable:
        return lambda module, args, kwargs: recorder.enter(path, args, kwargs)

    for path, inner in module.named_modules():
        if path:
            inner.register_forward_pre_hook(before(path), with_kwargs=True)
            inner.register_forward_hook(lambda module, args, output: recorder.leave(output))


@contextmanager
def _steps(recorder: TorchRecorder) -> Iterator[None]:
    """Listen to named values, and to the attention and the softmax of PyTorch's own."""
    functional, fused = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, *args, **kwargs):
        def step(x, name):  # PyTorch's heads stand before the tokens
            if x.ndim != 4:
                return x
            heard = recorder.step(rearrange(x, "b n t h -> b t n h"), name)
            return rearrange(heard, "b t n h -> b n t h")

        query, key, value = step(query, "query"), step(key, "key"), step(value, "value")
        return step(fused(query, key, value, *args, **kwargs), "context")

    with ExitStack() as stack:
        stack.enter_context(tags.listening(recorder.step))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the one kernel that has a softmax to listen to
        stack.enter_context(_Softmax(recorder))
        stack.callback(setattr, functional, fused.__name__, fused)
        setattr(functional, fused.__name__, attention)
        yield


class _Softmax(TorchDispatchMode):
    """Observes every softmax, whoever calls it."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in SOFTMAX:
            # Where a weight is exactly 0 the score was hidden, whatever number was used to hide it.
            self.recorder.observe(torch.where(out == 0, -torch.inf, args[0]), "masked")
            self.recorder.observe(out, "weights")
        return out
