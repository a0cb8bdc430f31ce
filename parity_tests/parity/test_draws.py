"""A lower dtype is judged by more than one rounding where one alone fails."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import compare


def doubled(x):
    return 2 * x


def jump_at(bits):
    """Return a function of JAX that is wrong in float16 if one of its numbers rounds to this."""
    return lambda x: jnp.where((x.dtype == jnp.float16) & (x[2, 3] == bits), 3 * x, 2 * x)


@pytest.fixture
def inputs():
    x = np.random.default_rng(0).normal(size=(3, 5))
    # Rounded to 1, but to the next number of float16 in every other draw.
    x[2, 3] = 1 + 2**-11 * 0.999
    return x


def test_what_one_rounding_alone_does_is_no_difference(inputs):
    report = compare(jump_at(1.0), doubled, [inputs], checks=["float16"])
    assert report.passed, report


def test_what_every_rounding_does_is_one(inputs):
    def wrong(x):
        return 2.01 * x if x.dtype == jnp.float16 else 2 * x

    report = compare(wrong, doubled, [inputs], checks=["float16"])
    assert report.check("float16").error > 1
