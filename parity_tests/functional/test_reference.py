"""What never reaches an output or a gradient: rows that see nothing, and slots nobody sees."""

import jax
import numpy as np
import pytest
import torch

import flax_attn
import torch_ref
from flax_attn.parity import tolerance

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 3, 6
RANDOM = np.random.default_rng(0)
ARRAYS = [RANDOM.normal(size=shape) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, V))]
COTANGENT = RANDOM.normal(size=(B, T, N, V))
SINKS = RANDOM.normal(size=N)
BIAS = RANDOM.normal(size=(B, N, T, S))
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
    rest = (cotangent, mask, sinks, dropout, soft_cap, rows)
    if side.is_flax:
        gradients, output = FLAX(arrays, *rest, flax_attn)
    else:
        for array in arrays:
            array.requires_grad_()
        total, output = weighted(arrays, *rest, torch_ref)
        gradients = torch.autograd.grad(total, arrays)
    return np.array(side.numpy(output)), [side.numpy(gradient) for gradient in gradients]


def hidden_rows(side, how):
    """Return options under which query 2 of every batch row sees nothing."""
    hidden = np.zeros((T, S), bool)
    hidden[2] = True
    if how == "dense":
        return {"mask": side.array(~hidden)}
    if how == "bias":
        return {"bias": BIAS + np.where(hidden, -np.inf, 0)}
    queries = side.array(np.array([1, 1, 9, 1, 1]))
    keys = side.array(np.ones(S, int))
    return {"mask": side.Mask.segments(queries, keys)}


@pytest.mark.parametrize("how", ["dense", "bias", "segments"])
@pytest.mark.parametrize("more", ["nothing", "soft_cap", "sinks", "dropout"])
def test_an_empty_row_gives_zeros_and_zero_gradients(side, how, more):
    options = {
        "nothing": {},
        "soft_cap": {"soft_cap": 2.0},
        "sinks": {"sinks": side.array(SINKS)},
        "dropout": {"dropout": keyed(side)},
    }[more]
    output, gradients = run(side, ARRAYS, **hidden_rows(side, how), **options)
    assert np.isfinite(output).all()
    assert (output[:, 2] == 0).all()
    assert (np.delete(output, 2, axis=1) != 0).any(axis=(0, 2, 3)).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    of_query, *_, of_bias = gradients
    assert (of_query[:, 2] == 0).all()
    assert (of_bias[:, :, 2] == 0).all()
    assert (np.delete(of_query, 2, axis=1) != 0).any()


def keyed(side):
    return side.KeyedDropout(0.3, side.key())


def test_a_loss_of_empty_rows_alone_has_no_gradient(side):
    _, gradients = run(side, ARRAYS, rows=(2, 3), **hidden_rows(side, "dense"))
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_batch_row_without_keys(side):
    mask = side.Mask.lengths(key=side.array(np.array([0, 4])))
    output, gradients = run(side, ARRAYS, mask=mask)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()
    assert all((gradient[0] == 0).all() and np.isfinite(gradient).all() for gradient in gradients)


def test_a_bias_of_minus_infinity_hides_as_a_mask_does(side):
    visible = RANDOM.random((B, 1, T, S)) < 0.5
    visible[0, 0, 3] = False
    masked = run(side, ARRAYS, mask=side.array(visible))
    biased = run(side, ARRAYS, bias=np.where(visible, BIAS, -np.inf))
    error = tolerance.relative({"output": biased[0]}, {"output": masked[0]})["output"]
    assert error <= tolerance.FORWARD
    gradients = [dict(zip("qkvb", result[1], strict=True)) for result in (biased, masked)]
    errors = tolerance.gradient_errors(*gradients)
    assert max(errors.values()) <= tolerance.GRADIENT
    assert (biased[0][0, 3] == 0).all()
    assert (masked[0][0, 3] == 0).all()


def padding(side):
    return side.Mask.lengths(query=side.array(np.array([3, 5])), key=side.array(np.array([4, 6])))


def future(side):
    return side.Mask.causal(0)


def slots(name, which):
    """Return the slots of query, key or value that nobody sees."""
    hidden = np.zeros((B, T if name == "query" else S), bool)
    if which is padding:
        for row, length in enumerate([3, 5] if name == "query" else [4, 6]):
            hidden[row, length:] = True
    elif name != "query":
        hidden[:, T:] = True
    return hidden


NAMES = ("query", "key", "value")
PLACES = [
    (which, name)
    for which in (padding, future)
    for name in NAMES
    if (which, name) != (future, "query")
]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    ("which", "name"), PLACES, ids=[f"{which.__name__} {name}" for which, name in PLACES]
)
def test_what_nobody_sees_reaches_nothing(side, which, name, poison):
    hidden = slots(name, which)
    i = NAMES.index(name)
    poisoned = [x.copy() for x in ARRAYS]
    poisoned[i][hidden] = poison
    clean = [x.copy() for x in ARRAYS]
    clean[i][hidden] = 0
    output, gradients = run(side, poisoned, mask=which(side))
    expected, of_clean = run(side, clean, mask=which(side))
    np.testing.assert_array_equal(output, expected)
    assert np.isfinite(output).all()
    for ours, theirs in zip(gradients, of_clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()
    assert (gradients[i][hidden] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_one_bad_number_in_a_hidden_slot_is_enough_to_test_and_no_more_is_lost(side, poison):
    arrays = [x.copy() for x in ARRAYS]
    arrays[2][0, 6, 1, 4] = poison
    output, gradients = run(side, arrays, mask=padding(side))
    assert np.isfinite(output).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("name", ["key", "value"])
def test_what_a_row_sees_reaches_it_and_no_other(side, name, poison):
    arrays = [x.copy() for x in ARRAYS]
    # Key/value head 1 serves query heads 2 and 3.
    arrays[NAMES.index(name)][0, 3, 1, 2] = poison
    output, (of_query, *_) = run(side, arrays, mask=future(side))
    expected, (of_clean, *_) = run(side, ARRAYS, mask=future(side))
    reached = np.zeros((B, T, N), bool)
    reached[0, 3:, 2:] = True
    assert np.isnan(output[reached]).all()
    np.testing.assert_array_equal(output[~reached], expected[~reached])
    assert np.isnan(of_query[reached]).all()
    np.testing.assert_array_equal(of_query[~reached], of_clean[~reached])


@pytest.mark.parametrize("poison", POISON)
def test_a_bad_query_reaches_its_own_row_only(side, poison):
    arrays = [x.copy() for x in ARRAYS]
    arrays[0][1, 2, 3, 0] = poison
    output, _ = run(side, arrays, mask=future(side))
    expected, _ = run(side, ARRAYS, mask=future(side))
    assert np.isnan(output[1, 2, 3]).all()
    output[1, 2, 3] = expected[1, 2, 3]
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("poison", POISON)
def test_a_bad_bias_in_a_hidden_place_reaches_nothing(side, poison):
    visible = np.tri(T, S, dtype=bool)
    output, gradients = run(side, ARRAYS, mask=future(side), bias=np.where(visible, BIAS, poison))
    expected, of_clean = run(side, ARRAYS, mask=future(side), bias=np.where(visible, BIAS, 0))
    np.testing.assert_array_equal(output, expected)
    for ours, theirs in zip(gradients, of_clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_huge_finite_numbers_in_hidden_slots_reach_nothing(side):
    arrays = [x.copy() for x in ARRAYS]
    for x in arrays[1:]:
        x[0, 4:] = 1e300
    output, gradients = run(side, arrays, mask=padding(side), soft_cap=3.0)
    expected, _ = run(side, ARRAYS, mask=padding(side), soft_cap=3.0)
    np.testing.assert_array_equal(output, expected)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
