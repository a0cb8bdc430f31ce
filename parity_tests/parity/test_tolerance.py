"""The rules that everything else is judged by."""

import numpy as np
import pytest

from flax_attn.parity import tolerance

NAN = np.nan


def relative(ours, reference, scale=0.0):
    return tolerance.relative({"x": np.array(ours)}, {"x": np.array(reference)}, scale)["x"]


@pytest.mark.parametrize(
    ("ours", "reference", "error"),
    [
        ([1.0, 4.0], [1.0, 4.0], 0.0),
        ([1.0, 5.0], [1.0, 4.0], 0.25),
        ([1.0, -5.0], [1.0, -4.0], 0.25),
        ([3.0, 4.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        # There is nothing to measure it by.
        ([0.0, 1e-300], [0.0, 0.0], np.inf),
        # NaN is equal at the same places only.
        ([NAN, 4.0], [NAN, 4.0], 0.0),
        ([NAN, 5.0], [NAN, 4.0], 0.25),
        ([NAN, 4.0], [1.0, 4.0], np.inf),
        ([1.0, 4.0], [NAN, 4.0], np.inf),
        ([NAN, 4.0], [4.0, NAN], np.inf),
        ([1.0, np.inf], [1.0, 4.0], np.inf),
        # Other shapes, which would broadcast.
        ([1.0], [1.0, 1.0], np.inf),
        ([[1.0, 2.0]], [1.0, 2.0], np.inf),
    ],
)
def test_relative(ours, reference, error):
    assert relative(ours, reference) == error


def test_an_infinite_truth_never_passes_unless_it_is_hit():
    assert not relative([1.0, 2.0], [1.0, np.inf]) <= tolerance.FORWARD


def test_relative_measures_small_tensors_by_the_scale():
    assert relative([2e-20], [1e-20]) == 1.0
    assert relative([2e-20], [1e-20], scale=1.0) == pytest.approx(1e-20)


def test_a_tensor_that_one_side_lacks_is_as_wrong_as_can_be():
    reference = {"x": np.ones(2)}
    assert tolerance.relative({}, reference) == {"x": np.inf}
    # In a lower dtype as well.
    assert tolerance.lower_dtype({}, [reference], reference, 2.0, 0.0) == {"x": np.inf}


GRADIENTS = {
    "W_query": np.array([3.0, -2.0]),
    "W_key.bias": np.array([2e-13, -1e-13]),
    "zero": np.zeros(2),
}


def test_null_directions_are_those_far_below_the_largest_gradient():
    assert tolerance.null_directions(GRADIENTS) == {"W_key.bias", "zero"}
    assert tolerance.null_directions({}) == set()
    # Small are both, and neither is far below the other.
    small = {"small": np.array([1e-200]), "smaller": np.array([1e-201])}
    assert tolerance.null_directions(small) == set()


def test_a_null_direction_is_measured_by_the_largest_gradient_of_all():
    ours = GRADIENTS | {"W_key.bias": -GRADIENTS["W_key.bias"]}
    errors = tolerance.gradient_errors(ours, GRADIENTS)
    assert set(errors) == set(GRADIENTS)
    assert max(errors.values()) <= tolerance.GRADIENT


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_is_seen_even_in_a_null_direction(name):
    ours = GRADIENTS | {name: GRADIENTS[name] + 1e-9}
    assert tolerance.gradient_errors(ours, GRADIENTS)[name] > tolerance.GRADIENT


def test_elements_are_felt_where_they_are_more_than_rounding_or_zero_on_both_sides():
    reference = {
        "dead": np.array([3.0, 0.0]),
        "packed": np.array([3.0, 2e-13, 0.0, 0.0]),
        "small": np.array([1e-14]),
    }
    ours = {
        "dead": np.array([3.0, 0.0]),
        "packed": np.array([3.0, 1e-13, 0.0, 1e-14]),
        "small": np.array([0.0]),
    }
    found = tolerance.nonzero_gradient(ours, reference)
    assert {name: felt.tolist() for name, felt in found.items()} == {
        "dead": [True, True],
        # The 0 beside rounding may be rounding, too.
        "packed": [True, False, False, False],
        "small": [False],
    }


EPS64, EPS32 = np.finfo(np.float64).eps, np.finfo(np.float32).eps
REFERENCE = np.array([4.0, 1.0])


def test_the_same_function_in_another_order_may_differ_by_some_roundings():
    half = 0.5 * tolerance.REORDERED * EPS64
    reference = {"x": REFERENCE, "rounding": np.array([1e-15])}
    # The largest element, 4, is off by half of the rule.
    off = {"x": REFERENCE + np.array([4 * half, 0]), "rounding": np.array([-1e-15])}
    errors = tolerance.reordered(off, reference)
    assert errors["x"] == pytest.approx(0.5, rel=0.01)
    # Measured by the largest of all.
    assert errors["rounding"] < 0.1


def test_another_sign_is_no_other_order():
    errors = tolerance.reordered({"y": -REFERENCE}, {"y": REFERENCE})
    assert errors["y"] > 1e9


def test_roundings_are_those_of_the_dtype():
    single = REFERENCE.astype(np.float32)
    off = single * (1 + 32 * EPS32)
    errors = tolerance.reordered({"x": off}, {"x": single})
    assert errors["x"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("rounding", "most", "allowed"),
    [
        (0.0, np.inf, tolerance.FORWARD),
        # As little as any operation loses: the rule stands.
        (1e-15, np.inf, tolerance.FORWARD),
        (1e-9, np.inf, tolerance.REORDERED * 1e-9),
        (1e-3, tolerance.MOST_FORWARD, tolerance.MOST_FORWARD),
    ],
)
def test_a_function_that_amplifies_rounding_is_allowed_what_rounding_moves(rounding, most, allowed):
    def excess(error):
        moved = [{"x": 0.0}, {"x": rounding}]
        return tolerance.amplified({"x": error}, moved, tolerance.FORWARD, most)["x"]

    assert excess(allowed) == pytest.approx(1.0)
    assert excess(np.inf) == np.inf


def test_what_rounding_was_not_measured_of_is_held_to_the_rule():
    assert tolerance.amplified({"x": 2.0}, [{}], 0.5)["x"] == 4.0


TRUTH = {"x": np.linspace(1.0, 2.0, 200)}
NOISE = np.random.default_rng(0).normal(size=200) * 1e-4


def excess(factor_of_noise, factor=2.0, eps=0.0):
    ours = {"x": TRUTH["x"] + factor_of_noise * NOISE}
    theirs = {"x": TRUTH["x"] + NOISE}
    return tolerance.lower_dtype(ours, [theirs], TRUTH, factor, eps)["x"]


def test_a_lower_dtype_may_err_as_much_as_the_factor_allows():
    assert excess(1.0) == pytest.approx(0.5)
    assert excess(1.99) < 1 < excess(2.01)
    assert excess(2.01, factor=3.0) < 1


def test_one_rounding_of_the_truth_is_allowed_where_torch_is_exact():
    eps = 1e-7
    exact = dict(TRUTH)
    off = {"x": TRUTH["x"] * (1 + eps / 2)}
    assert tolerance.lower_dtype(off, [exact], TRUTH, 2.0, eps)["x"] < 1
    assert tolerance.lower_dtype(off, [exact], TRUTH, 2.0, 0.0)["x"] > 1e9
    assert tolerance.lower_dtype(exact, [exact], TRUTH, 2.0, 0.0)["x"] == 0


# The largest error of PyTorch is 1e-3, its mean about 1e-5.
@pytest.mark.parametrize("worse", [np.eye(200)[7] * 1e-2, np.full(200, 3e-4)])
def test_one_bad_element_and_a_bad_mean_are_both_seen(worse):
    ours = {"x": TRUTH["x"] + worse}
    theirs = {"x": TRUTH["x"] + np.where(np.arange(200) == 0, 1e-3, 1e-5)}
    assert tolerance.lower_dtype(ours, [theirs], TRUTH, 2.0, 0.0)["x"] > 1


def test_the_largest_of_several_draws_is_the_rule_in_any_order():
    lucky = {"x": TRUTH["x"] + NOISE / 100}
    usual = {"x": TRUTH["x"] + NOISE}
    for draws in ([lucky, usual], [usual, lucky]):
        assert tolerance.lower_dtype(usual, draws, TRUTH, 2.0, 0.0)["x"] == pytest.approx(0.5)
    assert tolerance.lower_dtype(usual, [lucky], TRUTH, 2.0, 0.0)["x"] == pytest.approx(50)


def test_what_torch_overflows_is_not_asked_of_us():
    good = {"x": TRUTH["x"] + NOISE}
    bad = {"x": np.where(np.arange(200) == 3, np.inf, good["x"])}
    nothing = {"x": np.full(200, np.nan)}
    assert tolerance.lower_dtype(bad, [bad], TRUTH, 2.0, 0.0)["x"] == pytest.approx(0.5)
    assert tolerance.lower_dtype(bad, [good], TRUTH, 2.0, 0.0)["x"] == np.inf
    assert tolerance.lower_dtype(bad, [nothing], TRUTH, 2.0, 0.0)["x"] == 0


def test_nan_in_a_lower_dtype_never_passes():
    ours = {"x": np.where(np.arange(200) == 3, np.nan, TRUTH["x"])}
    assert not tolerance.lower_dtype(ours, [TRUTH], TRUTH, 2.0, 1e-7)["x"] <= 1


def test_the_rules_are_those_of_the_design():
    # Else an edit of one of them would loosen all tests in silence.
    assert tolerance.FORWARD == 1e-12
    assert tolerance.GRADIENT == 1e-11
    assert tolerance.SECOND == tolerance.TRAINING == 1e-10
    assert (tolerance.LOW_FORWARD, tolerance.LOW_GRADIENT) == (2.0, 3.0)
