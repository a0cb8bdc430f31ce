"""Find where two sides differ, node by node, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.activations import Activations, flax_cotangents, record
from flax_attn.parity.trace.causes import cast_of, causes_of
from flax_attn.parity.trace.divergence import Divergence, Node
from flax_attn.parity.trace.gradient_causes import detached, gradient_causes
from flax_attn.parity.trace.norms import norms_at_an_offset
from flax_attn.parity.trace.structure import (
    UNKNOWN,
    head_causes,
    in_another_batch,
    without_what_follows,
)
from flax_attn.parity.trace.substitute import Evidence, relative, rerun

Errors = Mapping[str, float]


def localise(pair: Pair, norms: bool = False) -> Divergence:
    """Return where the two sides of a pair differ, and why. JAX must have x64 enabled.

    Both run once and every node is compared. Then Flax runs again on PyTorch's values, which tells
    the nodes that are wrong from those that inherit an error. To what these compute, known formulas
    are fitted.

    Args:
        pair: pair of modules.
        norms: whether the causes include norms that differ by themselves on features with a large
            mean.

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
    pair, found = in_another_batch(pair, record(pair))
    evidence = rerun(found, pair.plain.outputs)
    errors = {name: relative(found.flax[name], found.torch[name]) for name in found.shared}
    agree = max(errors.values(), default=0.0) <= tolerance.FORWARD
    cotangents = _cotangents(pair, found) if agree else ({}, {})
    backward = tolerance.gradient_errors(*cotangents)
    nodes = tuple(
        _node(name, i, found, errors, evidence, backward) for i, name in enumerate(found.shared)
    )
    wrong = [evidence[node.name] for node in nodes if node.locally_wrong]
    heads = head_causes(found)
    causes = [line for one in wrong for line in causes_of(one, pair.weights, found.lower)]
    causes = [*heads, *without_what_follows(causes, heads)]
    causes += _norm_causes(pair, found) if norms else []
    first = next((node for node in nodes if node.differs), None)
    if first and not causes and (cast := cast_of(first.name, max(errors.values()), found.lower)):
        causes = [
            cast
        ]  # of an input, before it reaches the node, if it explains all that follows from it
    where = Divergence(nodes, found.unpaired)
    if where.backward:
        causes += detached(where.backward.name, *cotangents)
    elif agree:
        causes += _gradient_causes(pair)
    return replace(where, causes=tuple(dict.fromkeys(causes)))


def _norm_causes(pair: Pair, found: Activations) -> list[str]:
    wrong = (evidence for evidence, _ in norms_at_an_offset(pair))
    lines = [line for evidence in wrong for line in causes_of(evidence, pair.weights, found.lower)]
    return [
        line for line in lines if UNKNOWN not in line
    ]  # which the node itself says, if it is wrong there


def _gradient_causes(pair: Pair) -> list[str]:
    reference = {name: g for name, g in pair.reference.gradients.items() if name in pair.trainable}
    return gradient_causes(pair.flax64.gradients, reference)


def _node(
    name: str,
    order: int,
    found: Activations,
    free: Errors,
    evidence: Mapping[str, Evidence],
    backward: Errors,
) -> Node:
    ours, theirs = found.ours[name], found.theirs[name]
    local = evidence[name].error if name in evidence else np.nan
    errors = (free[name], local, backward.get(name, np.nan))
    return Node(
        name,
        theirs.kind,
        order,
        *errors,
        tolerance.FORWARD,
        theirs.output.shape,
        ours.dtype,
        theirs.dtype,
    )


def _cotangents(pair: Pair, found: Activations) -> tuple[Arrays, Arrays]:
    # Only where the outputs agree: elsewhere every cotangent differs, and that says nothing.
    ours, theirs = flax_cotangents(pair, found), found.cotangents
    names = [
        name for name in found.shared if name in theirs and ours[name].shape == theirs[name].shape
    ]
    return {name: ours[name] for name in names}, {name: theirs[name] for name in names}
