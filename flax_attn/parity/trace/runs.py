"""The runs of both sides of a pair as programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
from flax_attn.parity.trace.program import BUFFER, PARAMETER, Program, unprefixed
from flax_attn.parity.trace.torch_program import copied, torch_program

Sources = Mapping[str, Any]
FlaxFunction = Callable[[Sources], dict[str, jax.Array]]
TorchFunction = Callable[[Any], dict[str, torch.Tensor]]
# Operands to which no gradient flows: the identity of the operation, and the index.
Stops = Collection[tuple[int, int]]


def flax_forward(pair: Pair) -> tuple[Any, Program]:
    """Return the forward pass of the JAX side in float64 and eval mode: its jaxpr, and its run."""
    forward, sources = _flax_function(pair)
    traced, shape = jax.make_jaxpr(forward, return_shape=True)(sources)
    return traced, run_of(traced, sorted(shape), sources)


def torch_forward(pair: Pair) -> Program:
    """Return the forward pass of the PyTorch side in float64 and eval mode."""
    return torch_program(*_torch_function(pair))


def backward(pair: Pair) -> tuple[Program, Program, Arrays]:
    """Return the forward and backward passes of both sides, and the right gradients of JAX."""
    forward, sources = _flax_function(pair)
    cotangents = _flax_side(pair).arrays(pair.cotangents)
    wanted, owners = _wanted(pair)

    def gradients(given: Sources) -> Any:
        weights = {name: given[f"cotangent of {name}"] for name in cotangents}

        def weighted(leaves: Sources) -> Any:
            outputs = forward({**given, **leaves})
            return _weighted_sum(outputs, weights)

        leaves = {name: given[name] for name in wanted}
        return jax.grad(weighted)(leaves)

    # The cotangents are sources as well, so that both runs share them.
    flax = jax_program(gradients, sources | _named("cotangent of", cotangents))
    theirs = _torch_backward(pair)
    outputs = {name: theirs.outputs[owner] for name, owner in owners.items()}
    return flax, Program(theirs.nodes, outputs), wanted


def gradients_with_stops(pair: Pair, traced: Any) -> Callable[[Stops], dict[str, float]]:
    """Return a function of where gradients stop in JAX that returns the errors of all gradients.

    Args:
        pair: pair of modules.
        traced: jaxpr of the JAX side; the operands to which no gradient flows are those of its
            operations, as `jax_program.evaluated` takes them.
    """
    _, sources = _flax_function(pair)
    cotangents = _flax_side(pair).arrays(pair.cotangents)
    wanted, _ = _wanted(pair)
    leaves = {name: sources[name] for name in wanted}
    names = sorted(pair.plain.outputs)

    def errors(stopped: Stops) -> dict[str, float]:
        def weighted(leaves: Sources) -> Any:
            # A jaxpr takes a mapping in the order of its keys.
            given = {**sources, **leaves}
            arguments = [given[name] for name in sorted(given)]
            results = evaluated(traced, arguments, stopped)
            outputs = dict(zip(names, results, strict=True))
            return _weighted_sum(outputs, cotangents)

        found = jax.grad(weighted)(leaves)
        arrays = {name: np.asarray(gradient) for name, gradient in found.items()}
        return tolerance.gradient_errors(arrays, wanted)

    return errors


def _weighted_sum(outputs: Mapping[str, jax.Array], weights: Mapping[str, jax.Array]) -> Any:
    """Return the number that is differentiated: integer outputs have no weight and no gradient."""
    terms = [jnp.sum(outputs[name] * weight) for name, weight in weights.items()]
    return sum(terms)


def _flax_side(pair: Pair) -> JaxAdapter:
    assert isinstance(pair.flax, JaxAdapter)
    return pair.flax


def _torch_side(pair: Pair) -> TorchAdapter:
    assert isinstance(pair.torch, TorchAdapter)
    return pair.torch


def _named(kind: str, arrays: Sources) -> dict[str, Any]:
    """Return arrays as sources of a run, by their kind and their own names."""
    return {f"{kind} {name}": array for name, array in arrays.items()}


def _flax_function(pair: Pair) -> tuple[FlaxFunction, dict[str, Any]]:
    """Return the JAX side as a function of its parameters and inputs, with these."""
    adapter = _flax_side(pair)
    parameters = adapter.arrays(adapter.tensors)
    inputs = adapter.arrays(pair.inputs)
    extras = adapter.arrays(pair.extras)
    keys = _keys(parameters, adapter.shapes)

    def forward(sources: Sources) -> dict[str, jax.Array]:
        own = {name: sources[key] for name, key in keys.items()}
        given = {name: sources[name] for name in inputs}
        module = adapter.built_of(own)
        with scopes.named(module), adapter.read_as(module):
            return adapter.call(module, given, extras)

    held = {key: parameters[name] for name, key in keys.items()}
    return forward, {**held, **inputs}


def _keys(names: Iterable[str], shared: Collection[str]) -> dict[str, str]:
    """Return the names of the sources that hold what a module has: parameters, and all else."""
    return {name: f"{PARAMETER if name in shared else BUFFER}{name}" for name in names}


def _torch_function(pair: Pair) -> tuple[Any, TorchFunction, dict[str, Any]]:
    """Return a copy of the module of PyTorch, a function that calls it, and what it is given."""
    adapter = _torch_side(pair)
    module = copied(adapter.module)
    inputs = adapter.arrays(pair.inputs)
    extras = adapter.arrays(pair.extras)
    sources: dict[str, Any] = dict(inputs)
    if isinstance(module, torch.nn.Module):
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, key in _keys(tensors, adapter.shapes).items():
            sources[key] = tensors[name]
    return module, lambda module: adapter.call(module, inputs, extras), sources


def _torch_backward(pair: Pair) -> Program:
    """Return the forward and backward pass of PyTorch; its outputs are gradients by name."""
    module, call, sources = _torch_function(pair)
    cotangents = _torch_side(pair).arrays(pair.cotangents)
    leaves = {}
    for name, tensor in sources.items():
        if name in pair.inputs and tensor.is_floating_point():
            tensor.requires_grad_()
        if tensor.requires_grad:
            leaves[unprefixed(name)] = tensor

    def gradients(module: Any) -> dict[str, torch.Tensor]:
        outputs = call(module)
        terms = [(outputs[name] * weight).sum() for name, weight in cotangents.items()]
        total = torch.stack(terms).sum()
        found = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    return torch_program(module, gradients, sources | _named("cotangent of", cotangents))


def _wanted(pair: Pair) -> tuple[Arrays, dict[str, str]]:
    """Return the right gradients by the names of JAX's sources, and whose they are in PyTorch."""
    right = pair.shared(pair.reference.gradients)
    wanted: Arrays = {}
    owners: dict[str, str] = {}
    for entry in pair.entries:
        if entry.theirs not in right:
            continue
        parts = entry.split(right[entry.theirs])
        for name, array in parts.items():
            key = f"{PARAMETER}{name}"
            wanted[key] = np.asarray(array)
            owners[key] = entry.theirs
    for name in pair.inputs:
        if name in right:
            wanted[name] = right[name]
            owners[name] = name
    return wanted, owners
