"""One fault is one difference, wherever the two sides write it otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flax_attn.parity.trace.hypothesis import Hypothesis, Side, grouped_by_kind
from flax_attn.parity.trace.program import Place

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
X, D = (2, 6, 8), 8


def test_groups_of_another_size_are_one_difference(differ):
    def flax(x):
        groups = x.reshape(-1, 4, 2)  # planted
        mean = groups.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(groups.var(-1, keepdims=True) + 1e-3)
        return ((groups - mean) * scale).reshape(x.shape)

    def theirs(x):
        return F.group_norm(x.reshape(-1, D), 2, eps=1e-3).view(x.shape)

    found = differ(flax, theirs, X)
    assert found.repaired, str(found)
    (cause,) = found.causes
    assert "over 2, torch over 4" in cause


def shifted_layers(shift):
    """Layers that mix a token with the one before it, in sums of another form in PyTorch."""

    def flax(x, w, a, b):
        for i in range(2):
            before = shift(x)
            one = before + (x - before) * a
            other = before + (x - before) * b
            x = x + jnp.sin(one @ w[i]) * jnp.tanh(other @ w[i + 2])
            before = shift(x)
            x = x + jnp.cos((x + (before - x) * a) @ w[i + 4])
        return x

    return flax


def shifted_in_torch(x, w, a, b):
    for i in range(2):
        before = F.pad(x, (0, 0, 1, -1))
        one = x * a + before * (1 - a)
        other = x * b + before * (1 - b)
        x = x + (one @ w[i]).sin() * (other @ w[i + 2]).tanh()
        before = F.pad(x, (0, 0, 1, -1))
        x = x + ((x + (before - x) * a) @ w[i + 4]).cos()
    return x


def rolled(x):
    return jnp.roll(x, 1, axis=1)  # planted


def from_behind(x):
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:]  # planted


def from_before(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


@pytest.mark.parametrize("shift", [rolled, from_behind])
def test_a_shift_that_other_formulas_take_is_one_difference(shift, differ):
    shapes = X, (6, D, D), (D,), (D,)
    assert not differ(shifted_layers(from_before), shifted_in_torch, *shapes).hypotheses
    found = differ(shifted_layers(shift), shifted_in_torch, *shapes)
    assert found.repaired, str(found)
    # One in each sublayer, where nothing names what is shifted.
    assert len(found.hypotheses) <= 4, str(found)
    for one in found.hypotheses:
        assert one.flax.places[0].source.endswith("# planted")
        assert not one.doubtful


def side(value, line):
    return Side(value, value, (Place("side.py", line),))


def test_tables_that_one_line_takes_are_one_difference():
    months = side("array 13x32 from -1 to 1", 5), side("temporal.month_table", 20)
    days = side("array 32x32 from -0.99 to 1", 5), side("temporal.day_table", 21)
    positions = side("array 16x32 from -1 to 1", 6), side("pe[0:16 of 64]", 22)
    found = []
    for ours, theirs in (months, days, positions):
        found.append(Hypothesis("embedding", "constant", "operation", ours, theirs))
    first, second = grouped_by_kind(found)
    assert [place.line for place in first.torch.places] == [20, 21]
    assert second == found[2]


def test_one_line_that_is_several_of_pytorch_is_wrong_once():
    found = []
    for ours, theirs in ((5, 20), (5, 21), (6, 22)):
        sides = side("time_shift", ours), side("norm", theirs)
        found.append(Hypothesis("mix", "leaf", "operation", *sides))
    first, second = grouped_by_kind(found)
    assert [place.line for place in first.torch.places] == [20, 21]
    assert second == found[2]


class Tables(torch.nn.Module):
    """Two layers with tables of their own, the first of which is the second of the other layer."""

    def __init__(self):
        super().__init__()
        base = torch.arange(D, dtype=torch.float64) / D
        for i, powers in enumerate([(1.0, 0.5), (0.5, 0.25)]):
            for name, power in zip("kr", powers, strict=True):
                self.register_buffer(f"{name}_{i}", base**power, persistent=False)

    def forward(self, x):
        for i in range(2):
            k, r = getattr(self, f"k_{i}"), getattr(self, f"r_{i}")
            before = F.pad(x, (0, 0, 1, -1))
            one, other = x * k + before * (1 - k), x * r + before * (1 - r)
            x = x + one.sin() * other.tanh()
        return x


def with_tables(powers):
    def flax(x):
        base = np.arange(D) / D
        for k, r in powers:
            before = from_before(x)
            one = before + (x - before) * base**k  # planted
            other = before + (x - before) * base**r  # planted
            x = x + jnp.sin(one) * jnp.tanh(other)
        return x

    return flax


def test_a_table_that_is_right_in_another_layer(differ):
    assert not differ(with_tables([(1.0, 0.5), (0.5, 0.25)]), Tables(), X).hypotheses
    found = differ(with_tables([(1.0, 0.5), (2 / 3, 1 / 3)]), Tables(), X)
    assert found.repaired, str(found)
    assert [one.torch.value for one in found.hypotheses] == ["k_1", "r_1"], str(found)
    assert all("array 8 from 0" in one.flax.value for one in found.hypotheses)


def projected(x, w):
    return x @ w


def test_what_a_function_is_given_has_not_the_name_of_what_it_returns(differ):
    def flax(x, v, w):
        first = projected(jnp.sin(x), v)
        second = projected(jnp.sin(x), w)
        return first * second

    def theirs(x, v, w):
        wave = torch.sin(x)
        return (wave @ v) * (torch.cos(x) @ w)

    (one,) = differ(flax, theirs, X, (D, D), (D, D)).hypotheses
    assert one.flax.value == "wave"
    assert one.torch.value == "cos(input 0)"


KNOTS = np.linspace(-2, 2, 8)


def spline(x, t, where):
    """Two steps of the recursion of Cox and de Boor over knots, slices of one table."""
    x = x[..., None]
    basis = where((t[..., :-1] <= x) & (x < t[..., 1:]), 1.0, 0.0)
    for k in (1, 2):
        rising = (x - t[..., : -k - 1]) / (t[..., k:-1] - t[..., : -k - 1])
        falling = (t[..., k + 1 :] - x) / (t[..., k + 1 :] - t[..., 1:-k])
        basis = rising * basis[..., :-1] + falling * basis[..., 1:]
    return basis.sum(-1)


class Splines(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.from_numpy(KNOTS).expand(D, -1).contiguous())

    def forward(self, x):
        for _ in range(2):
            x = x + spline(torch.sin(x), self.grid, torch.where)
        return x


@pytest.mark.parametrize("knots", [2 * KNOTS, KNOTS + 0.25], ids=["wider", "shifted"])
def test_a_table_that_many_slices_are_taken_of_is_one_difference(knots, differ):
    def flax(x):
        for _ in range(2):
            x = x + spline(jnp.sin(x), jnp.asarray(knots), jnp.where)
        return x

    found = differ(flax, Splines(), X)
    assert found.repaired, str(found)
    (one,) = found.hypotheses
    assert (one.flax.value[:8], one.torch.value) == ("array 8 ", "grid"), str(found)


def test_flags_that_stand_for_numbers_stay_flags(differ):
    def flax(x):
        inside = (jnp.sin(x) > -0.5) & (x > -1) & (x < 1)
        return jnp.where(inside, 1, 0).astype(x.dtype) * jnp.cos(x)

    def theirs(x):
        inside = (x.sin() > -0.5).to(x.dtype)
        return inside * x.cos()

    found = differ(flax, theirs, X)
    assert found.repaired, str(found)
    assert found.hypotheses
