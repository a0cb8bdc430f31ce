"""What rounding alone does is no difference: in deep convolutions, in training, below a range."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare, tolerance
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.below_range import arrays_below_range
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.float64_checks import training
from flax_attn.parity.lower_dtype import lower_dtype
from flax_attn.parity.training import Recipe

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS = 6


class Deep(nnx.Module):
    """Convolutions one after the other, which large weights would make larger and larger."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Conv(12, 12, (5,), rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        x = jnp.swapaxes(x, 1, 2)
        for layer in self.layers:
            x = x + jax.nn.relu(layer(x))
        return jnp.swapaxes(x, 1, 2)


class TorchDeep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Conv1d(12, 12, 5, padding=2) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def test_deep_convolutions_keep_their_size_and_train_alike():
    report = compare(Deep(nnx.Rngs(0)), TorchDeep(), [(2, 12, 9)], checks=["forward", "training"])
    assert report.passed, report.explain()
    assert np.abs(report.pair.plain.outputs["output"]).max() < 50


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (torch.nn.Conv2d(6, 4, (3, 5)), 6 * 15),
        (torch.nn.Conv2d(6, 4, 3, groups=2), 3 * 9),
        (torch.nn.ConvTranspose1d(6, 4, 4, stride=2), 6 * 2),
        (torch.nn.ConvTranspose1d(6, 4, 2, stride=3), 6),
    ],
)
def test_an_output_of_a_convolution_sums_up_its_taps(layer, count):
    assert TorchAdapter(layer).summed == {"weight": count}
    inside = TorchAdapter(torch.nn.Sequential(layer, torch.nn.Linear(2, 2)))
    assert inside.summed == {"0.weight": count}


class Amplified(nnx.Module):
    """A bias before a map that amplifies rounding."""

    def __init__(self):
        self.bias = nnx.Param(jnp.ones(7))

    def __call__(self, x):
        return amplified(jnp, x + self.bias[...], lambda x: x + (x + x))


class TorchAmplified(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(7))

    def forward(self, x):
        return amplified(torch, x + self.bias, lambda x: x * 3)


def amplified(library, x, triple):
    """A map that triples small differences, 14 times, in one of two orders."""
    for _ in range(14):
        x = library.sin(triple(x))
    return x


def test_training_that_amplifies_rounding_is_judged_by_that_of_pytorch(paired):
    with on_cpu():
        pair = paired(Amplified(), TorchAmplified(), (4, 7))
        ours, theirs = [found["loss"] for found in pair.trained]
        # As far as rounding has grown beyond the rule, and not to a difference of all digits.
        steps = 1 + int(np.argmax(np.abs(ours / theirs - 1) > 10 * tolerance.TRAINING))
        pair = replace(pair, recipe=Recipe(steps=steps))
        check = training(pair)
        errors = tolerance.relative(*pair.trained)
    assert tolerance.TRAINING < max(errors.values()) < tolerance.MOST_TRAINING
    assert check.passed
    assert check.limit == 1
    assert "one rounding more of a step" in check.note


def test_training_that_differs_is_no_rounding(paired):
    with on_cpu():
        pair = paired(Off(), TorchOff(), (4, 7))
        check = training(pair)
    assert check.error > tolerance.TRAINING
    assert not check.passed


class Off(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.ones(7))

    def __call__(self, x):
        return jnp.sin(x + self.bias[...]) * (1 + 1e-8)


class TorchOff(TorchAmplified):
    def forward(self, x):
        return torch.sin(x + self.bias)


def small(x):
    """Products of about 4e-6, of which float16 has no digits, in one order."""
    return (x * 2e-3) * (x * 2e-3) * 125 * 125


def small_in_another_order(x):
    return x * x * 0.0625


def test_what_lies_below_float16_is_not_tested_and_named(paired):
    with on_cpu():
        pair = paired(small, small_in_another_order, (4, 7))
        assert lower_dtype("bfloat16", pair).passed
        where = arrays_below_range(pair, "float16")
        check = lower_dtype("float16", pair)
    assert "test_rounding.py" in where
    assert "hold no number as large as the smallest normal one, 6.1e-05" in where
    assert check.passed
    assert any("float16" in sentence and where in sentence for sentence in check.untested)


def test_what_is_not_finite_in_float16_fails_all_the_same(paired):
    def overflows(x):
        # 65,504 is the largest number.
        return (x * 1e3) * (x * 1e3) * 1e-3 * 1e-3 + 0 * small(x)

    with on_cpu():
        pair = paired(overflows, lambda x: x * x, (4, 7))
        check = lower_dtype("float16", pair)
    assert check.failed
