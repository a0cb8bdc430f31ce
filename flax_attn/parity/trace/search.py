"""Find the operations that make the two runs differ: what they return is replaced, and all agrees.

A value of the JAX run is replaced by one of the PyTorch run, and what depends on it runs again.
Where that makes later values agree that did not, both are the same quantity, computed differently:
the difference lies between them and the last values that agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.align import Alignment, Repair, cone
from flax_attn.parity.trace.candidates import candidates
from flax_attn.parity.trace.constants import with_torch_constants
from flax_attn.parity.trace.exchanges import taken_otherwise
from flax_attn.parity.trace.explain import explain
from flax_attn.parity.trace.factors import with_joined_factors
from flax_attn.parity.trace.hypothesis import Hypothesis, grouped_by_kind
from flax_attn.parity.trace.loops import beside, with_steps_of, with_steps_together
from flax_attn.parity.trace.program import Node, Program
from flax_attn.parity.trace.repeats import with_repeats
from flax_attn.parity.trace.scans import turned_scan
from flax_attn.parity.trace.tables import explain_table, rounded_tables
from flax_attn.parity.trace.trials import Changed, Tried, tried

# The first replacements that are tried, after which all runs again.
NEAREST = 40
# The replacements that are tried for one that is made.
TRIED = 1500
# The most differences of their own that are looked for, and places at which they are.
DIFFERENCES, PLACES = 12, 48
# Those that make something agree, of which the best is taken.
COMPARED = 24
# Those that are tried after one that makes something agree.
LOOKED_ON = 24
# Those of the node that is replaced, and by the one that replaces it, that are tried then.
PARTNERS = 80
# Those of one value that are tried where several are found.
ALONE = 400
# The most differences that are looked for once more, with orders told apart.
FEW = 4
# What differs as a whole, or in its order alone.
VAGUE = ("expression", "layout", "operation", "operand")


# A replacement, the values that change by it, and the nodes that are replaced with it.
Made = tuple[Repair, Changed, list[Node]]


@dataclass(frozen=True)
class Search:
    """What was replaced, and whether all outputs agree after it.

    Args:
        hypotheses: what differs where a value was replaced, in the order of the run.
        alignment: values that agree after them.
        wrong: names of the outputs that still differ.
        ended: whether outputs still differ as the search ended before it had tried all.
    """

    hypotheses: tuple[Hypothesis, ...]
    alignment: Alignment
    wrong: list[str]
    ended: bool = False


def search(flax: Program, torch: Program, expected: Arrays | None = None) -> Search:
    """Return the replacements after which the outputs of two runs agree, as far as there are any.

    Numbers in another order are the same quantity at first, as heads are that are split otherwise.
    Where that names no more than what is at another place, they are another quantity: the sine of
    an angle and its negative hold the same numbers.

    Args:
        flax: run of JAX.
        torch: run of PyTorch, with outputs of the same names.
        expected: the right outputs of JAX; None are those of PyTorch.
    """
    if expected is None:
        expected = {name: node.value for name, node in torch.outputs.items()}
    alignment = Alignment(flax, torch, expected)
    found = _searched(alignment)
    vague = any(one.parameter in VAGUE for one in found.hypotheses)
    unexplained = found.wrong and not found.hypotheses
    if vague or unexplained:
        ordered = _searched(replace(alignment, ordered=True))
        few = 0 < len(ordered.hypotheses) <= FEW and not ordered.ended
        found = ordered if few and _rank(ordered) < _rank(found) else found
    if not any(one.parameter in VAGUE for one in found.hypotheses):
        return found
    for other in _otherwise(alignment):
        if other is not None and _says_less(other, found):
            return other
    return found


def _otherwise(alignment: Alignment) -> Iterator[Search | None]:
    """Yield what else may differ, where whole expressions do."""
    yield _with_constants(alignment)
    yield _taken_otherwise(alignment)
    # In a batch JAX has no values of single steps.
    torch = with_steps_together(alignment.torch)
    if torch is not None:
        together = replace(alignment, torch=torch)
        yield _searched(together)
        yield _with_constants(together)
        yield _taken_otherwise(together)


def _with_constants(alignment: Alignment) -> Search | None:
    """Return what differs if tables of PyTorch are put in the place of those that differ."""
    tables = with_torch_constants(alignment)
    if tables is None:
        return None
    hypotheses, changed = tables
    rest = _searched(changed)
    return replace(rest, hypotheses=(*hypotheses, *rest.hypotheses))


def _taken_otherwise(alignment: Alignment) -> Search | None:
    """Return what differs if values are taken for one another, or in another order."""
    taken = taken_otherwise(alignment)
    return None if taken is None else Search(*taken, [])


def _says_less(other: Search, found: Search) -> bool:
    """Whether as few differences, in fewer words, explain as much; or a few, in half of them."""
    # A search that ended early says less by that alone.
    if other.ended or len(other.wrong) > len(found.wrong):
        return False
    shorter = _length(found.hypotheses) - _length(other.hypotheses)
    no_more = len(other.hypotheses) <= max(len(found.hypotheses), 1)
    few = len(other.hypotheses) <= FEW and shorter > _length(other.hypotheses)
    return shorter > 0 and (no_more or few)


def _rank(found: Search) -> tuple[int, int, int]:
    """Return how little is said: outputs that still differ, what is vague, and what is written."""
    vague = [one for one in found.hypotheses if one.parameter in VAGUE and not one.note]
    return len(found.wrong), len(vague), _length(found.hypotheses)


def _searched(alignment: Alignment) -> Search:
    alignment.budget.begin()
    found: list[tuple[int, list[Hypothesis]]] = []
    # Their differences are in all that follows, and hide what else differs.
    tables = list(rounded_tables(alignment))
    for table in tables:
        found.append((table.torch.order, explain_table(table)))
    if tables:
        values = {table.flax: table.value for table in tables}
        alignment = alignment.with_changed(alignment.rerun(values), list(values))
    turned = turned_scan(alignment)
    if turned is not None:
        order, hypothesis, changed = turned
        found.append((order, [hypothesis]))
        alignment = alignment.with_changed(changed)
    first = alignment
    kinds: dict[tuple, Repair] = {}
    while len(kinds) < DIFFERENCES and len(found) < len(tables) + PLACES:
        made = _next_repair(alignment)
        if made is None:
            break
        repair, changed, replaced = made
        # Explained at once, so that the values before it need not be kept.
        explained = explain(repair)
        found.append((repair.torch.order, explained))
        for one in explained:
            kinds.setdefault(one.kind, repair)
        alignment = alignment.with_changed(changed, replaced)
    found.sort(key=itemgetter(0))
    every = chain.from_iterable(hypotheses for _, hypotheses in found)
    hypotheses = with_joined_factors(grouped_by_kind(every), kinds, first)
    several = len(hypotheses) > 1 or any(one.parameter == "expression" for one in hypotheses)
    # One value that makes all agree would be behind the tables.
    if several and not tables:
        alone = _explained_alone(first, hypotheses)
        if alone is not None:
            hypotheses, alignment = alone
    wrong = alignment.wrong()
    return Search(hypotheses, alignment, wrong, ended=bool(wrong) and alignment.budget.spent)


def _length(hypotheses: Sequence[Hypothesis]) -> int:
    """Return how much is written to say what differs."""
    return sum(one.flax.length + one.torch.length for one in hypotheses)


def _explained_alone(
    alignment: Alignment, several: Sequence[Hypothesis]
) -> tuple[tuple[Hypothesis, ...], Alignment] | None:
    """Return what differs at one value that makes all outputs agree, if that is less.

    What makes most values agree may do so by chance, where it is given what another one should be.
    """
    ours, theirs = _unmatched(alignment, alignment.wrong())
    missing = set(theirs)
    # What agrees with something that is computed from a wrong value does so by chance.
    by_chance = _computed_from(set(ours), alignment.flax_of)
    ours += _computed_from(missing, alignment.torch_of)
    theirs += by_chance
    for flax, torch in islice(candidates(alignment, ours, theirs), ALONE):
        found = tried(alignment, flax, torch, missing)
        if found is None or not found.complete:
            continue
        hypotheses = grouped_by_kind(explain(found.repair))
        if _says_more(hypotheses, several):
            return hypotheses, alignment.with_changed(found.changed)
    return None


def _says_more(alone: Sequence[Hypothesis], several: Sequence[Hypothesis]) -> bool:
    """Whether hypotheses name what differs, in fewer and shorter words than others."""
    named = all(one.parameter not in ("expression", "layout") for one in alone)
    shorter = _length(alone) < _length(several)
    return named and shorter and len(alone) <= max(1, len(several) - 1)


def _unmatched(alignment: Alignment, wrong: Sequence[str]) -> tuple[list[Node], list[Node]]:
    """Return the nodes of both sides that lead to wrong outputs and that one side alone has."""
    here, there = alignment.flax.outputs, alignment.torch.outputs
    ours = cone([here[name] for name in wrong], alignment.torch_of)
    known = with_steps_of(alignment.flax_of)
    theirs = cone([there[name] for name in wrong], known)
    return ours, beside(theirs, alignment.torch, known)


def _computed_from(wrong: set[Node], matched: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Return the nodes whose every match on the other side is computed from wrong values there."""
    found = []
    for node, others in matched.items():
        if all(wrong.intersection(other.operands) for other in others):
            found.append(node)
    return sorted(found, key=lambda node: node.order)


def _next_repair(alignment: Alignment) -> Made | None:
    """Return the replacement after which most values agree, with the values that it changes."""
    wrong = alignment.wrong()
    best = _best_trial(alignment, wrong) if wrong else None
    if best is None:
        # Where not all was tried, it is not known that the output alone is left.
        return None if alignment.budget.spent else _output_repair(alignment, wrong)
    repair, changed = best.repair, best.changed
    if not best.certain:
        return repair, changed, [repair.flax]
    return repair, *with_repeats(alignment, repair, changed)


def _best_trial(alignment: Alignment, wrong: Sequence[str]) -> Tried | None:
    ours, theirs = _unmatched(alignment, wrong)
    missing = set(theirs)
    best: Tried | None = None
    passed, left = 0, TRIED
    pairs = list(candidates(alignment, ours, theirs))
    for i, (flax, torch) in enumerate(pairs):
        left -= 1
        if not left or passed == COMPARED:
            break
        found = tried(alignment, flax, torch, missing, whole=i < NEAREST)
        if found is None:
            continue
        if found.complete and not (best and best.certain):
            best = found
            break
        passed += 1
        if _is_better(found, best):
            best = found
            left = min(left, LOOKED_ON) if found.certain else left
    return best and _best_partner(alignment, best, pairs, missing)


def _best_partner(
    alignment: Alignment, best: Tried, pairs: Sequence[tuple[Node, Node]], missing: set[Node]
) -> Tried:
    """Return the replacement of the same node, or by the same one, that makes most agree.

    A norm takes what is shifted or scaled for the same: what agrees may do so by that alone.
    """
    own = best.repair
    partners = [pair for pair in pairs if (pair[0] is own.flax) != (pair[1] is own.torch)]
    for flax, torch in partners[:PARTNERS]:
        found = tried(alignment, flax, torch, missing)
        if found is None or found.complete < best.complete:
            continue
        if found.complete > best.complete or _is_better(found, best):
            best = found
    return best


def _is_better(found: Tried, best: Tried | None) -> bool:
    if best is None:
        return True
    more = (found.certain, found.gain) > (best.certain, best.gain)
    # A few values agree by chance, where the same value in another's place makes more agree.
    one, other = found.repair, best.repair
    same = one.flax is other.flax or one.torch is other.torch
    return more and (same or not best.certain)


def _output_repair(alignment: Alignment, wrong: Sequence[str]) -> Made | None:
    """Return the replacement of an output whose numbers agree, in another order."""
    for name in wrong:
        ours, right = alignment.flax.outputs[name], alignment.expected[name]
        if ours.value.shape == right.shape:
            theirs = alignment.torch.outputs[name]
            return Repair(ours, theirs, alignment, right), {ours: right}, [ours]
    return None
