"""How one order of numbers differs from another, in words."""

import numpy as np
import pytest

from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.moves import narrowed, relation, shown, steps
from flax_attn.parity.trace.program import Node, Program

X = np.random.default_rng(0).normal(size=(3, 4, 6))
# Its shape is the same in either order of its axes.
SQUARE = np.random.default_rng(1).normal(size=(4, 4))


@pytest.mark.parametrize(
    ("flax", "theirs", "expected"),
    [
        (X, X, ""),
        (X[:, ::-1], X, "axis 1 is reversed"),
        (np.roll(X, 1, 2), X, "axis 2 is rolled by 1"),
        (np.roll(X, -2, 2), X, "axis 2 is rolled by -2"),
        (SQUARE.T, SQUARE, "its axes are those of torch in the order (1, 0)"),
        (
            X,
            X.reshape(3, 4, 3, 2).swapaxes(2, 3).reshape(3, 4, 6),
            "axis 2 of 6 is split as (3, 2), in torch as (2, 3)",
        ),
        (X[:, [0, 2, 1, 3]], X, "axis 1 of 4, split as (2, 2), is transposed"),
        (X[:, [1, 0, 3, 2]], X, "axis 1 is in the order 1, 0, 3, 2 of torch"),
        (X[::-1, ::-1], X, "axis 0 is reversed; axis 1 is reversed"),
        (X + 1, X, ""),
        (
            X.reshape(-1)[::-1].reshape(X.shape)[::-1],
            X[:, ::-1, ::-1][:, ::-1],
            "axis 1 is reversed",
        ),
    ],
)
def test_an_order_is_described(flax, theirs, expected):
    found = relation(flax, theirs)
    # Both readings of one order are right.
    if expected.startswith("axis 2 of 6"):
        assert found in (expected, "axis 2 of 6 is split as (2, 3), in torch as (3, 2)")
    else:
        assert found == expected


def test_an_axis_is_split_in_the_order_in_which_it_is():
    heads = np.arange(12.0).reshape(1, 12) ** 1.5
    flax = heads.reshape(1, 3, 4).swapaxes(1, 2).reshape(1, 12)
    torch = heads
    # Element 1 of JAX is element 4 of PyTorch.
    assert flax[0, 1] == torch[0, 4]
    assert relation(flax, torch) == "axis 1 of 12 is split as (3, 4), in torch as (4, 3)"


def moved(node, operation, compute, **parameters):
    value = compute([node.value])
    return Node(operation, (node,), value, parameters, compute=compute)


def doubled(node):
    return Node("add", (node, node), 2 * node.value, compute=lambda x: x[0] + x[1])


@pytest.fixture
def pair():
    """Runs of which one transposes what both then add to itself."""
    ours = Node("source", (), SQUARE, name="x")
    tanh = moved(ours, "tanh", lambda x: np.tanh(x[0]))
    turned = moved(tanh, "transpose", lambda x: x[0].T, axes=(1, 0))
    here = doubled(turned)
    flax = Program([ours, tanh, turned, here], {"output": here})

    # A reshape that changes nothing stands where JAX transposes.
    theirs = Node("source", (), SQUARE, name="x")
    other = moved(theirs, "tanh", lambda x: np.tanh(x[0]))
    kept = moved(other, "reshape", lambda x: x[0], shape=(4, 4))
    there = doubled(kept)
    torch = Program([theirs, other, kept, there], {"output": there})

    return Alignment(flax, torch, {"output": there.value})


def test_the_wrong_order_is_narrowed_to_the_first_value_that_has_it(pair):
    *_, turned, here = pair.flax.nodes
    *_, there = pair.torch.nodes
    node, _, value = narrowed(pair, here, there.value)
    assert node is turned
    assert np.array_equal(value, np.tanh(SQUARE))
    assert relation(node.value, value) == "its axes are those of torch in the order (1, 0)"


def test_steps_are_the_operations_that_move_numbers(pair):
    *_, turned, here = pair.flax.nodes
    found = steps(pair, here, True)
    assert found == [turned]
    assert shown(found) == "transpose (1, 0)"


@pytest.mark.parametrize(
    ("operation", "parameters", "expected"),
    [
        ("slice", {"start": (0, 1), "stop": (4, 3), "step": None}, "slice [:, 1:3]"),
        ("reshape", {"shape": (2, 8)}, "reshape (2, 8)"),
        ("flip", {"axes": (1,)}, "flip axes=1"),
        ("concat", {"axes": (0,)}, "concat axes=0"),
    ],
)
def test_moves_are_written(operation, parameters, expected):
    still = Node("squeeze", (), SQUARE)
    node = Node(operation, (Node("source", (), SQUARE),), SQUARE, parameters)
    assert shown([still, node]) == expected
    assert shown([still]) == "squeeze"
