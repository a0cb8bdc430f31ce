"""`auto`: pair the parameters of a JAX and a PyTorch model, from the models themselves."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from flax import nnx

from attn_spec.checks import nearest
from flax_attn.convert.api import axes_of
from flax_attn.convert.entry import Entry
from flax_attn.convert.match.all_matchings import all_matchings
from flax_attn.convert.match.jax_tree import jax_tree
from flax_attn.convert.match.left_over import Choice, LeftOver
from flax_attn.convert.match.matcher import Matching, main_part, match
from flax_attn.convert.match.pairing import PairedTensor, Pairing, transformation
from flax_attn.convert.match.report import message, problems_of
from flax_attn.convert.match.torch_tree import READINGS, is_torch_module, state_names, torch_tree
from flax_attn.convert.match.tree import (
    PARAMETER,
    RECURRENT,
    Group,
    Tensor,
    TensorPart,
    layers_of,
    pointwise_as_linear,
    tensors_of,
)
from flax_attn.convert.planning import apply_rules, no_axes
from flax_attn.convert.rules import ConversionError, Rule, Shape


class Taken(NamedTuple):
    """The names of the tensors that are paired already."""

    ours: set[str]
    theirs: set[str]


def auto(flax_module: Any, torch_module: Any, *, rules: Sequence[Rule] = ()) -> Pairing:
    """Pair the parameters of a JAX and a PyTorch model: return a layout that needs no rules.

    Layers are paired by kind and by the shapes of what they hold. A convolution over single places
    may be a linear layer on the other side. Where several fit, they are paired by name (`W_query`,
    `q_proj` and `query` mean the same), by number (`norm1` and `ln_1`), or by order where both
    modules hold the same kinds of layers in the same order. Query, key and value are never told
    apart by order. What PyTorch packs (`in_proj_weight`, weights of recurrent layers) is paired
    with a parameter of your own module that has its name and shape.

    A parameter of your own that is left over is paired with what is left over of a layer, such as
    `w_up` with `up.weight`, or with all layers of a list: `w_up` of shape `(e, i, o)` with
    `experts.*.up.weight`. Print the result to see the pairs.

    Args:
        flax_module: an NNX module, a bound Linen module, an Equinox module, or a function that its
            parameters are bound to by `jax.tree_util.Partial`.
        torch_module: an `nn.Module`.
        rules: rules for parameters that you pair yourself; `auto` pairs the others.

    Returns:
        A `Layout` for `load_state_dict`, `state_dict`, `parity.compare` and wherever else a layout
        is accepted. It includes the running statistics of BatchNorm. What only PyTorch's state
        dict holds, such as masks, is ignored.

    Raises:
        ConversionError: if a parameter has no partner or several that fit equally well, if the
            shapes of a matrix of your own do not tell whether it is transposed, or if a rule does
            not fit: a line for each, and for each rule that finds no parameter.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> print(auto(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)))
        2 parameters paired
        torch   kind    shape   flax    shape   flax to torch  settled by
        weight  Linear  (2, 3)  kernel  (3, 2)  i o -> o i     shape
        bias    Linear  (2,)    bias    (2,)    same           shape
    """
    _check_torch_module(torch_module)
    known = _by_rules(rules, flax_module, torch_module)
    known += _packed(flax_module, torch_module, _names(known))
    rest = _rest(flax_module, torch_module, known, rules)
    return _pairing([*known, *rest], state_names(torch_module))


def _rest(
    flax_module: Any,
    torch_module: Any,
    known: Sequence[PairedTensor],
    rules: Sequence[Rule],
) -> list[PairedTensor]:
    """Return a row for each tensor that is not in those that are known."""
    found = _complete(flax_module, torch_module, _names(known))
    if found is not None:
        return _rows(found)
    left = _left_over(flax_module, torch_module, _names(known))
    by_name = match(*left.trees)
    rows = left.rows(by_name)
    taken = _names([*known, *rows])
    found = _complete(flax_module, torch_module, taken)
    if found is None:
        problems = [*_unused(rules, flax_module), *left.problems(by_name)]
        # What may be a pair has a line of its own.
        told = _names([*known, *left.rows(by_name, Choice())])
        raise _unpaired(flax_module, torch_module, told, problems)
    return [*rows, *_rows(found)]


def _names(rows: Sequence[PairedTensor]) -> Taken:
    """Return the names of the tensors in some rows, ours and theirs."""
    ours = set().union(*(row.ours for row in rows))
    theirs = set().union(*(row.their_names for row in rows))
    return Taken(ours, theirs)


def _packed(flax_module: Any, torch_module: Any, taken: Taken) -> list[PairedTensor]:
    """Return a row for each tensor that PyTorch packs and a user's own module has under its name.

    Such as `lstm.weight_ih_l0`: no layer of JAX packs gates, or query, key and value, as it does.
    """
    own = _parameters(jax_tree(flax_module, taken.ours))
    rows = {}
    for kind, tensor in _packed_tensors(torch_tree(torch_module, taken.theirs)):
        # Equal in shape, too: under PyTorch's name a port may keep another layout.
        if own.get(tensor.name) == tensor:
            rows[tensor.name] = _row_by_name(kind, tensor)
    return list(rows.values())


def _parameters(tree: Group) -> dict[str, Tensor]:
    found = {}
    for layer in layers_of(tree):
        if layer.kind == PARAMETER:
            tensor = layer.parts["value"].tensor
            found[tensor.name] = tensor
    return found


def _packed_tensors(tree: Group) -> Iterator[tuple[str, Tensor]]:
    for layer in layers_of(tree):
        for part in layer.parts.values():
            if part.pieces > 1 or layer.kind in RECURRENT:
                yield layer.kind, part.tensor


def _row_by_name(kind: str, tensor: Tensor) -> PairedTensor:
    rule = Rule((tensor.name,), tensor.name)
    return PairedTensor(kind, rule, (tensor.shape,), tensor.shape, "name")


def _check_torch_module(module: Any) -> None:
    if not is_torch_module(module):
        raise ConversionError(
            f"parameters are paired with those of an nn.Module; got {type(module).__name__}. "
            "Give a layout or rules instead"
        )


def _pairing(rows: list[PairedTensor], names: Sequence[str]) -> Pairing:
    """Return the layout that rows make, in the order of a state dict with these names."""
    by_name = {name: row for row in rows for name in row.their_names}
    in_order = dict.fromkeys(by_name[name] for name in names if name in by_name)
    ignored = sorted(set(names) - by_name.keys())
    # A name is looked for under any prefix, so the longer of two that end alike has to come first.
    longest = sorted(in_order, key=lambda row: -row.ours[0].count("."))
    rules = tuple(row.rule for row in longest)
    return Pairing(rules, "|".join(map(re.escape, ignored)), rows=tuple(in_order))


def _unpaired(
    flax_module: Any, torch_module: Any, taken: Taken, problems: Iterable[str]
) -> ConversionError:
    """Return the error that says why tensors have no partner, with these problems first."""
    _, pointwise, *_ = _trees(flax_module, torch_module, taken)
    found = match(*pointwise, main_part)
    ours = type(flax_module).__name__
    theirs = type(torch_module).__name__
    heading = f"the parameters of {ours} and {theirs} do not pair:"
    lines = [*problems, *problems_of(found)]
    return ConversionError(message(heading, lines, found))


def _complete(flax_module: Any, torch_module: Any, taken: Taken) -> Matching | None:
    """Return the complete matching of all tensors that are not paired already; None without one."""
    for left, right in _trees(flax_module, torch_module, taken):
        found = match(left, right)
        if found.complete:
            return found
    return None


def _left_over(flax_module: Any, torch_module: Any, taken: Taken) -> LeftOver:
    """Return what layers leave over."""
    first = next(_trees(flax_module, torch_module, taken))
    return LeftOver(match(*first))


def _trees(flax_module: Any, torch_module: Any, taken: Taken) -> Iterator[tuple[Group, Group]]:
    """Yield both modules in each way to read their layers."""
    left = jax_tree(flax_module, taken.ours)
    # Where query, key and value are one projection on both sides, it is one layer.
    for recurrent, split in product(READINGS, (True, False)):
        right = torch_tree(torch_module, taken.theirs, split, recurrent)
        yield left, right
        yield pointwise_as_linear(left), pointwise_as_linear(right)


def possible_pairings(flax_module: Any, torch_module: Any) -> list[Pairing]:
    """Return every pairing that names, kinds and shapes allow, that in order of definition first.

    Repeated layers are paired alike. It is none where something has no partner, where query, key
    and value cannot be told apart, and where there are more pairings than are tried.

    Args:
        flax_module: as for `auto`.
        torch_module: as for `auto`.
    """
    names = state_names(torch_module)
    pairings = [_pairing(rows, names) for rows in _possible_rows(flax_module, torch_module)]
    return [one for i, one in enumerate(pairings) if one not in pairings[:i]]


def _possible_rows(flax_module: Any, torch_module: Any) -> Iterator[list[PairedTensor]]:
    known = _packed(flax_module, torch_module, _names([]))
    left = _left_over(flax_module, torch_module, _names(known))
    for own in left.possible_rows():
        rows = [*known, *own]
        matchings = _possible(flax_module, torch_module, _names(rows))
        yield from ([*rows, *_rows(found)] for found in matchings)


def _possible(flax_module: Any, torch_module: Any, taken: Taken) -> list[Matching]:
    """Return every matching that is possible in the first way to read the layers that has one."""
    for left, right in _trees(flax_module, torch_module, taken):
        found = all_matchings(left, right)
        if found:
            return found
    return []


def _by_rules(rules: Sequence[Rule], flax_module: Any, torch_module: Any) -> list[PairedTensor]:
    """Return the rows that the user's rules make."""
    ours = tensors_of(jax_tree(flax_module))
    entries = _entries(rules, flax_module, ours)
    _check_fit(entries, tensors_of(torch_tree(torch_module)))
    return [_ruled(entry, ours[entry.ours[0]].trainable) for entry in entries]


def _entries(rules: Sequence[Rule], flax_module: Any, ours: Mapping[str, Tensor]) -> list[Entry]:
    axes = axes_of(flax_module, list(rules)) if isinstance(flax_module, nnx.Module) else no_axes
    shapes = {name: tensor.shape for name, tensor in ours.items()}
    entries, _ = apply_rules(shapes, rules, axes)
    return entries


def _unused(rules: Sequence[Rule], flax_module: Any) -> Iterator[str]:
    """Yield a line for each rule that finds no parameter; it may be one for other modules."""
    ours = tensors_of(jax_tree(flax_module))
    used = [entry.rule for entry in _entries(rules, flax_module, ours)]
    for rule in rules:
        if rule not in used:
            names = ", ".join(rule.ours)
            yield f"the rule for {names} finds no parameter{nearest(names, ours)}"


def _check_fit(entries: Sequence[Entry], theirs: Mapping[str, Tensor]) -> None:
    lines = list(chain.from_iterable(_misfits(entry, theirs) for entry in entries))
    if lines:
        raise ConversionError("\n  ".join(["these rules do not fit the PyTorch module:", *lines]))


def _ruled(entry: Entry, trainable: bool) -> PairedTensor:
    return PairedTensor(
        kind="-",
        rule=entry.named_rule,
        shapes=entry.shapes,
        shape=entry.shape,
        evidence="rule",
        trainable=trainable,
    )


def _misfits(entry: Entry, theirs: Mapping[str, Tensor]) -> Iterator[str]:
    names = ", ".join(entry.ours)
    for name, shape in entry.tensors.items():
        misfit = _misfit(name, shape, theirs.get(name))
        if misfit:
            yield f"{names}: {misfit}"


def _misfit(name: str, shape: Shape, tensor: Tensor | None) -> str:
    if tensor is None:
        return f"there is no parameter {name}"
    if tensor.shape != shape:
        return f"{name} is {tensor.shape}, the rule makes {shape}"
    return ""


class _PairedPart(NamedTuple):
    """A part of ours and the piece of a PyTorch tensor that it becomes."""

    kind: str
    ours: TensorPart
    theirs: TensorPart
    evidence: str

    @property
    def pattern(self) -> str:
        return transformation(self.ours.axes, self.theirs.axes, self.ours.merged)


def _rows(found: Matching) -> list[PairedTensor]:
    """Return one row for each tensor of the PyTorch side."""
    made: dict[str, list[_PairedPart]] = defaultdict(list)
    for ours, theirs, evidence in found.pairs:
        for role, part in theirs.parts.items():
            pair = _PairedPart(theirs.kind, ours.parts[role], part, evidence)
            made[part.tensor.name].append(pair)
    return [_row(sorted(pairs, key=lambda pair: pair.theirs.piece)) for pairs in made.values()]


def _row(pairs: Sequence[_PairedPart]) -> PairedTensor:
    first = pairs[0]
    tensor = first.theirs.tensor
    ours = [pair.ours.tensor for pair in pairs]
    names = tuple(own.name for own in ours)
    shapes = tuple(own.shape for own in ours)
    patterns = {pair.pattern for pair in pairs}
    if len(patterns) > 1:
        listed = ", ".join(names)
        raise ConversionError(f"{listed} lie differently and make one tensor, {tensor.name}")
    # What PyTorch packs in one tensor is joined along the axis of its pieces.
    axis = first.theirs.axis
    flipped = first.ours.flipped
    rule = Rule(names, tensor.name, first.pattern, axis, flipped=flipped)
    return PairedTensor(
        kind=first.kind,
        rule=rule,
        shapes=shapes,
        shape=tensor.shape,
        evidence=first.evidence,
        trainable=tensor.trainable,
    )
