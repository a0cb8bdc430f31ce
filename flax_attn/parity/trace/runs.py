"""The runs of both sides of a pair as programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import scopes
from flax_attn.parity.trace.jax_program import evaluated, jax_program, run_of
from flax_attn.parity.trace.program import Program
from flax_attn.parity.trace.torch_program import copied, torch_program

Sources = Mapping[str, Any]


def flax_forward(pair: Pair) -> tuple[Any, Program]:
    """Return the forward pass of the JAX side in float64 and eval mode: its jaxpr, and its run."""
    forward, sources = _flax_function(pair)
    traced, shape = jax.make_jaxpr(forward, return_shape=True)(sources)
    return traced, run_of(traced, sorted(shape), sources)


def torch_forward(pair: Pair) -> Program:
    """Return the forward pass of the PyTorch side in float64 and eval mode."""
    adapter, module, inputs, sources = _torch_module(pair)
    extras = adapter.arrays(pair.extras)
    return torch_program(module, lambda module: adapter.call(module, inputs, extras), sources)


def backward(pair: Pair) -> tuple[Program, Program, Arrays]:
    """Return the forward and backward passes of both sides, and the right gradients of JAX."""
    forward, sources = _flax_function(pair)
    cotangents = pair.flax.arrays(pair.cotangents)  # pyright: ignore[reportAttributeAccessIssue]
    wanted, owners = _wanted(pair)
    leaves = {name: sources[name] for name in wanted}
    rest = {name: value for name, value in sources.items() if name not in leaves}
    weights = {f"cotangent of {name}": value for name, value in cotangents.items()}

    def gradients(given: Sources) -> Any:
        fixed = {name: given[name] for name in rest}

        def weighted(leaves: Sources) -> Any:
            outputs = forward({**fixed, **leaves})
            terms = [jnp.sum(outputs[name] * given[f"cotangent of {name}"]) for name in cotangents]
            return sum(terms)

        return jax.grad(weighted)({name: given[name] for name in leaves})

    flax = jax_program(gradients, {**sources, **weights})
    theirs = _torch_backward(pair)
    outputs = {name: theirs.outputs[owner] for name, owner in owners.items()}
    return flax, Program(theirs.nodes, outputs), wanted


def gradients_with_stops(
    pair: Pair, traced: Any
) -> Callable[[Collection[tuple[int, int]]], dict[str, float]]:
    """Return a function of where gradients stop in JAX that returns the errors of all gradients.

    Args:
        pair: pair of modules.
        traced: jaxpr of the JAX side; the operands to which no gradient flows are those of its
            operations, as `jax_program.evaluated` takes them.
    """
    _, sources = _flax_function(pair)
    cotangents = pair.flax.arrays(pair.cotangents)  # pyright: ignore[reportAttributeAccessIssue]
    wanted, _ = _wanted(pair)

    def errors(stopped: Collection[tuple[int, int]]) -> dict[str, float]:
        def weighted(leaves: Sources) -> Any:
            given = {**sources, **leaves}
            arguments = [given[name] for name in sorted(sources)]
            outputs = evaluated(traced, arguments, stopped)
            pairs = zip(sorted(pair.plain.outputs), outputs, strict=True)
            return sum(jnp.sum(x * cotangents[name]) for name, x in pairs if name in cotangents)

        found = jax.grad(weighted)({name: sources[name] for name in wanted})
        arrays = {name: np.asarray(gradient) for name, gradient in found.items()}
        return tolerance.gradient_errors(arrays, wanted)

    return errors


def _flax_function(pair: Pair) -> tuple[Callable[[Sources], dict[str, jax.Array]], dict[str, Any]]:
    """Return the JAX side as a function of its parameters and inputs, with these."""
    adapter = pair.flax
    assert isinstance(adapter, JaxAdapter)
    parameters = adapter.arrays(adapter.tensors)
    inputs = adapter.arrays(pair.inputs)
    extras = adapter.arrays(pair.extras)

    def forward(sources: Sources) -> dict[str, jax.Array]:
        module = adapter.built_of({name: sources[f"parameter {name}"] for name in parameters})
        with scopes.named(module):
            return adapter.call(module, {name: sources[name] for name in inputs}, extras)

    named = {f"parameter {name}": value for name, value in parameters.items()}
    return forward, {**named, **inputs}


def _torch_module(pair: Pair) -> tuple[TorchAdapter, Any, dict[str, Any], dict[str, Any]]:
    adapter = pair.torch
    assert isinstance(adapter, TorchAdapter)
    module = copied(adapter.module)
    inputs = adapter.arrays(pair.inputs)
    sources: dict[str, Any] = dict(inputs)
    if isinstance(module, torch.nn.Module):
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        sources |= {f"parameter {name}": tensor for name, tensor in tensors.items()}
    return adapter, module, inputs, sources


def _torch_backward(pair: Pair) -> Program:
    """Return the forward and backward pass of PyTorch; its outputs are gradients by name."""
    adapter, module, inputs, sources = _torch_module(pair)
    extras = adapter.arrays(pair.extras)
    cotangents = adapter.arrays(pair.cotangents)
    sources |= {f"cotangent of {name}": tensor for name, tensor in cotangents.items()}
    for tensor in inputs.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    leaves = {
        name.removeprefix("parameter "): tensor
        for name, tensor in sources.items()
        if tensor.requires_grad
    }

    def gradients(module: Any) -> dict[str, torch.Tensor]:
        outputs = adapter.call(module, inputs, extras)
        terms = [(outputs[name] * weight).sum() for name, weight in cotangents.items()]
        total = torch.stack(terms).sum()
        found = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    return torch_program(module, gradients, sources)


def _wanted(pair: Pair) -> tuple[Arrays, dict[str, str]]:
    """Return the right gradients by the names of JAX's sources, and whose they are in PyTorch."""
    right = pair.shared(pair.reference.gradients)
    wanted: Arrays = {}
    owners: dict[str, str] = {}
    for entry in pair.entries:
        if entry.theirs not in right:
            continue
        for name, array in entry.split(right[entry.theirs]).items():
            wanted[f"parameter {name}"] = np.asarray(array)
            owners[f"parameter {name}"] = entry.theirs
    for name in pair.inputs:
        if name in right:
            wanted[name] = right[name]
            owners[name] = name
    return wanted, owners
