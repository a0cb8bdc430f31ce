"""One-pass norms are named where a residual connection hides them from the checks."""

import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare


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
    assert report.passed
    return report.notes


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_one_pass_is_named():
    assert any("1 norm takes the variance in one pass (as norm does)" in note for note in notes())


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_two_passes_are_not():
    assert not any("one pass" in note for note in notes(use_fast_variance=False))


def offset(flax, theirs, inputs):
    return compare(flax, theirs.eval(), inputs, checks=["forward", "mean offset"])


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_within_a_model_is_judged_by_itself():
    report = offset(Residual(), TorchResidual(), [(3, 4, 6)])
    check = report.check("mean offset")
    assert check.errors["norm by itself"] > 1
    assert offset(Residual(use_fast_variance=False), TorchResidual(), [(3, 4, 6)]).passed


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
    checks = ["forward", "mean offset"]
    assert compare(right, theirs.eval(), [(3, 4, 6)], checks=checks, torch_call=widened).passed
    one_pass = Residual()
    assert not compare(one_pass, theirs, [(3, 4, 6)], checks=checks, torch_call=widened).passed


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
        self.embed, self.norm = torch.nn.Embedding(7, 6), torch.nn.GroupNorm(2, 6)

    def forward(self, ids):
        return self.norm(self.embed(ids).movedim(-1, 1)).movedim(1, -1)


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_norms_are_judged_where_no_input_is_floating():
    ids = [np.array([[3, 5, 1], [2, 4, 6]])]
    report = offset(Tokens(), TorchTokens(), ids)
    check = report.check("mean offset")
    assert list(check.errors) == ["norm by itself"]
    assert check.error > 1
    assert check.note == "norms by themselves alone: no input is floating"
    assert offset(Tokens(use_fast_variance=False), TorchTokens(), ids).passed


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_norm_alone_is_judged_once():
    report = offset(
        nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0)), torch.nn.LayerNorm(6), [(3, 6)]
    )
    assert list(report.check("mean offset").errors) == [
        "output",
        "gradient of weight",
        "gradient of bias",
        "gradient of input 0",
    ]
