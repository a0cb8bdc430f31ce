"""Float32 that a module makes by itself: right ports are equal, and a cast of one side is not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn.parity import compare

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")

WIDTH, HALF = 8, 4
STEP = -math.log(10_000) / HALF
TIMES = np.array([3, 17, 400, 999])
# The check in float32 tells whether a difference in float64 is one of rounding.
CHECKS = ["forward", "gradients", "float32"]
NAMED = "what PyTorch makes in float32 is float64, also by name"


class Torch(nn.Module):
    """A linear layer of the sinusoids of times, which name a dtype or do not."""

    def __init__(self, dtype=None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dtype = dtype

    def forward(self, times):
        steps = torch.exp(torch.arange(0.0, HALF, dtype=self.dtype) * STEP)
        angles = times[:, None] * steps if self.dtype is None else times[:, None].float() * steps
        return self.linear(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))


class Unnamed(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, times):
        steps = jnp.exp(jnp.arange(0.0, HALF) * STEP)
        angles = times[:, None] * steps
        return self.linear(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1))


class Single(Unnamed):
    def __call__(self, times):
        steps = jnp.exp(jnp.arange(0.0, HALF, dtype=jnp.float32) * STEP)
        angles = times[:, None].astype(jnp.float32) * steps
        return self.linear(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1))


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("ours", [Unnamed, Single])
def test_float32_within_the_call_of_pytorch_is_read_as_float64(ours, dtype):
    # Its products refuse float32 beside parameters in float64, so that it cannot run as written.
    report = compare(ours(), Torch(dtype).eval(), [TIMES], checks=CHECKS)
    assert report.passed
    notes = " ".join(report.notes)
    assert "tensors of PyTorch that name no dtype are float64" in notes or NAMED in notes
    assert ("what JAX makes in float32 is float64" in notes) == (ours is Single)


def test_a_module_of_float64_is_read_as_it_is_written():
    report = compare(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nn.Linear(3, 2), [(4, 3)], checks=CHECKS)
    assert not any("float32" in note for note in report.notes)


def test_the_default_dtype_of_pytorch_stays_as_it_is():
    compare(Unnamed(), Torch().eval(), [TIMES], checks=["forward"])
    assert torch.get_default_dtype() == torch.float32


def test_another_function_of_float32_is_different():
    class Slower(Single):
        def __call__(self, times):
            return super().__call__(times * 0.5)

    report = compare(Slower(), Torch(torch.float32).eval(), [TIMES], checks=CHECKS)
    assert report.state == "different"
    assert report.check("forward").error > 1e-3
    # What both round is not named, and the lines are those of the modules.
    (found,) = report.difference.hypotheses
    assert "0.5" in found.flax.value
    assert found.torch.places[0].file.endswith("test_float32.py")


class TorchSingleSoftmax(nn.Module):
    """Softmax in float32, as the attention of many models has it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores = self.linear(x)
        return scores.float().softmax(-1).type_as(x) @ scores.mT


class Softmax(nnx.Module):
    def __init__(self, factor):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.factor = factor

    def __call__(self, x):
        scores = self.linear(x)
        return jax.nn.softmax(self.factor * scores) @ scores.T


def test_float32_of_pytorch_is_not_named_beside_another_difference():
    theirs = TorchSingleSoftmax().eval()
    report = compare(Softmax(1.0), theirs, [(3, WIDTH)], checks=CHECKS)
    assert report.passed
    report = compare(Softmax(0.5), theirs, [(3, WIDTH)], checks=CHECKS)
    assert report.causes == ["linear: flax multiplies by 0.5, torch by 1"]


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)


class Attention(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        heads = self.linear(x).reshape(*x.shape[:-1], 2, -1)
        return jax.nn.dot_product_attention(heads, heads, heads)


def test_the_softmax_of_attention_of_jax_is_no_difference():
    # It is taken in float32 whatever it is given, which a port cannot help.
    checks = [*CHECKS, "bfloat16"]
    report = compare(Attention(), TorchAttention().eval(), [(2, 5, WIDTH)], checks=checks)
    assert report.passed
    assert "in float64, JAX's attention takes its softmax in float64" in report.notes


class TorchCast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=-1)


def test_float32_of_jax_alone_is_different():
    class Cast(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            scores = self.linear(x).astype(jnp.float32)
            return jax.nn.softmax(scores, axis=-1).astype(x.dtype)

    report = compare(Cast(), TorchCast().eval(), [(3, WIDTH)], checks=CHECKS)
    assert report.state == "different"
    assert any("float32" in cause for cause in report.causes)


# Longer than the inputs, so that a shifted table has enough rows.
LENGTH = 20


def sinusoids(library, dtype):
    """Return sines and cosines in turn, `(LENGTH, WIDTH)`."""
    steps = library.exp(library.arange(HALF, dtype=dtype) * STEP)
    angles = library.arange(LENGTH, dtype=dtype)[:, None] * steps
    pairs = library.stack([library.sin(angles), library.cos(angles)], -1)
    return pairs.reshape(LENGTH, WIDTH)


class TorchTable(nn.Module):
    """A buffer that is built in float32."""

    table: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", sinusoids(torch, torch.float32))

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.table[: x.shape[1]])


class Table(nnx.Module):
    def __init__(self, dtype, shift=0):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.dtype = dtype
        self.shift = shift

    def __call__(self, x):
        table = jnp.asarray(sinusoids(jnp, self.dtype), x.dtype)
        end = self.shift + x.shape[1]
        return jnp.tanh(self.linear(x) + table[self.shift : end])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_table_that_agrees_to_float32_is_no_difference(dtype):
    report = compare(Table(dtype), TorchTable().eval(), [(2, 9, WIDTH)], checks=CHECKS)
    assert report.passed
    (note,) = [note for note in report.notes if "table" in note]
    assert note.startswith("PyTorch holds table in float32: in float64 it has the values that JAX")


def test_numbers_that_name_no_dtype_are_float32_in_a_run_in_float32():
    class Positions(Attention):
        def __call__(self, x):
            # With x64 enabled these are float64, as are the queries, and the keys are not.
            places = jnp.linspace(0.0, 1.0, x.shape[1])[:, None]
            heads = self.linear(x).reshape(*x.shape[:-1], 2, -1)
            moved = heads + places[..., None]
            return jax.nn.dot_product_attention(moved, heads, heads)

    class TorchPositions(TorchAttention):
        def forward(self, x):
            places = torch.linspace(0.0, 1.0, x.shape[1], dtype=x.dtype)[:, None]
            heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
            moved = heads + places
            attended = nn.functional.scaled_dot_product_attention(moved, heads, heads)
            return attended.transpose(1, 2)

    report = compare(Positions(), TorchPositions().eval(), [(2, 5, WIDTH)], checks=CHECKS)
    assert report.passed


class TorchTurned(TorchAttention):
    """Attention whose queries and keys are multiplied by a buffer in float32."""

    table: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("table", sinusoids(torch, torch.float32))

    def forward(self, x):
        return super().forward(x * self.table[: x.shape[1]])


class Turned(Attention):
    def __call__(self, x):
        table = jnp.asarray(sinusoids(jnp, "float64"), x.dtype)
        return super().__call__(x * table[: x.shape[1]])


def test_a_table_before_the_attention_of_jax_is_no_difference():
    report = compare(Turned(), TorchTurned().eval(), [(2, 9, WIDTH)], checks=CHECKS)
    assert report.state == "equal where tested"


def test_a_table_does_not_hide_another_difference():
    class Sharper(Turned):
        def __call__(self, x):
            return super().__call__(1.5 * x)

    report = compare(Sharper(), TorchTurned().eval(), [(2, 9, WIDTH)], checks=CHECKS)
    assert report.state == "different"
    assert any("1.5" in cause for cause in report.causes)


def test_a_table_that_is_shifted_is_different():
    report = compare(Table("float32", 1), TorchTable().eval(), [(2, 9, WIDTH)], checks=CHECKS)
    assert report.state == "different"


def test_a_gradient_beside_a_table_is_judged():
    # The outputs agree to float32, but half of the gradient is missing.
    class Stopped(Table):
        def __call__(self, x):
            half = 0.5 * super().__call__(x)
            return half + jax.lax.stop_gradient(half)

    report = compare(Stopped("float32"), TorchTable().eval(), [(2, 9, WIDTH)], checks=CHECKS)
    assert report.state == "different"
