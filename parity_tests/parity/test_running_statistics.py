"""The check `running statistics`: train mode without dropout, and what it keeps."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare

pytestmark = pytest.mark.usefixtures("usual_promotion")
D = 4
NAME = "running statistics"


def norm(kind=nnx.BatchNorm, **options):
    return kind(D, epsilon=1e-5, rngs=nnx.Rngs(0), **{"momentum": 0.9, **options})


def judged(ours, theirs, shape=(5, D), **options):
    with jax.enable_x64(True):
        return compare(ours, theirs.eval(), [shape], checks=["forward", NAME], **options)


class Unbiased(nnx.BatchNorm):
    """A norm that divides the variance of a batch by n - 1, as PyTorch does."""

    def __call__(self, x, **options):
        old = self.var[...]
        output = super().__call__(x, **options)
        if not self.use_running_average:
            added = self.var[...] - self.momentum * old
            self.var[...] = self.momentum * old + added * len(x) / (len(x) - 1)
        return output


class Biased(nnx.BatchNorm):
    """A norm of the user's, which is not excused as one of Flax is."""


class Stopped(nnx.BatchNorm):
    """A norm whose mean has no gradient in train mode."""

    def __call__(self, x, **options):
        if self.use_running_average:
            return super().__call__(x, **options)
        mean = jax.lax.stop_gradient(x.mean(0))
        super().__call__(x, **options)
        inverse = jax.lax.rsqrt(jnp.square(x - mean).mean(0) + self.epsilon)
        return (x - mean) * inverse * self.scale[...] + self.bias[...]


class Average(torch.nn.BatchNorm1d):
    def __init__(self):
        # Without a momentum it averages all calls.
        super().__init__(D, momentum=None)
        self.num_batches_tracked.add_(9)


def test_the_variance_of_nnx_is_named_and_not_called_different():
    report = judged(norm(), torch.nn.BatchNorm1d(D))
    assert report.passed, report.explain()
    assert report.state == "equal where tested"
    said = "running_var as equal: nnx.BatchNorm divides the variance of a batch by n"
    (found,) = [line for line in report.coverage.untested if line.startswith(said)]
    assert "PyTorch adds 1.25 times as much" in found


def test_an_unbiased_variance_is_equal():
    check = judged(norm(Unbiased), torch.nn.BatchNorm1d(D)).check(NAME)
    assert check.ran
    assert check.passed, check.explain()
    assert not check.untested


@pytest.mark.parametrize(
    ("ours", "theirs", "worst"),
    [
        (norm(momentum=0.1), torch.nn.BatchNorm1d(D), "running_mean after the call"),
        (norm(Biased), torch.nn.BatchNorm1d(D), "running_var after the call"),
        (norm(Stopped), torch.nn.BatchNorm1d(D), "gradient of input 0"),
        # The first call averages as a momentum of 0.1 does.
        (norm(Unbiased), Average(), "running_mean after the call, of two calls"),
    ],
)
def test_other_updates_are_different(ours, theirs, worst):
    report = judged(ours, theirs)
    assert [check.name for check in report.failed] == [NAME]
    errors = report.check(NAME).errors
    assert errors[worst] > 1


def test_the_momentum_is_named():
    check = judged(norm(momentum=0.1), torch.nn.BatchNorm1d(D)).check(NAME)
    assert "JAX moves running_mean 9 times as far" in check.note


def test_dropout_is_off():
    # Else the batch of each side would have other zeros.
    ours = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), norm(Unbiased))
    theirs = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(D))
    check = judged(ours, theirs).check(NAME)
    assert check.ran
    assert check.passed, check.explain()


class SetsEval(torch.nn.BatchNorm1d):
    def forward(self, x):
        output = super().forward(x)
        self.eval()
        return output


class Noisy(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x) if self.training else x)


def fixed(module, x):
    return module(x, use_running_average=True)


@pytest.mark.parametrize(
    ("theirs", "shape", "options", "reason"),
    [
        # Of one row there is no variance.
        (torch.nn.BatchNorm1d(D), (1, D), {}, "Expected more than 1 value per channel"),
        (torch.nn.BatchNorm1d(D), (5, D), {"flax_call": fixed}, "and nothing in JAX"),
        (SetsEval(D), (5, D), {}, "leaves train mode by itself"),
        (Noisy(D), (5, D), {}, "draws random numbers in train mode"),
    ],
)
def test_what_cannot_be_compared_is_not_tested(theirs, shape, options, reason):
    report = judged(norm(), theirs, shape, **options)
    assert not report.check(NAME).ran
    assert any(reason in line for line in report.coverage.untested)


def test_nothing_is_said_of_modules_without_statistics():
    report = judged(nnx.Linear(D, 3, rngs=nnx.Rngs(0)), torch.nn.Linear(D, 3))
    assert report.check(NAME).missing.startswith("not run: dropout aside, train mode")
    assert not any(NAME in line for line in report.coverage.untested)
