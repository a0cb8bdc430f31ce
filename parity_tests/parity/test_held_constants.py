"""Constants in float32, such as rotary frequencies, whose rounding no port can repeat."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn.parity import compare
from flax_attn.parity.trace import held_constants
from flax_attn.parity.trace.held_constants import is_rounded

WIDTH = 8
INPUTS = [(2, 5, WIDTH)]
BASE = 10000.0


class TorchRotary(nn.Module):
    """Rotary positions as models hold them: their frequencies are a buffer in float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        exponents = torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH
        self.register_buffer("inv_freq", 1 / BASE**exponents, persistent=False)

    def forward(self, x):
        x = self.linear(x)
        angles = torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def frequencies(numpy, base=BASE):
    return 1 / base ** (numpy.arange(0.0, WIDTH, 2) / WIDTH)


class Rotary(nnx.Module):
    """It computes the tables where it is called, in the dtype of JAX."""

    def __init__(self, base=BASE):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.base = base

    def __call__(self, x):
        first, second = jnp.split(self.linear(x), 2, axis=-1)
        cos, sin = (table[None] for table in self.tables(x.shape[1]))
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def tables(self, length):
        angles = jnp.outer(jnp.arange(1.0 * length), frequencies(jnp, self.base))
        return jnp.cos(angles), jnp.sin(angles)


class TablesOfNumPy(Rotary):
    """It names float32, and holds no frequencies: PyTorch's are found from the tables."""

    def tables(self, length):
        angles = np.outer(np.arange(length), frequencies(np, self.base))
        return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


class HeldTables(Rotary):
    """It holds tables of more positions than a call takes, each number rounded by itself."""

    def __init__(self, base=BASE):
        super().__init__(base)
        cos, sin = Rotary.tables(self, 256)
        self.cos = nnx.Variable(cos.astype(jnp.float32))
        self.sin = nnx.Variable(sin.astype(jnp.float32))

    def tables(self, length):
        return self.cos[...][:length], self.sin[...][:length]


PORTS = [Rotary, TablesOfNumPy, HeldTables]
CHECKS = ["forward", "gradients", "other shapes", "long sequence"]


@pytest.mark.parametrize("port", PORTS)
def test_frequencies_in_float32_are_no_difference(port):
    report = compare(port(), TorchRotary().eval(), INPUTS, checks=CHECKS)
    assert report.passed, str(report)
    notes = [note for note in report.notes if "in float32: in float64 it has the values" in note]
    assert notes


class TorchTwo(TorchRotary):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.dense(super().forward(x))


class Two(Rotary):
    """Its layers have other names, so that the outputs are computed to pair them."""

    def __init__(self):
        self.base = BASE
        self.alpha = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.omega = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def linear(self, x):
        return self.alpha(x)

    def __call__(self, x):
        return self.omega(super().__call__(x))


def test_what_ran_before_the_constants_were_shared_is_forgotten():
    # In train mode, which a module may be left in where it changes nothing.
    checks = ["twice", "running statistics"]
    report = compare(Two(), TorchTwo().train(), INPUTS, checks=checks)
    assert report.check("twice").note == ""
    assert report.check("running statistics").skipped.endswith("PyTorch changes nothing")


def test_the_note_names_the_constant():
    report = compare(Rotary(), TorchRotary().eval(), INPUTS, checks=["forward"])
    (note,) = report.notes
    assert note.startswith(
        "PyTorch holds inv_freq in float32: in float64 it has the values that JAX computes, at most"
    )
    assert note.endswith("roundings of float32 away")


class TorchAttribute(TorchRotary):
    """Its frequencies are no buffer, so that no cast of the module reaches them."""

    def __init__(self):
        super().__init__()
        frequencies = self.inv_freq
        del self.inv_freq
        self.inv_freq = frequencies


class TorchScaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(WIDTH**-0.5, dtype=torch.float32))

    def forward(self, x):
        return self.linear(x) * self.scale


class Scaled(nnx.Module):
    def __init__(self, scale=WIDTH**-0.5):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.scale = scale

    def __call__(self, x):
        return self.linear(x) * self.scale


def test_frequencies_that_are_no_buffer():
    checks = [*CHECKS, "float32"]
    report = compare(Rotary(), TorchAttribute().eval(), INPUTS, checks=checks)
    assert report.passed, str(report)


def test_a_number_in_float32_is_no_difference():
    report = compare(Scaled(), TorchScaled().eval(), INPUTS, checks=["forward", "float32"])
    assert report.passed, str(report)
    assert report.notes[0].startswith("PyTorch holds scale in float32")


def test_another_number_is_a_difference():
    # A thousandth of a percent off.
    report = compare(Scaled(1.00001 * WIDTH**-0.5), TorchScaled().eval(), INPUTS, checks=CHECKS)
    assert report.state == "different"


@pytest.mark.parametrize("port", PORTS)
def test_another_base_is_a_difference(port):
    # No frequency but the first is the same.
    report = compare(port(BASE * 1.001), TorchRotary().eval(), INPUTS, checks=CHECKS)
    assert report.state == "different"


def test_the_constants_of_the_module_that_was_passed_stay():
    module = TorchRotary().eval()
    before = module.inv_freq.clone()
    compare(Rotary(), module, INPUTS, checks=["forward"])
    assert module.inv_freq.dtype == torch.float32
    assert torch.equal(module.inv_freq, before)


def test_a_fault_beside_rounded_frequencies_is_the_only_difference():
    class Doubled(Rotary):
        def __call__(self, x):
            return 2 * super().__call__(x)

    report = compare(Doubled(), TorchRotary().eval(), INPUTS, checks=["forward"])
    (cause,) = report.causes
    assert cause == "the whole module: flax multiplies by 2, torch by 1"


@pytest.mark.parametrize(
    "array",
    [
        np.float32([0, 1, 2, -3]),
        np.float32([0.5, 0.25]),
        np.float32([-1e9, 0]),
        np.array(0.5, np.float32),
        np.float64([1 / 3, 2 / 3]),
    ],
)
def test_short_numbers_and_those_of_float64_are_not_rounded(array):
    assert not is_rounded(array)


def test_tables_of_float32_are_rounded_in_each_dtype():
    table = np.float32([1, 1 / 3])
    assert is_rounded(table)
    assert is_rounded(table.astype(np.float64))


def test_constants_that_cannot_be_looked_at_are_named(monkeypatch):
    def fail(pair):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(held_constants, "share_constants", fail)
    report = compare(Rotary(), TorchRotary().eval(), INPUTS, checks=["forward"], locate=False)
    assert report.state == "different"
    (note,) = report.notes
    assert note == "constants in float32 were not looked at: RuntimeError: no such operation"
