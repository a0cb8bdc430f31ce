"""What all tests share: the strictest JAX, and a way around the shape checks for input that is wrong on purpose."""

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def no_shape_checks():
    """Let wrong shapes and types reach the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
