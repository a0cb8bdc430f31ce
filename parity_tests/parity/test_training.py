"""Each optimizer in the words of optax and of torch.optim: the same steps, to the last digits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import Recipe, compare

STEPS = 60
BASE = Recipe(steps=STEPS, learning_rate=0.02)
RECIPES = {
    "sgd": replace(BASE, optimizer="sgd", momentum=0.9, weight_decay=0.05),
    "adam": replace(BASE, optimizer="adam", betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    "adamw": replace(BASE, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    "clipped": replace(BASE, optimizer="sgd", clip_norm=0.3),
    "cosine": replace(BASE, schedule="cosine", warmup=7),
    "linear": replace(BASE, schedule="linear", warmup=4),
}
# As little as changes a loss by more than the rule.
WRONG = [
    ("sgd", {"momentum": 0.8999}),
    ("sgd", {"weight_decay": 0.0501}),
    ("adam", {"optimizer": "adamw"}),
    ("adam", {"betas": (0.8, 0.9501)}),
    ("adamw", {"eps": 1.001e-3}),
    ("adamw", {"betas": (0.8001, 0.95)}),
    ("clipped", {"clip_norm": 0.3001}),
    ("clipped", {"clip_norm": None}),
    ("cosine", {"warmup": 8}),
    ("cosine", {"schedule": "linear"}),
    ("linear", {"warmup": 0}),
    ("linear", {"learning_rate": 0.02001}),
]


def trained(recipe):
    sides = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)
    options = {"layout": "torch", "checks": ["training"], "locate": False}
    return compare(*sides, [(5, 3)], recipe=recipe, **options)


@pytest.mark.parametrize("name", RECIPES)
def test_both_sides_take_the_same_steps(name):
    report = trained(RECIPES[name])
    assert report.passed, report.explain()
    assert report.check("training").errors.keys() == {"weight", "bias", "loss"}
    losses = report.pair.trained[1]["loss"]
    assert losses.shape == (STEPS,)
    assert losses[-1] < losses[0]


def title(value):
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("name", "change"), WRONG, ids=title)
def test_every_hyper_parameter_is_felt(name, change, monkeypatch):
    # PyTorch keeps the recipe.
    other = replace(RECIPES[name], **change).optax()
    monkeypatch.setattr(Recipe, "optax", lambda self: other)
    assert not trained(RECIPES[name]).passed


def rates_of(scheduler, **options):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=BASE.learning_rate)
    schedule = scheduler(optimizer, **options)
    rates = []
    for _ in range(STEPS):
        rates += schedule.get_last_lr()
        # PyTorch warns of a schedule whose optimizer takes no step.
        optimizer.step()
        schedule.step()
    return rates


SCHEDULES = {
    "cosine": (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": STEPS}),
    "linear": (
        torch.optim.lr_scheduler.LinearLR,
        {"start_factor": 1.0, "end_factor": 0.0, "total_iters": STEPS},
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_torch(name):
    scheduler, options = SCHEDULES[name]
    rates = replace(BASE, schedule=name).rates()
    assert rates == pytest.approx(rates_of(scheduler, **options))


def test_the_rate_rises_while_it_warms_up():
    warm = replace(BASE, schedule="cosine", warmup=4).rates()
    assert warm[:4] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert warm[4] == BASE.learning_rate
    assert np.diff(warm[4:]).max() < 0


def test_defaults_that_differ_are_named():
    decay = "weight_decay is 0.0001 by default in optax.adamw and 0.01 in torch.optim.AdamW"
    assert decay in "\n".join(Recipe("adamw").notes())
    # The others decay nothing by default on either side.
    others = [*Recipe("adam").notes(), *Recipe("sgd").notes()]
    assert not any("weight_decay" in note for note in others)
    assert "both divide by the norm + 1e-6 here" in Recipe(clip_norm=1.0).notes()[-1]
    assert trained(Recipe(steps=1)).notes == Recipe().notes()


NO_SCHEDULE = r"schedule must be one of 'constant', 'cosine', 'linear'; got 'step'"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "lion"}, r"optimizer must be one of 'sgd', 'adam', 'adamw'; got 'lion'"),
        ({"schedule": "step"}, NO_SCHEDULE),
        ({"steps": 0}, r"steps must be a positive integer; got steps=0"),
    ],
)
def test_a_recipe_that_is_none(options, match):
    with pytest.raises(ValueError, match=match):
        Recipe(**options)


class Branches(nnx.Module):
    """Two outputs, one of them with elements that are not finite, and an unused layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 2, rngs=rngs)
        self.second = nnx.Linear(3, 5, rngs=rngs)
        self.unused = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        hidden = self.second(x).at[:, 1].set(-jnp.inf)
        return {"first": self.first(x), "second": hidden}


class TorchBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
        self.second = torch.nn.Linear(3, 5)
        self.unused = torch.nn.Linear(3, 4)

    def forward(self, x):
        column = torch.arange(5) == 1
        hidden = self.second(x).masked_fill(column, -torch.inf)
        return {"first": self.first(x), "second": hidden}


@pytest.fixture(scope="module")
def branches():
    sides = Branches(), TorchBranches()
    report = compare(*sides, [(7, 3)], checks=["training"], recipe=BASE, locate=False)
    assert report.passed, report.explain()
    return report.pair


def test_every_output_is_trained(branches):
    _, theirs = branches.trained
    for name in ("first.weight", "second.weight"):
        start = branches.weights[name]
        assert np.abs(theirs[name] - start).max() > 0.1
    # The elements that are not finite are left out of the loss.
    assert np.isfinite(theirs["loss"]).all()


def test_a_parameter_without_effect_decays(branches):
    # Its gradient is 0 on both sides.
    factor = 1 - BASE.learning_rate * BASE.weight_decay
    decayed = branches.weights["unused.weight"] * factor**STEPS
    for trained in branches.trained:
        assert trained["unused.weight"] == pytest.approx(decayed, rel=1e-12)


# In train mode nnx.BatchNorm mixes dtypes.
@pytest.mark.usefixtures("usual_promotion")
def test_what_is_not_trained_is_not_compared():
    options = {"use_running_average": True, "use_bias": False, "use_scale": False}
    ours = nnx.BatchNorm(3, epsilon=1e-5, momentum=0.9, rngs=nnx.Rngs(0), **options)
    theirs = torch.nn.BatchNorm1d(3, affine=False).eval()
    report = compare(ours, theirs, [(5, 3)])
    assert report.passed, report.explain()
    assert report.check("training").skipped == "no parameter is trained"


class Normed(nnx.Module):
    """A bias before batch statistics, which take all effect from it, and one of them returned."""

    def __init__(self, momentum=0.9):
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(5, 6, rngs=rngs)
        options = {"momentum": momentum, "use_fast_variance": False}
        self.norm = nnx.BatchNorm(6, epsilon=1e-5, rngs=rngs, **options)

    def __call__(self, x, dropout_key=None):
        return jax.nn.relu(self.norm(self.fc(x))), self.norm.mean[...]


class WithAGradient(Normed):
    def __call__(self, x, dropout_key=None):
        output, mean = super().__call__(x)
        bias = self.fc.bias[...].sum()
        # Zero, with a gradient.
        return output + 1e-6 * (bias - jax.lax.stop_gradient(bias)), mean


class TorchNormed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x, dropout_key=None):
        output = torch.relu(self.norm(self.fc(x)))
        return output, self.norm.running_mean.clone()


def trained_normed(ours):
    theirs = TorchNormed().eval()
    return compare(ours, theirs, [(40, 5)], checks=["training"], locate=False).check("training")


@pytest.mark.usefixtures("usual_promotion")
def test_what_moves_by_rounding_alone_is_named_and_not_compared():
    check = trained_normed(Normed())
    assert check.passed, check.explain()
    assert check.note == "not compared, as AdamW divides rounding by rounding: fc.bias"


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize(
    ("ours", "worst"), [(WithAGradient(), "fc.bias"), (Normed(momentum=0.8), "loss")]
)
def test_a_gradient_and_a_state_that_pytorch_has_not_fail(ours, worst):
    check = trained_normed(ours)
    assert not check.passed
    assert check.worst == worst


class Average(nnx.Module):
    """A state that moves in eval mode, too."""

    def __init__(self, rate=0.1):
        self.fc = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
        self.mean = nnx.Variable(jnp.zeros(6))
        self.rate = rate

    def __call__(self, x):
        y = self.fc(x)
        new = jax.lax.stop_gradient(y.mean(0))
        self.mean.set_value((1 - self.rate) * self.mean[...] + self.rate * new)
        return y - self.mean[...]


class TorchAverage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(5, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = self.fc(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0).detach()
        return y - self.mean


@pytest.mark.usefixtures("usual_promotion")
def test_each_step_begins_with_the_state_that_the_last_one_left():
    theirs = TorchAverage().eval()
    checks = ["forward", "twice", "training"]
    report = compare(Average(), theirs, [(7, 5)], checks=checks, locate=False)
    assert report.passed, report.explain()
    # A rate of the average is felt as well, which the first step does not show.
    report = compare(Average(rate=0.11), theirs, [(7, 5)], checks=["training"], locate=False)
    assert not report.passed
