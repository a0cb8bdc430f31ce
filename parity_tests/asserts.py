"""The rules of float64, asserted of arrays by name."""

from flax_attn.parity import tolerance


def assert_near(found, expected, scale=0.0):
    """Assert that outputs agree to rounding; errors are relative to at least `scale`."""
    errors = tolerance.relative(found, expected, scale)
    assert max(errors.values()) <= tolerance.FORWARD, errors


def assert_gradients_near(found, expected):
    """Assert that gradients agree to rounding."""
    errors = tolerance.gradient_errors(found, expected)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def assert_results_near(found, expected):
    """Assert that outputs agree, and the gradients beside them."""
    assert_near(found[0], expected[0])
    assert_gradients_near(found[1], expected[1])
