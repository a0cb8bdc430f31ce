"""One-pass norms are named where a residual connection hides them from the checks."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare
from flax_attn.parity.stress import ONE_PASS


class Residual(nnx.Module):
    def __init__(self, **options):
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        return x + self.norm(x)


class TorchResidual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(x)


def notes(**options):
    report = compare(Residual(**options), TorchResidual(), [(3, 4, 6)], checks=["forward"])
    # In float64 neither way to the variance fails: a note is all that there is.
    assert report.passed
    return report.notes


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_one_pass_is_named():
    assert any("1 norm takes the variance in one pass (as norm does)" in note for note in notes())


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_two_passes_are_not():
    assert not any("one pass" in note for note in notes(use_fast_variance=False))


def offset(flax, theirs, inputs, **options):
    checks = ["forward", "mean offset"]
    return compare(flax, theirs.eval(), inputs, checks=checks, **options)


def fails_by_flax(report):
    """Whether all that fails is the variance that norms of Flax take in one pass."""
    return report.check("mean offset").untested == (f"mean offset: {ONE_PASS}",)


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_within_a_model_is_judged_by_itself():
    assert fails_by_flax(offset(Residual(), TorchResidual(), [(3, 4, 6)]))
    right = offset(Residual(use_fast_variance=False), TorchResidual(), [(3, 4, 6)])
    assert right.passed
    assert "norm by itself" in right.check("mean offset").errors


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_the_default_of_flax_is_equal_where_tested():
    ours = nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0))
    report = compare(ours, torch.nn.LayerNorm(6).eval(), [(2, 3, 6)])
    assert report.state == "equal where tested"
    assert f"mean offset: {ONE_PASS}" in report.coverage.untested
    assert ours.use_fast_variance, "the module of the caller stays as it is"


class OwnNorm(nnx.Module):
    """A norm of one's own, with the variance in one pass."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(6))
        self.bias = nnx.Param(jnp.zeros(6))

    def __call__(self, x):
        mean = x.mean(axis=-1, keepdims=True)
        variance = (x**2).mean(axis=-1, keepdims=True) - mean**2
        return (x - mean) / jnp.sqrt(variance + 1e-5) * self.scale + self.bias


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_of_ones_own_is_different():
    report = offset(OwnNorm(), torch.nn.LayerNorm(6), [(3, 6)])
    assert report.state == "different"
    assert report.check("mean offset").error > 1


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_what_else_fails_at_an_offset_is_different():
    # A difference is seen where numbers are large.
    def call(module, x):
        return module(x) + jnp.where(x > 500, 1e-6 * x, 0)

    report = offset(Residual(), TorchResidual(), [(3, 4, 6)], flax_call=call)
    assert report.check("forward").passed
    assert report.check("mean offset").failed


class TorchRoundedNorm(torch.nn.LayerNorm):
    """A norm that computes in float32, unless the call of the model widens it."""

    dtype = torch.float32

    def forward(self, x):
        return super().forward(x.to(self.dtype).double())


def widened(module, x):
    TorchRoundedNorm.dtype = torch.float64
    try:
        return module(x)
    finally:
        TorchRoundedNorm.dtype = torch.float32


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_by_itself_computes_as_within_the_call_of_the_model():
    theirs = TorchResidual()
    theirs.norm = TorchRoundedNorm(6)
    right = Residual(use_fast_variance=False)
    assert offset(right, theirs, [(3, 4, 6)], torch_call=widened).passed
    one_pass = offset(Residual(), theirs, [(3, 4, 6)], torch_call=widened)
    assert fails_by_flax(one_pass)


class Tokens(nnx.Module):
    """An embedding, and a norm of images or the like with their channels last."""

    def __init__(self, **options):
        self.embed = nnx.Embed(7, 6, rngs=nnx.Rngs(0))
        self.norm = nnx.GroupNorm(6, 2, epsilon=1e-5, rngs=nnx.Rngs(0), **options)

    def __call__(self, ids):
        return self.norm(self.embed(ids))


class TorchTokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.GroupNorm(2, 6)

    def forward(self, ids):
        # PyTorch has the channels second.
        channels_second = self.embed(ids).movedim(-1, 1)
        return self.norm(channels_second).movedim(1, -1)


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_norms_are_judged_where_no_input_is_floating():
    # Ids have no mean to move: the norm gets inputs of its own.
    ids = [np.array([[3, 5, 1], [2, 4, 6]])]
    one_pass = offset(Tokens(), TorchTokens(), ids)
    assert fails_by_flax(one_pass)
    right = offset(Tokens(use_fast_variance=False), TorchTokens(), ids)
    assert right.passed
    check = right.check("mean offset")
    assert list(check.errors) == ["norm by itself"]
    assert check.note == "norms by themselves alone: no input is floating"


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_alone_is_judged_once():
    ours = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
    report = offset(ours, torch.nn.LayerNorm(6), [(3, 6)])
    errors = list(report.check("mean offset").errors)
    # No "norm by itself", which is the module.
    gradients = [f"gradient of {name}" for name in ("weight", "bias", "input 0")]
    assert errors == ["output", *gradients]
