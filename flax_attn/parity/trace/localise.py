"""Find where two sides differ, node by node, and why."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.activations import Activations, flax_cotangents, record
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.divergence import Divergence, Node
from flax_attn.parity.trace.substitute import Evidence, relative, rerun

Errors = Mapping[str, float]


def localise(pair: Pair) -> Divergence:
    """Return where the two sides of a pair differ, and why. JAX must have x64 enabled.

    Both run once and every node is compared. Then Flax runs again on PyTorch's values, which tells the nodes that are
    wrong from those that inherit an error. To what these compute, known formulas are fitted.

    Raises:
        NotRun: if a side is the recording of an earlier run.

    Example:
        >>> import jax, torch
        >>> from flax_attn.parity import compare
        >>> from flax_attn.parity.cpu import on_cpu
        >>> pair = compare(jax.nn.gelu, torch.nn.GELU().eval(), [(5, 3)], checks=["forward"]).pair
        >>> with on_cpu():
        ...     localise(pair).causes
        ('the whole module: flax has tanh GELU of input, torch has exact GELU of input',)
    """
    found = record(pair)
    evidence = rerun(found)
    errors = {name: relative(found.flax[name], found.torch[name]) for name in found.shared}
    backward = _backward_errors(pair, found) if max(errors.values(), default=0.0) <= tolerance.FORWARD else {}
    nodes = tuple(_node(name, i, found, errors, evidence, backward) for i, name in enumerate(found.shared))
    wrong = [evidence[node.name] for node in nodes if node.locally_wrong]
    causes = [line for one in wrong for line in causes_of(one, pair.weights, found.lower)]
    return Divergence(nodes, found.unpaired, tuple(dict.fromkeys(causes)))


def _node(
    name: str, order: int, found: Activations, free: Errors, evidence: Mapping[str, Evidence], backward: Errors
) -> Node:
    ours, theirs = found.ours[name], found.theirs[name]
    local = evidence[name].error if name in evidence else np.nan
    errors = (free[name], local, backward.get(name, np.nan))
    return Node(name, theirs.kind, order, *errors, tolerance.FORWARD, theirs.output.shape, ours.dtype, theirs.dtype)


def _backward_errors(pair: Pair, found: Activations) -> dict[str, float]:
    # Only where the outputs agree: elsewhere every cotangent differs, and that says nothing.
    ours, theirs = flax_cotangents(pair, found), found.cotangents
    names = [name for name in found.shared if name in theirs and ours[name].shape == theirs[name].shape]
    return tolerance.gradient_errors({name: ours[name] for name in names}, {name: theirs[name] for name in names})
