"""Pair what layers leave over: parameters of a user's own with those of layers, by their names.

A parameter of one module may be the weight of a layer of the other, of all layers in a list, or of
several layers: `w_up` of shape `(e, i, o)` those of `experts.0.up` to `experts.7.up`, and `qkv`
those of `q_proj`, `k_proj` and `v_proj`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from typing import NamedTuple

from flax_attn.convert.match.all_matchings import all_matchings
from flax_attn.convert.match.items import Item, Items
from flax_attn.convert.match.matcher import Evidence, Matching
from flax_attn.convert.match.names import key_of
from flax_attn.convert.match.pairing import PairedTensor
from flax_attn.convert.match.patterns import (
    first_sizes,
    fitting,
    fitting_of_several,
    fitting_patches,
    fitting_to_join,
    of_list,
    of_parts,
    places_of,
    sizes_of_patches,
)
from flax_attn.convert.match.tree import (
    NORMS,
    PARAMETER,
    STACKED,
    Group,
    Layer,
    Tensor,
)
from flax_attn.convert.rules import Rule

# Layers whose parameters are known to hold one weight each, in an order of axes that is known.
_PLAIN = {PARAMETER, "Linear", "Conv", "ConvTranspose", "Embedding", "BatchNorm", *NORMS}
# Of these two either may come first. Query, key and value are never tried in another order.
_EITHER_FIRST = "gate_up"


class Order(NamedTuple):
    """In which order a parameter holds several.

    Args:
        groups: number of groups, such as heads, each of which has a share of every one.
        is_reversed: whether the last comes first.
    """

    groups: int = 1
    is_reversed: bool = False


class Choice(NamedTuple):
    """What is taken for all pairs of which something is not known.

    Args:
        pattern: which of the patterns that fit.
        is_flipped: whether kernels are flipped that may be.
        orders: the order of several in one, by what these are called.
    """

    pattern: int = 0
    is_flipped: bool = False
    orders: Mapping[str, Order] = {}

    def pattern_of(self, patterns: Sequence[str]) -> str:
        """Return the pattern that is taken of some."""
        return patterns[min(self.pattern, len(patterns) - 1)]

    def order_of(self, fused: str) -> Order:
        """Return the order in which something holds several."""
        return self.orders.get(fused, Order())


class _Pair(NamedTuple):
    """Two items that belong together.

    Args:
        ours: item of the JAX side.
        theirs: item of the PyTorch side.
        evidence: evidence for the pair.
        patterns: patterns from ours to theirs that fit; `""` leaves it as it is.
    """

    ours: Item
    theirs: Item
    evidence: Evidence
    patterns: list[str]

    def row(self, choice: Choice | None) -> PairedTensor | None:
        """Return the row, with one of several patterns; None where none fits or is chosen."""
        if not self.patterns:
            return None
        if not self.problem:
            return self._row(Choice(), self.evidence)
        return self._row(choice, "outputs") if choice else None

    def _row(self, choice: Choice, evidence: Evidence) -> PairedTensor:
        rule = self._rule(choice.pattern_of(self.patterns), choice.order_of(self.fused))
        if choice.is_flipped and self.may_be_flipped:
            rule = replace(rule, flipped=places_of(rule.pattern))
        return _row(self.ours, self.theirs, rule, evidence)

    @property
    def fused(self) -> str:
        """What one side holds in one tensor and the other in several, such as "qkv"."""
        return self.ours.fused or self.theirs.fused

    @property
    def may_be_flipped(self) -> bool:
        """Whether the axes of space may be from the other end: of transposed convolutions."""
        # A layer of Flax says whether it is.
        kinds = self.ours.kind, self.theirs.kind
        return kinds == (PARAMETER, "ConvTranspose") and len(self.theirs.shape) > 2

    @property
    def orders(self) -> list[Order]:
        """The orders in which one side may hold what the other side has apart."""
        most = self._largest_group_count
        if self.fused == _EITHER_FIRST:
            return [Order(*order) for order in product((1, most), (False, True))]
        # No head has a single channel.
        counts = [count for count in range(1, most) if most % count == 0]
        return list(map(Order, counts or [1]))

    @property
    def _largest_group_count(self) -> int:
        if self.theirs.fused:
            return gcd(*self.theirs.widths)
        shapes = [tensor.shape for tensor in self.ours.tensors]
        return gcd(*first_sizes(self.patterns[0], shapes))

    def _rule(self, pattern: str, order: Order) -> Rule:
        rule = Rule(self.ours.names, self.theirs.name, pattern)
        if _are_patches(self.ours, self.theirs):
            return replace(rule, sizes=sizes_of_patches(pattern, self.theirs.shape))
        return self._with_order(rule, order) if self.fused else rule

    def _with_order(self, rule: Rule, order: Order) -> Rule:
        step = -1 if order.is_reversed else 1
        rule = replace(rule, groups=self._groups(order))
        if self.ours.fused:
            return replace(rule, ours=rule.ours[::step])
        shares = _shares(self.theirs.widths[::step])
        return replace(rule, names=self.theirs.labels[::step], shares=shares)

    def _groups(self, order: Order) -> int:
        """Return the groups of an order; 1 where the axis is not so many."""
        fits = self._largest_group_count % order.groups == 0
        return order.groups if fits else 1

    @property
    def problem(self) -> str:
        """What is not known of the pair; empty where all is, or where no pattern fits."""
        doubt = self._doubt if self.patterns else ""
        return f"flax {self.ours} may be torch {self.theirs}{doubt}" if doubt else ""

    @property
    def _doubt(self) -> str:
        if self.fused:
            return f". In which order is not known; one after the other: {self._usual_rule}"
        if len(self.patterns) > 1:
            return f" by {' or '.join(pattern or 'as it is' for pattern in self.patterns)}"
        if self.may_be_flipped:
            return f" by {self.patterns[0]}. Whether its kernel is flipped is not known"
        is_told = self.evidence != "shape" or self._share_words()
        return "" if is_told else ", but their names have no word in common"

    @property
    def _usual_rule(self) -> Rule:
        return self._rule(self.patterns[0], Order())

    def _share_words(self) -> bool:
        ours, theirs = self.ours.path, self.theirs.path
        # Some words, such as "fc", say something only if both names are the same.
        return ours == theirs or not set(key_of(ours).words).isdisjoint(key_of(theirs).words)


class LeftOver:
    """What a matching left over on both sides, as trees that can be matched by names.

    Args:
        found: the matching.
    """

    def __init__(self, found: Matching):
        ours = _tensors(found.ours)
        theirs = _tensors(found.theirs)
        self._ours = Items(ours, theirs)
        self._theirs = Items(theirs, ours)

    @property
    def trees(self) -> tuple[Group, Group]:
        """Both sides."""
        counted = self._ours.counted | self._theirs.counted
        return self._ours.tree(counted), self._theirs.tree(counted)

    def rows(self, found: Matching, choice: Choice | None = None) -> list[PairedTensor]:
        """Return a row for each pair of a matching of the trees.

        Args:
            found: the matching.
            choice: what is taken where something is not known, such as whether a square matrix is
                transposed; None leaves out pairs of which something is not known.
        """
        rows = [pair.row(choice) for pair in self._pairs(found)]
        return [row for row in rows if row is not None]

    def possible_rows(self) -> Iterator[list[PairedTensor]]:
        """Yield the rows of every matching of the trees, with each choice."""
        for found in all_matchings(*self.trees):
            pairs = list(self._pairs(found))
            for choice in _choices(pairs):
                yield self.rows(found, choice)

    def problems(self, found: Matching) -> Iterator[str]:
        """Yield a line for each pair of a matching of which something is not known."""
        return (pair.problem for pair in self._pairs(found) if pair.problem)

    def _pairs(self, found: Matching) -> Iterator[_Pair]:
        """Yield what a matching pairs."""
        for one, other, evidence in found.pairs:
            ours = self._ours.by_key[_key(one)]
            theirs = self._theirs.by_key[_key(other)]
            if _may_be_one(ours, theirs, evidence):
                yield _Pair(ours, theirs, evidence, _patterns(ours, theirs))


def _choices(pairs: Sequence[_Pair]) -> Iterator[Choice]:
    """Yield every choice for some pairs; those of the same kind are taken alike."""
    most = max((len(pair.patterns) for pair in pairs), default=1)
    may_be_flipped = any(pair.may_be_flipped for pair in pairs)
    flips = (False, True) if may_be_flipped else (False,)
    orders = _orders(pairs)
    for taken in product(*orders.values()):
        by_name = dict(zip(orders, taken, strict=True))
        for pattern, is_flipped in product(range(most), flips):
            yield Choice(pattern, is_flipped, by_name)


def _orders(pairs: Sequence[_Pair]) -> dict[str, dict[Order, None]]:
    """Return the orders in which a tensor may hold several, by what these are called."""
    orders: dict[str, dict[Order, None]] = defaultdict(dict)
    for pair in pairs:
        if pair.fused and pair.patterns:
            orders[pair.fused] |= dict.fromkeys(pair.orders)
    return orders


def _shares(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the shares of an axis, which do not depend on the width of a head; none if equal."""
    unit = gcd(*widths)
    shares = tuple(width // unit for width in widths)
    return shares if max(shares) > 1 else ()


def _may_be_one(ours: Item, theirs: Item, evidence: Evidence) -> bool:
    """Whether two items may be the same parameter, though their layers are of two kinds."""
    if evidence == "shape" and ours.is_bias != theirs.is_bias:
        return False
    of_several = ours.is_list or theirs.is_list or ours.fused or theirs.fused
    return bool(of_several) or ours.is_own or theirs.is_own or _are_patches(ours, theirs)


def _are_patches(ours: Item, theirs: Item) -> bool:
    """Whether one is of a convolution, and the other one may be of a linear layer over patches."""
    kinds = {ours.kind, theirs.kind}
    return "Conv" in kinds and not kinds.isdisjoint(("Linear", PARAMETER))


def _key(layer: Layer) -> str:
    return layer.parts["value"].tensor.name


def _tensors(layers: Iterable[Layer]) -> dict[Tensor, str]:
    """Return the tensors of some layers, each with the kind of its layer."""
    plain = [layer for layer in layers if layer.kind.removeprefix(STACKED) in _PLAIN]
    parts = [(part, layer.kind) for layer in plain for part in layer.parts.values()]
    pieces = Counter(part.tensor for part, _ in parts)
    # Of a tensor that is in pieces, all are left over or none.
    return {part.tensor: kind for part, kind in parts if pieces[part.tensor] == part.pieces}


def _patterns(ours: Item, theirs: Item) -> list[str]:
    """Return the patterns from an item to another one that their shapes allow."""
    is_kernel = ours.names[0].endswith("kernel")
    if ours.fused or theirs.fused:
        return _patterns_of_several(ours, theirs, is_kernel)
    if _are_patches(ours, theirs) and len(ours.shape) != len(theirs.shape):
        return fitting_patches(ours.shape, theirs.shape, is_kernel)
    return _with_list(_patterns_of_one(ours, theirs, is_kernel), ours, theirs)


def _patterns_of_several(ours: Item, theirs: Item, is_kernel: bool) -> list[str]:
    count = len(theirs.tensors)
    if count > 1:
        return fitting_of_several(ours.shape, theirs.shape, is_kernel, count)
    shapes = [tensor.shape for tensor in ours.tensors]
    return fitting_to_join(shapes, theirs.shape, is_kernel)


def _patterns_of_one(ours: Item, theirs: Item, is_kernel: bool) -> list[str]:
    """Return the patterns for one tensor, or for one of a list."""
    counts = ours.is_list or theirs.is_list
    is_transposed = theirs.kind == "ConvTranspose"
    found = fitting(ours.shape[counts:], theirs.shape[counts:], is_kernel, is_transposed)
    # The rows of a table are those of its ids everywhere.
    is_table = "Embedding" in (ours.kind, theirs.kind)
    return [""] if is_table and "" in found else found


def _with_list(patterns: list[str], ours: Item, theirs: Item) -> list[str]:
    """Return patterns of one tensor as those of a list, if one side is a list."""
    if theirs.is_list:
        return list(map(of_list, patterns))
    rank = len(ours.shape) - 1
    return [of_parts(pattern, rank) for pattern in patterns] if ours.is_list else patterns


def _row(ours: Item, theirs: Item, rule: Rule, evidence: Evidence) -> PairedTensor:
    by_name = {tensor.name: tensor.shape for tensor in ours.tensors}
    return PairedTensor(
        kind=PARAMETER,
        rule=rule,
        shapes=tuple(by_name[name] for name in rule.ours),
        shape=theirs.shape,
        evidence=evidence,
        trainable=theirs.tensors[0].trainable,
    )
