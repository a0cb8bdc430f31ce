"""Values of both runs are paired by their numbers, whatever their layout is."""

import gc

import numpy as np
import pytest

from flax_attn.parity.trace import align
from flax_attn.parity.trace.align import Alignment, cone
from flax_attn.parity.trace.layouts import laid_out
from flax_attn.parity.trace.numbers import SAME, Numbers, same_array
from flax_attn.parity.trace.program import Node, Program
from flax_attn.parity.trace.search import search

X = np.random.default_rng(0).normal(size=(3, 4))
# As a mask writes it before a softmax.
HIDDEN = np.where(X > 0.5, -np.inf, X)


def changed(x, size):
    """Return an array whose last element differs by so much of the mean absolute value."""
    other = x.copy()
    other[-1, -1] += size * np.abs(x).mean()
    return other


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (X.T, True),
        (X.reshape(2, 6)[::-1], True),
        (np.repeat(X, 3, 0), True),
        (np.repeat(X, 2, 0)[:-1], False),
        (-X, False),
        (X * 1.001, False),
        (changed(X, SAME / 10), True),
        (changed(X, SAME * 10), False),
        (HIDDEN, False),
    ],
)
def test_numbers_are_equal_in_any_order_and_repeated(other, equal):
    numbers = Numbers(np.asarray(other))
    assert Numbers(X).equals(numbers) == equal
    assert numbers.equals(Numbers(X)) == equal


def test_what_hides_is_no_number():
    # Ports hide with a large number where PyTorch has -inf; after the softmax both are 0.
    large = np.where(X > 0.5, -1e30, X)
    assert Numbers(HIDDEN).equals(Numbers(large.T))
    assert same_array(HIDDEN, large)


@pytest.mark.parametrize(
    ("array", "telling"),
    [
        (X, True),
        (np.zeros((3, 4)), False),
        (np.tril(np.ones((5, 5))), False),
        (np.array([1.5, 2.5]), True),
        (np.array([0.1]), False),
    ],
)
def test_few_numbers_tell_nothing(array, telling):
    assert Numbers(array).telling == telling


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (X[:, None], True),
        (changed(X, SAME / 10), True),
        (changed(X, SAME * 10), False),
        (X.T, False),
        (np.where(X > 0, X, np.nan), False),
    ],
)
def test_the_same_array_has_the_same_numbers_at_the_same_places(other, same):
    assert same_array(X, other) == same


def test_layouts_begin_with_the_own_one_and_join_or_split_neighbours():
    x = np.arange(24.0).reshape(2, 3, 4)
    flat = x.reshape(6, 4)
    turned = x.transpose(1, 0, 2).reshape(6, 4)

    own = next(laid_out(x, (2, 3, 4)))
    joined = [layout.tolist() for layout in laid_out(x, (6, 4))]
    split = [layout.tolist() for layout in laid_out(flat, (2, 3, 4))]

    assert np.array_equal(own, x)
    assert joined[0] == flat.tolist()
    assert turned.tolist() in joined
    assert x.tolist() in split
    # 24 numbers do not fill 25 places.
    assert list(laid_out(x, (5, 5))) == []


def source(value):
    return Node("source", (), value, name="x")


def doubled(node):
    return Node("mul", (node,), node.value * 2, compute=lambda given: given[0] * 2)


@pytest.fixture
def alignment():
    """Runs that agree in a source, and differ in what each computes of it."""
    ours = source(X)
    wrong = Node("sin", (ours,), np.sin(X))
    last = doubled(wrong)
    flax = Program([ours, wrong, last], {"output": last})
    # In another layout, which must not keep the sources apart.
    theirs = source(X.T)
    right = Node("cos", (theirs,), np.cos(X.T))
    other = doubled(right)
    torch = Program([theirs, right, other], {"output": other})
    return Alignment(flax, torch, {})


def test_nodes_pair_by_their_numbers(alignment):
    ours, *_ = alignment.flax.nodes
    theirs, *_ = alignment.torch.nodes
    assert alignment.torch_of == {ours: [theirs]}
    assert alignment.flax_of == {theirs: [ours]}


def test_the_cone_ends_at_what_agrees(alignment):
    _, wrong, last = alignment.flax.nodes
    assert cone([last], alignment.torch_of) == [wrong, last]


def test_a_replaced_value_makes_later_ones_agree(alignment):
    _, wrong, last = alignment.flax.nodes
    _, right, other = alignment.torch.nodes
    changed = alignment.flax.rerun({wrong: np.cos(X)}, {})
    after = alignment.with_changed(changed)
    assert after.torch_of[wrong] == [right]
    assert after.torch_of[last] == [other]
    # The next replacement is tried on what was known before this one.
    assert wrong not in alignment.torch_of


def test_values_that_tell_little_pair_only_if_they_are_the_same_array():
    # Sorted, both hold ten times True and six times False.
    mask = np.tril(np.ones((4, 4), bool))
    other = np.triu(np.ones((4, 4), bool))
    ours = [Node("constant", (), mask), Node("constant", (), other)]
    theirs = [Node("constant", (), mask[None]), Node("constant", (), other)]
    pair = Alignment(Program(ours, {}), Program(theirs, {}), {})
    assert pair.torch_of == {ours[0]: [theirs[0]], ours[1]: [theirs[1]]}


def wave(node, function, factor):
    def compute(given):
        return function(*given) * factor

    return Node("wave", (node,), compute([node.value]), compute=compute)


def chained(count, last):
    """Return a run of sines of one source, of which each ninth is another function."""
    nodes = [source(X)]
    for i in range(count):
        function = np.sin if i % 9 else last
        # Another factor each time, or the values would repeat and pair with one another.
        nodes.append(wave(nodes[-1], function, i + 2))
    return Program(nodes, {"output": nodes[-1]})


def test_no_more_sorted_numbers_are_kept_than_there_is_room_for(monkeypatch):
    flax = chained(3000, np.sin)
    torch = chained(3000, np.sin)
    wanted = Alignment(flax, torch, {}).torch_of
    room = 10 * X.size
    monkeypatch.setattr(align, "ROOM", room)

    pair = Alignment(flax, torch, {})

    assert pair.torch_of == wanted
    assert len(wanted) == len(flax.nodes)
    assert 0 < pair.kept.size <= room


def alignments_in_memory():
    gc.collect()
    return sum(isinstance(one, Alignment) for one in gc.get_objects())


def test_what_was_known_before_a_replacement_is_not_kept():
    before = alignments_in_memory()
    found = search(chained(20, np.sin), chained(20, np.cos))
    assert found.hypotheses
    assert not found.wrong
    assert alignments_in_memory() == before + 1
