"""What holds in every two-sided test: float64 where asked for, no silent promotion, one thread."""

import jax
import jaxtyping
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def strict_numerics():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def no_shape_checks():
    """Let bad input through to the library's own errors, which the import hook would otherwise forestall."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
