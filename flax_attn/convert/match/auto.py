"""`auto`: pair the parameters of a JAX and a PyTorch model, from the models themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flax import nnx

from flax_attn.convert.api import axes_of
from flax_attn.convert.match.jax_tree import jax_tree
from flax_attn.convert.match.matcher import Matching, main_part, match
from flax_attn.convert.match.pairing import PairedTensor, Pairing, transformation
from flax_attn.convert.match.report import message, problems_of
from flax_attn.convert.match.torch_tree import is_torch_module, state_names, torch_tree
from flax_attn.convert.match.tree import Part, Tensor, tensors_of
from flax_attn.convert.rules import ConversionError, Entry, Rule, apply_rules, no_axes


def auto(flax_module: Any, torch_module: Any, *, rules: Sequence[Rule] = ()) -> Pairing:
    """Pair the parameters of a JAX and a PyTorch model: return a layout that needs no rules.

    Layers are paired by kind and by the shapes of what they hold; where several fit, by name
    (`W_query`, `q_proj` and `query` mean the same), by number (`norm1` and `ln_1`), or by order
    where both modules hold the same kinds of layers in the same order. Query, key and value are
    never told apart by order. Print the result to see the pairs.

    Args:
        flax_module: an NNX module, a bound Linen module or an Equinox module.
        torch_module: an `nn.Module`.
        rules: rules for parameters that you pair yourself; `auto` pairs the others.

    Returns:
        A `Layout` for `load_state_dict`, `state_dict`, `parity.compare` and wherever else a layout
        is accepted. It includes the running statistics of BatchNorm. What only PyTorch's state
        dict holds, such as masks, is ignored.

    Raises:
        ConversionError: if a parameter has no partner or several that fit equally well: a line for
            each.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> print(auto(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)))
        2 parameters paired
        torch   kind    shape   flax    shape   flax to torch  settled by
        weight  Linear  (2, 3)  kernel  (3, 2)  i o -> o i     shape
        bias    Linear  (2,)    bias    (2,)    same           shape
    """
    if not is_torch_module(torch_module):
        raise ConversionError(
            f"parameters are paired with those of an nn.Module; got {type(torch_module).__name__}. "
            "Give a layout or rules instead"
        )
    by_rules = _by_rules(rules, flax_module, torch_module)
    taken = {name for row in by_rules for name in row.ours}, {row.theirs for row in by_rules}
    rows = [*by_rules, *_rows(_match(flax_module, torch_module, *taken))]
    places = {name: n for n, name in enumerate(state_names(torch_module))}
    rows.sort(key=lambda row: places[row.theirs])
    ignored = places.keys() - {row.theirs for row in rows}
    # A name is looked for under any prefix, so the longer of two that end alike has to come first.
    made = sorted((_rule(row) for row in rows), key=lambda rule: -rule.ours[0].count("."))
    return Pairing(tuple(made), "|".join(map(re.escape, sorted(ignored))), rows=tuple(rows))


def _match(
    flax_module: Any, torch_module: Any, ours: Collection[str], theirs: Collection[str]
) -> Matching:
    """Return the complete matching of all tensors but these."""
    left = jax_tree(flax_module, ours)
    # Where query, key and value are one projection on both sides, it is one layer.
    rights = [torch_tree(torch_module, theirs, split) for split in (True, False)]
    for right in rights:
        found = match(left, right)
        if found.complete:
            return found
    found = match(left, rights[0], main_part)
    heading = (
        f"the parameters of {type(flax_module).__name__} and {type(torch_module).__name__} do not"
        " pair:"
    )
    raise ConversionError(message(heading, problems_of(found), found))


def _by_rules(rules: Sequence[Rule], flax_module: Any, torch_module: Any) -> list[PairedTensor]:
    """Return the rows that the user's rules make."""
    if not rules:
        return []
    ours, theirs = tensors_of(jax_tree(flax_module)), tensors_of(torch_tree(torch_module))
    axes = axes_of(flax_module, list(rules)) if isinstance(flax_module, nnx.Module) else no_axes
    entries, _ = apply_rules({name: tensor.shape for name, tensor in ours.items()}, rules, axes)
    wrong = [_misfit(entry, theirs.get(entry.theirs)) for entry in entries]
    if lines := [line for line in wrong if line]:
        raise ConversionError("\n  ".join(["these rules do not fit the PyTorch module:", *lines]))
    return [
        PairedTensor(
            "-",
            e.ours,
            e.shapes,
            e.theirs,
            e.shape,
            e.rule.pattern,
            "rule",
            axis=e.rule.axis,
            trainable=ours[e.ours[0]].trainable,
        )
        for e in entries
    ]


def _misfit(entry: Entry, tensor: Tensor | None) -> str | None:
    if tensor is None:
        return f"{', '.join(entry.ours)}: there is no parameter {entry.theirs}"
    if tensor.shape != entry.shape:
        return (
            f"{', '.join(entry.ours)}: {entry.theirs} is {tensor.shape}, the rule makes"
            f" {entry.shape}"
        )
    return None


def _rows(found: Matching) -> list[PairedTensor]:
    """Return one row for each tensor of the PyTorch side."""
    made: dict[str, list[tuple[str, Part, Part, str]]] = defaultdict(list)
    for ours, theirs, evidence in found.pairs:
        for role, part in theirs.parts.items():
            made[part.tensor.name].append((theirs.kind, ours.parts[role], part, evidence))
    return [_row(sorted(pieces, key=lambda piece: piece[2].piece)) for pieces in made.values()]


def _row(pieces: Sequence[tuple[str, Part, Part, str]]) -> PairedTensor:
    kind, _, theirs, evidence = pieces[0]
    patterns = {transformation(ours.axes, part.axes, ours.merged) for _, ours, part, _ in pieces}
    names = tuple(ours.tensor.name for _, ours, _, _ in pieces)
    if len(patterns) > 1:
        raise ConversionError(
            f"{', '.join(names)} lie differently and make one tensor, {theirs.tensor.name}"
        )
    return PairedTensor(
        kind,
        names,
        tuple(ours.tensor.shape for _, ours, _, _ in pieces),
        theirs.tensor.name,
        theirs.tensor.shape,
        patterns.pop(),
        evidence,
        theirs.axis,
        theirs.tensor.trainable,
    )


def _rule(row: PairedTensor) -> Rule:
    return Rule(row.ours, row.theirs, row.pattern, row.axis)
