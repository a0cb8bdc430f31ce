"""The intermediate values of both sides of a pair, on one tree of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import NotRun, Pair
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.hooks import ROOT, Listener, Record, Recorder, by_name, numpy64
from flax_attn.parity.trace.names import pair_paths

Names = Mapping[str, str]


@dataclass(frozen=True)
class Taps:
    """What both sides computed on the way, in float64 and eval mode.

    A node is a call of a submodule, or a step within one. It is called by its path on the PyTorch side, and the whole
    module is `"."`: `"blocks.3.norm1"`, `"blocks.3.att/scores"`; the second call is `"head#2"`. Nodes of one side alone
    start with `"flax:"` or `"torch:"`, and steps that the sides lay out differently are not here.

    Args:
        ours: the nodes of the Flax side, in order of execution.
        theirs: those of the PyTorch side.
        names: the shared name of each submodule of the Flax side, by its path there.
        apart: what cannot be compared, one line each.
        cotangents: of the PyTorch side, by name of the node at whose output they arrive.
    """

    ours: dict[str, Record]
    theirs: dict[str, Record]
    names: Names
    apart: tuple[str, ...] = ()
    cotangents: Arrays = field(default_factory=dict)

    @cached_property
    def flax(self) -> Arrays:
        """The outputs of all nodes of the Flax side, in order of execution."""
        return by_name(self.ours)

    @cached_property
    def torch(self) -> Arrays:
        """The outputs of all nodes of the PyTorch side, in order of execution."""
        return by_name(self.theirs)

    @cached_property
    def shared(self) -> list[str]:
        """The nodes of both sides, in PyTorch's order of execution."""
        return [name for name in self.theirs if name in self.ours]

    @cached_property
    def dtypes(self) -> dict[str, tuple[str, str]]:
        """The dtypes that Flax and PyTorch computed each shared node in."""
        return {name: (self.ours[name].dtype, self.theirs[name].dtype) for name in self.shared}

    @cached_property
    def attention(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The attention weights `(b, n, t, s)` of Flax and of PyTorch, where both have them."""
        names = [name for name in self.shared if name.split("#")[0].endswith("/weights")]
        return {name: (self.flax[name], self.torch[name]) for name in names}


def record(pair: Pair) -> Taps:
    """Return what both sides compute on the way, each run eagerly in float64 and eval mode.

    Raises:
        NotRun: if a side cannot be listened to, because it is but a record of an earlier run.

    Example:
        >>> from flax_attn.parity.compare import on_cpu
        >>> from flax_attn.proof.variants import select
        >>> from flax_attn.proof.prove import pair_of
        >>> with on_cpu():
        ...     taps = record(pair_of(*select(["causal"])))
        >>> taps.shared[:5]
        ['W_query', 'W_key', 'W_value', './query', './key']
        >>> list(taps.attention)
        ['./weights']
    """
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter
    from flax_attn.parity.trace import torch_hooks

    if not isinstance(pair.flax, JaxAdapter) or not isinstance(pair.torch, TorchAdapter):
        raise NotRun(
            "where two sides part is found by running both; one of these is the record of an earlier run. "
            "Compare where both frameworks are installed"
        )
    ours, theirs = jax_hooks.paths(pair.flax.built(), pair.flax.shapes), torch_hooks.paths(pair.torch.module)
    names = pair_paths(pair.entries, ours, theirs)
    there = {path: path for path in names.values()}
    torch, cotangents = torch_hooks.record(pair.torch, pair.inputs, pair.extras, pair.cotangents, there)
    recorder = Recorder("flax", names)
    jax_hooks.run(pair, recorder)
    return Taps(*_laid_out_alike(recorder.records, torch, names), cotangents)


class _Probe(Listener):
    """Adds zeros to the output of every node, to differentiate with respect to them."""

    def __init__(self, names: Names, zeros: Mapping[str, Any]):
        super().__init__("flax", names)
        self.zeros = zeros

    def left(self, frame, output):
        return self.stepped(frame.name, output)

    def stepped(self, name, value):
        return value + self.zeros[name] if name in self.zeros else value  # not there: laid out in another way


def flax_cotangents(pair: Pair, taps: Taps) -> Arrays:
    """Return the cotangents of the Flax side, by name of the node at whose output they arrive."""
    zeros = {name: jnp.zeros(record.output.shape, record.dtype) for name, record in taps.ours.items()}

    def weighted(zeros: Mapping[str, Any]) -> Any:
        outputs = jax_hooks.run(pair, _Probe(taps.names, zeros))
        return sum(jnp.sum(outputs[name] * c) for name, c in pair.cotangents.items())

    # Compiled, which is quicker than to compile the backward pass of every operation by itself.
    gradient = jax.jit(jax.grad(weighted), compiler_options={"xla_backend_optimization_level": 0})
    return {name: numpy64(cotangent) for name, cotangent in gradient(zeros).items()}


def _laid_out_alike(
    ours: dict[str, Record], theirs: dict[str, Record], names: Names
) -> tuple[dict[str, Record], dict[str, Record], Names, tuple[str, ...]]:
    """Return the nodes that can be compared, and a line for each of the others."""
    theirs = {name: _with_heads_apart(record, ours.get(name)) for name, record in theirs.items()}
    other = [
        name
        for name in theirs
        if name != ROOT and name in ours and ours[name].output.shape != theirs[name].output.shape
    ]
    lines = [f"{name}: flax {ours[name].output.shape}, torch {theirs[name].output.shape}" for name in other]
    for side, here, there in (("flax", ours, theirs), ("torch", theirs, ours)):
        alone = (name for name in here if name not in there)
        lines += [name if name.startswith(f"{side}:") else f"{side}:{name}" for name in alone]
    keep = [{name: r for name, r in side.items() if name not in other} for side in (ours, theirs)]
    return keep[0], keep[1], names, tuple(lines)


def _with_heads_apart(theirs: Record, ours: Record | None) -> Record:
    # torch.nn.MultiheadAttention folds batch and heads into one axis.
    folded = ours is not None and theirs.kind == "step" and ours.output.ndim == 4 and theirs.output.ndim == 3
    if ours is None or not folded or theirs.output.size != ours.output.size:
        return theirs
    return replace(theirs, output=rearrange(theirs.output, "(b n) t s -> b n t s", b=ours.output.shape[0]))
