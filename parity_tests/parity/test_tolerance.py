"""The rules that everything else is judged by."""

import numpy as np
import pytest

from flax_attn.parity import tolerance

NAN = np.nan


def relative(ours, truth, scale=0.0):
    return tolerance.relative({"x": np.array(ours)}, {"x": np.array(truth)}, scale)["x"]


@pytest.mark.parametrize(
    ("ours", "truth", "error"),
    [
        ([1.0, 4.0], [1.0, 4.0], 0.0),
        ([1.0, 5.0], [1.0, 4.0], 0.25),
        ([1.0, -5.0], [1.0, -4.0], 0.25),
        ([3.0, 4.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], np.inf),
        ([NAN, 4.0], [NAN, 4.0], 0.0),
        ([NAN, 5.0], [NAN, 4.0], 0.25),
        ([NAN, 4.0], [1.0, 4.0], np.inf),
        ([1.0, 4.0], [NAN, 4.0], np.inf),
        ([NAN, 4.0], [4.0, NAN], np.inf),
        ([1.0, np.inf], [1.0, 4.0], np.inf),
        ([1.0], [1.0, 1.0], np.inf),
        ([[1.0, 2.0]], [1.0, 2.0], np.inf),
    ],
)
def test_relative(ours, truth, error):
    assert relative(ours, truth) == error


def test_an_infinite_truth_never_passes_unless_it_is_hit():
    assert not relative([1.0, 2.0], [1.0, np.inf]) <= tolerance.FORWARD


def test_relative_measures_small_tensors_by_the_scale():
    assert relative([2e-20], [1e-20]) == 1.0
    assert relative([2e-20], [1e-20], scale=1.0) == pytest.approx(1e-20)


def test_a_tensor_that_one_side_lacks_is_an_error():
    with pytest.raises(KeyError):
        tolerance.relative({}, {"x": np.ones(2)})


GRADIENTS = {"W_query": np.array([3.0, -2.0]), "W_key.bias": np.array([2e-13, -1e-13]), "zero": np.zeros(2)}


def test_null_directions_are_those_far_below_the_largest_gradient():
    assert tolerance.null_directions(GRADIENTS) == {"W_key.bias", "zero"}
    assert tolerance.null_directions({}) == set()
    assert tolerance.null_directions({"small": np.array([1e-200]), "smaller": np.array([1e-201])}) == set()


def test_a_null_direction_is_measured_by_the_largest_gradient_of_all():
    ours = GRADIENTS | {"W_key.bias": -GRADIENTS["W_key.bias"]}
    errors = tolerance.gradient_errors(ours, GRADIENTS)
    assert set(errors) == set(GRADIENTS)
    assert max(errors.values()) <= tolerance.GRADIENT


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_is_seen_even_in_a_null_direction(name):
    ours = GRADIENTS | {name: GRADIENTS[name] + 1e-9}
    assert tolerance.gradient_errors(ours, GRADIENTS)[name] > tolerance.GRADIENT


TRUTH = {"x": np.linspace(1.0, 2.0, 200)}
NOISE = np.random.default_rng(0).normal(size=200) * 1e-4


def excess(factor_of_noise, factor=2.0, eps=0.0):
    ours, theirs = TRUTH["x"] + factor_of_noise * NOISE, TRUTH["x"] + NOISE
    return tolerance.lower_dtype({"x": ours}, {"x": theirs}, TRUTH, factor, eps)["x"]


def test_a_lower_dtype_may_err_as_much_as_the_factor_allows():
    assert excess(1.0) == pytest.approx(0.5)
    assert excess(1.99) < 1 < excess(2.01)
    assert excess(2.01, factor=3.0) < 1


def test_one_rounding_of_the_truth_is_allowed_where_torch_is_exact():
    eps = 1e-7
    exact, off = dict(TRUTH), {"x": TRUTH["x"] * (1 + eps / 2)}
    assert tolerance.lower_dtype(off, exact, TRUTH, 2.0, eps)["x"] < 1
    assert tolerance.lower_dtype(off, exact, TRUTH, 2.0, 0.0)["x"] > 1e9
    assert tolerance.lower_dtype(exact, exact, TRUTH, 2.0, 0.0)["x"] == 0


@pytest.mark.parametrize("worse", [np.eye(200)[7] * 1e-2, np.full(200, 3e-4)])
def test_one_bad_element_and_a_bad_mean_are_both_seen(worse):
    ours = {"x": TRUTH["x"] + worse}
    theirs = {"x": TRUTH["x"] + np.where(np.arange(200) == 0, 1e-3, 1e-5)}
    assert tolerance.lower_dtype(ours, theirs, TRUTH, 2.0, 0.0)["x"] > 1


def test_nan_in_a_lower_dtype_never_passes():
    ours = {"x": np.where(np.arange(200) == 3, np.nan, TRUTH["x"])}
    assert not tolerance.lower_dtype(ours, TRUTH, TRUTH, 2.0, 1e-7)["x"] <= 1


def test_the_rules_are_those_of_the_design():
    assert (tolerance.FORWARD, tolerance.GRADIENT, tolerance.TRAINING) == (1e-12, 1e-11, 1e-10)
    assert (tolerance.LOW_FORWARD, tolerance.LOW_GRADIENT) == (2.0, 3.0)
