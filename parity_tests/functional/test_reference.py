"""What never reaches an output or a gradient: rows that see nothing, and slots nobody sees."""

import jax
import numpy as np
import pytest
import torch

import flax_attn
import torch_ref
from parity_tests.asserts import assert_results_near

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 3, 6
RANDOM = np.random.default_rng(0)
ARRAYS = [RANDOM.normal(size=shape) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, V))]
COTANGENT = RANDOM.normal(size=(B, T, N, V))
SINKS = RANDOM.normal(size=N)
BIAS = RANDOM.normal(size=(B, N, T, S))
# Numbers that spoil all that they are multiplied with, zeros too.
POISON = [np.nan, np.inf, -np.inf]


def weighted(arrays, cotangent, mask, sinks, dropout, soft_cap, rows, package):
    query, key, value, bias = arrays
    output = package.dot_product_attention(
        query, key, value, bias, mask, sinks=sinks, dropout=dropout, soft_cap=soft_cap
    )
    return (output[:, rows[0] : rows[1]] * cotangent).sum(), output


# Masks are data: few compilations.
FLAX = jax.jit(jax.grad(weighted, has_aux=True), static_argnums=(5, 6, 7))


def run(side, arrays, rows=(0, T), bias=BIAS, mask=None, sinks=None, dropout=None, soft_cap=None):
    """Return the output and the gradients of query, key, value and bias.

    The cotangent is random, on some rows.
    """
    arrays = [side.array(x) for x in (*arrays, bias)]
    cotangent = side.array(COTANGENT[:, slice(*rows)])
    differentiate = in_jax if side.is_flax else in_torch
    gradients, output = differentiate(arrays, cotangent, mask, sinks, dropout, soft_cap, rows)
    return np.array(side.numpy(output)), [side.numpy(gradient) for gradient in gradients]


def in_jax(*arguments):
    return FLAX(*arguments, flax_attn)


def in_torch(arrays, *rest):
    leaves = [array.requires_grad_() for array in arrays]
    total, output = weighted(leaves, *rest, torch_ref)
    return torch.autograd.grad(total, leaves), output


def all_finite(arrays):
    return all(np.isfinite(array).all() for array in arrays)


# Options under which query 2 of every batch row sees nothing.
HIDDEN = np.zeros((T, S), bool)
HIDDEN[2] = True
HIDING = {
    "dense": lambda side: {"mask": side.array(~HIDDEN)},
    "bias": lambda side: {"bias": BIAS + np.where(HIDDEN, -np.inf, 0)},
    "segments": lambda side: {
        "mask": side.Mask.segments(side.array(2 * HIDDEN[:, 0]), side.array(np.zeros(S, int)))
    },
}
# Each changes the softmax, in which an empty row has no maximum.
OPTIONS = {
    "nothing": lambda side: {},
    "soft_cap": lambda side: {"soft_cap": 2.0},
    "sinks": lambda side: {"sinks": side.array(SINKS)},
    "dropout": lambda side: {"dropout": side.KeyedDropout(0.3, side.key())},
}


@pytest.fixture(params=HIDING)
def hiding(side, request):
    return HIDING[request.param](side)


@pytest.fixture(params=OPTIONS)
def options(side, request):
    return OPTIONS[request.param](side)


def test_an_empty_row_gives_zeros(side, hiding, options):
    output, _ = run(side, ARRAYS, **hiding, **options)
    assert np.isfinite(output).all()
    assert (output[:, 2] == 0).all()
    # Every other row sees something.
    assert (np.delete(output, 2, axis=1) != 0).any(axis=(0, 2, 3)).all()


def test_an_empty_row_gives_zero_gradients(side, hiding, options):
    _, gradients = run(side, ARRAYS, **hiding, **options)
    assert all_finite(gradients)
    of_query, *_, of_bias = gradients
    assert (of_query[:, 2] == 0).all()
    assert (of_bias[:, :, 2] == 0).all()
    assert (np.delete(of_query, 2, axis=1) != 0).any()


def test_a_loss_of_empty_rows_alone_has_no_gradient(side):
    # Row 2 is the one that sees nothing.
    _, gradients = run(side, ARRAYS, rows=(2, 3), **HIDING["dense"](side))
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_batch_row_without_keys(side):
    mask = side.Mask.lengths(key=side.array(np.array([0, 4])))
    output, gradients = run(side, ARRAYS, mask=mask)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()
    assert all((gradient[0] == 0).all() for gradient in gradients)
    assert all_finite(gradients)


def test_a_bias_of_minus_infinity_hides_as_a_mask_does(side):
    visible = RANDOM.random((B, 1, T, S)) < 0.5
    # One row sees nothing at all.
    visible[0, 0, 3] = False
    masked = run(side, ARRAYS, mask=side.array(visible))
    biased = run(side, ARRAYS, bias=np.where(visible, BIAS, -np.inf))
    assert_results_near(named(biased), named(masked))
    assert not np.any([biased[0][0, 3], masked[0][0, 3]])


def named(result):
    """Return output and gradients by name."""
    output, gradients = result
    return {"output": output}, dict(zip("qkvb", gradients, strict=True))


def assert_same(found, expected):
    """Assert that outputs and gradients are equal to the last bit."""
    (output, gradients), (truth, slopes) = found, expected
    np.testing.assert_array_equal(output, truth)
    for ours, theirs in zip(gradients, slopes, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Tokens of each row of the batch.
QUERY_LENGTHS, KEY_LENGTHS = np.array([3, 5]), np.array([4, 6])


def padding(side):
    return side.Mask.lengths(query=side.array(QUERY_LENGTHS), key=side.array(KEY_LENGTHS))


def future(side):
    return side.Mask.causal(0)


NAMES = ("query", "key", "value")
PADDED_KEYS = np.arange(S) >= KEY_LENGTHS[:, None]
LATER_KEYS = np.broadcast_to(np.arange(S) >= T, (B, S))
# Slots that nobody sees: the mask, the array, and which of its tokens.
SLOTS = {
    "padding query": (padding, 0, np.arange(T) >= QUERY_LENGTHS[:, None]),
    "padding key": (padding, 1, PADDED_KEYS),
    "padding value": (padding, 2, PADDED_KEYS),
    "future key": (future, 1, LATER_KEYS),
    "future value": (future, 2, LATER_KEYS),
}


def replaced(i, index, value):
    """Return query, key and value, with another number at some places of one of them."""
    arrays = [x.copy() for x in ARRAYS]
    arrays[i][index] = value
    return arrays


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("which", "i", "hidden"), SLOTS.values(), ids=SLOTS)
def test_what_nobody_sees_reaches_nothing(side, which, i, hidden, poison):
    found = run(side, replaced(i, hidden, poison), mask=which(side))
    assert_same(found, run(side, replaced(i, hidden, 0), mask=which(side)))
    output, gradients = found
    assert all_finite([output, *gradients])
    assert (gradients[i][hidden] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_one_bad_number_in_a_hidden_slot_is_enough_to_test_and_no_more_is_lost(side, poison):
    # Row 0 has 4 keys, so that its last one is padding.
    output, gradients = run(side, replaced(2, (0, 6, 1, 4), poison), mask=padding(side))
    assert all_finite([output, *gradients])


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("name", ["key", "value"])
def test_what_a_row_sees_reaches_it_and_no_other(side, name, poison):
    poisoned = replaced(NAMES.index(name), (0, 3, 1, 2), poison)
    output, (of_query, *_) = run(side, poisoned, mask=future(side))
    expected, (of_clean, *_) = run(side, ARRAYS, mask=future(side))
    # Key/value head 1 serves query heads 2 and 3.
    assert_reached(np.s_[0, 3:, 2:], output, expected)
    assert_reached(np.s_[0, 3:, 2:], of_query, of_clean)


def assert_reached(index, found, expected):
    """Assert that what is there is NaN, and all else is as it was."""
    assert np.isnan(found[index]).all()
    others = found.copy()
    others[index] = expected[index]
    np.testing.assert_array_equal(others, expected)


@pytest.mark.parametrize("poison", POISON)
def test_a_bad_query_reaches_its_own_row_only(side, poison):
    output, _ = run(side, replaced(0, (1, 2, 3, 0), poison), mask=future(side))
    expected, _ = run(side, ARRAYS, mask=future(side))
    assert_reached((1, 2, 3), output, expected)


@pytest.mark.parametrize("poison", POISON)
def test_a_bad_bias_in_a_hidden_place_reaches_nothing(side, poison):
    # What the causal mask shows.
    visible = np.tri(T, S, dtype=bool)
    biases = [np.where(visible, BIAS, number) for number in (poison, 0)]
    assert_same(*(run(side, ARRAYS, mask=future(side), bias=bias) for bias in biases))


def test_huge_finite_numbers_in_hidden_slots_reach_nothing(side):
    # Scores and outputs of these would not be finite.
    query, *others = [x.copy() for x in ARRAYS]
    for x in others:
        x[0, 4:] = 1e300
    output, gradients = run(side, [query, *others], mask=padding(side), soft_cap=3.0)
    np.testing.assert_array_equal(output, run(side, ARRAYS, mask=padding(side), soft_cap=3.0)[0])
    assert all_finite(gradients)
