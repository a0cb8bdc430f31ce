"""Where two sides part: the first node that differs, and the nodes that make it differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.check import finite
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.activations import Taps, flax_cotangents, record
from flax_attn.parity.trace.diagnose import diagnose
from flax_attn.parity.trace.hooks import spoken
from flax_attn.parity.trace.substitute import Evidence, relative, resynchronise

Errors = Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """A submodule or a step that both sides have.

    Args:
        name: as both sides share it: `"blocks.3.norm1"`, `"blocks.3.att/scores"`; the whole module is `"."`.
        kind: `"module"` or `"step"`.
        order: of execution on the PyTorch side; a module comes after what is inside.
        free: relative error of its output when both sides run freely.
        own: the same when Flax is given what PyTorch has, so that it is this node's alone; NaN where that cannot be.
        backward: relative error of the cotangent that arrives at its output; NaN where outputs differ already.
        limit: the rule for `free` and `own`.
        shape: of its output.
        flax_dtype: what Flax computed it in.
        torch_dtype: what PyTorch computed it in.
    """

    name: str
    kind: str
    order: int
    free: float
    own: float
    backward: float
    limit: float
    shape: tuple[int, ...]
    flax_dtype: str
    torch_dtype: str

    @property
    def diverges(self) -> bool:
        """Whether its output differs."""
        return self.free > self.limit

    @property
    def guilty(self) -> bool:
        """Whether it makes a difference itself; a container only by what it does between its submodules."""
        return self.own > self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return the node for JSON; what is infinite or NaN is None there."""
        return finite(vars(self)) | {"shape": list(self.shape), "diverges": self.diverges, "guilty": self.guilty}


@dataclass(frozen=True)
class Divergence:
    """Where two sides part.

    Args:
        nodes: of both sides, in order of execution.
        unpaired: what one side alone has, or lays out differently.
        diagnoses: what is known to be the matter, one sentence each.
    """

    nodes: tuple[Node, ...]
    unpaired: tuple[str, ...] = ()
    diagnoses: tuple[str, ...] = ()

    @property
    def first(self) -> Node | None:
        """The first node whose output differs."""
        return next((node for node in self.nodes if node.diverges), None)

    @property
    def guilty(self) -> tuple[Node, ...]:
        """The nodes that make a difference themselves, in order of execution."""
        return tuple(node for node in self.nodes if node.guilty)

    @property
    def backward(self) -> Node | None:
        """Where the backward pass goes wrong if the forward pass does not: the last node with a wrong cotangent."""
        wrong = [node for node in self.nodes if node.backward > tolerance.GRADIENT]
        return None if self.first or not wrong else wrong[-1]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "first": self.first and self.first.name,
            "guilty": [node.name for node in self.guilty],
            "backward": self.backward and self.backward.name,
            "diagnoses": list(self.diagnoses),
            "unpaired": list(self.unpaired),
            "nodes": [node.as_dict() for node in self.nodes],
        }

    def __str__(self) -> str:
        """Return a few lines for a failing test."""
        if self.backward:
            return (
                f"all outputs agree; the backward pass goes wrong after {spoken(self.backward.name)}, the last node "
                f"with a wrong cotangent: error {self.backward.backward:.3g}, the rule is {tolerance.GRADIENT:.0e}"
            )
        first = self.first
        if first is None:
            return f"none of {len(self.nodes)} nodes differs"
        lines = [f"first to differ: {spoken(first.name)}, error {first.free:.3g}, the rule is {first.limit:.0e}"]
        lines += [f"at fault: {spoken(node.name)}, error {node.own:.3g} of its own" for node in self.guilty]
        return "\n".join([*lines, *self.diagnoses])


def localise(pair: Pair) -> Divergence:
    """Return where the two sides of a pair part. JAX must have x64 enabled.

    Both run once and every node is compared. Then Flax runs again on PyTorch's values, which tells the nodes that are
    wrong from those that inherit an error; for these the known faults are tried.

    Raises:
        NotRun: if a side is but a record of an earlier run.

    Example:
        >>> from flax_attn.parity.compare import on_cpu
        >>> from flax_attn.proof.variants import select
        >>> from flax_attn.proof.prove import pair_of
        >>> with on_cpu():
        ...     pair = pair_of(*select(["block_gpt2"]))
        ...     pair.torch.module.norm1.eps = 1e-6
        ...     divergence = localise(pair)
        >>> [node.name for node in divergence.guilty]
        ['norm1']
    """
    taps = record(pair)
    evidence = resynchronise(pair, taps)
    free = {name: relative(taps.flax[name], taps.torch[name]) for name in taps.shared}
    backward = _backward_errors(pair, taps) if max(free.values(), default=0.0) <= tolerance.FORWARD else {}
    nodes = tuple(_node(name, i, taps, free, evidence, backward) for i, name in enumerate(taps.shared))
    guilty = [evidence[node.name] for node in nodes if node.guilty]
    return Divergence(nodes, taps.apart, tuple(line for found in guilty for line in diagnose(found, pair.weights)))


def _node(name: str, order: int, taps: Taps, free: Errors, evidence: Mapping[str, Evidence], backward: Errors) -> Node:
    ours, theirs = taps.ours[name], taps.theirs[name]
    own = evidence[name].own if name in evidence else np.nan
    errors = (free[name], own, backward.get(name, np.nan))
    return Node(name, theirs.kind, order, *errors, tolerance.FORWARD, theirs.output.shape, ours.dtype, theirs.dtype)


def _backward_errors(pair: Pair, taps: Taps) -> dict[str, float]:
    # Only where the outputs agree: elsewhere every cotangent differs, and that says nothing.
    ours, theirs = flax_cotangents(pair, taps), taps.cotangents
    names = [name for name in taps.shared if name in theirs and ours[name].shape == theirs[name].shape]
    return tolerance.gradient_errors({name: ours[name] for name in names}, {name: theirs[name] for name in names})
