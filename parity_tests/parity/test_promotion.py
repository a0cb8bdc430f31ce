"""A module that mixes dtypes, judged by a process in which JAX promotes none."""

import jax
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare


@pytest.mark.parametrize("setting", ["strict", "standard"])
def test_a_module_that_mixes_dtypes_is_judged_with_the_default_of_jax(setting):
    # In train mode nnx.BatchNorm mixes dtypes.
    options = {"epsilon": 1e-5, "momentum": 0.9, "use_fast_variance": False}
    ours = nnx.BatchNorm(4, rngs=nnx.Rngs(0), **options)
    theirs = torch.nn.BatchNorm1d(4).eval()
    checks = ["forward", "running statistics"]
    with jax.numpy_dtype_promotion(setting), jax.numpy_rank_promotion("allow"):
        report = compare(ours, theirs, [(5, 4)], checks=checks, locate=False)
    assert report.passed, report.explain()
    assert report.check("running statistics").ran
    notes = "\n".join(report.notes)
    said = "numpy_dtype_promotion=strict refuses" in notes
    assert said == (setting == "strict")


def mixed(x):
    # float64 and float32, of which strict makes no sum.
    return 1.5 * jax.numpy.tanh(x) + jax.numpy.ones(3, "float32")


def mixed_in_torch(x):
    return 1.25 * torch.tanh(x) + torch.ones(3, dtype=torch.float32)


def test_a_module_that_mixes_dtypes_is_located_with_the_default_of_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("allow"):
        report = compare(mixed, mixed_in_torch, [(5, 3)], checks=["forward"])
    assert not report.passed
    assert report.difference is not None, report.notes
    (found,) = report.difference.hypotheses
    assert (found.flax.value, found.torch.value) == ("1.5", "1.25"), found
