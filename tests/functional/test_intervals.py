"""Kinds of intervals that are written here work everywhere: each states its ends in one method."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn.backends.splash as splash
from flax_attn import Mask, dot_product_attention
from flax_attn.backends.call import prepare
from flax_attn.backends.registry import load
from flax_attn.functional.kv_range import maximum
from flax_attn.functional.mask_part import Count, IntervalPart, per_row
from flax_attn.functional.mask_parts import Positioned
from flax_attn.sharding import context_parallel
from flax_attn.sharding.ring_schedule import make_route

B, N, T, S = 2, 2, 128, 256


@dataclass(frozen=True)
class Chunked(Positioned, IntervalPart):
    """From position `p` the keys of the same chunk are seen, up to `p`."""

    size: int

    def interval(self, i):
        p = self.position(i)
        return p // self.size * self.size, p


@dataclass(frozen=True)
class Reach(Positioned, IntervalPart):
    """From position `p` the keys from `p - reach` on are seen, but for the next one."""

    reach: Count

    def interval(self, i):
        return self.position(i) - per_row(self.reach), self.position(i, -1)


@dataclass(frozen=True)
class Widening(IntervalPart):
    """Query `i` sees keys `i // 2` to `2 i`, at least up to `least`, without any position."""

    least: Count

    def interval(self, i):
        return i // 2, maximum(2 * i, per_row(self.least))


def seen(kind, i, j, offset, value):
    p = i + offset
    return {
        "chunked": (p // 48 * 48 <= j) & (j <= p),
        "reach": (p - value <= j) & (j < p),
        "widening": (i // 2 <= j) & (j <= np.maximum(2 * i, value)),
    }[kind]


ROWS = np.array([40, 7])
KINDS = {
    "chunked": (Chunked(48, offset=100), 100, 0),
    "chunked, an offset a row": (Chunked(48, offset=jnp.array([100, -3])), [100, -3], 0),
    "reach": (Reach(30, offset=100), 100, 30),
    "reach, one a row": (Reach(jnp.asarray(ROWS), offset=100), 100, ROWS),
    "widening": (Widening(20), 0, 20),
    "widening, one a row": (Widening(jnp.asarray(ROWS)), 0, ROWS),
}
INTEGERS = [name for name in KINDS if "row" not in name]


def table(name):
    _, offset, value = KINDS[name]
    i, j = np.arange(T)[None, :, None], np.arange(S)[None, None]
    offset, value = (np.reshape(x, (-1, 1, 1)) for x in (offset, value))
    found = seen(name.partition(",")[0], i, j, offset, value)
    return np.broadcast_to(found[:, None], (B, N, T, S))


def mask_of(name):
    return Mask((KINDS[name][0],))


@pytest.mark.parametrize("name", KINDS)
def test_it_shows_what_it_states(name):
    mask = mask_of(name)
    np.testing.assert_array_equal(mask.materialise(B, N, T, S), table(name))
    one = mask.row(jnp.int32(1), jnp.int32(0))
    np.testing.assert_array_equal(one.materialise(1, 1, T, S)[0, 0], table(name)[1, 0])
    moved = mask.shift(jnp.array([3, 60]), 5, S).materialise(B, N, 5, S)
    for row, start in enumerate((3, 60)):
        np.testing.assert_array_equal(moved[row], table(name)[row, :, start : start + 5])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("start", [0, jnp.int32(16), jnp.array([16, 40])], ids=str)
def test_what_it_hides_is_skipped(name, start):
    mask = mask_of(name)
    shown = table(name)
    starts = np.zeros(B, int) + np.asarray(start)
    if not isinstance(start, int):
        mask = mask.shift(start, T - 40, S)
    for first in range(0, T - 40, 8):
        last = first + 7
        found = mask.kv_range(first, last, S)
        rows = [shown[b, 0, at + first : at + last + 1] for b, at in enumerate(starts)]
        columns = np.flatnonzero(np.concatenate(rows).any(axis=0))
        everywhere = np.flatnonzero(np.concatenate(rows).all(axis=0))
        assert set(columns) <= set(range(found.start, found.stop))
        assert set(range(found.inner_start, found.inner_stop)) <= set(everywhere)
        if name in INTEGERS and isinstance(start, int):
            assert all(isinstance(limit, int) for limit in found)
            assert columns.tolist() == list(range(found.start, found.stop))
        else:
            assert found.stop - found.start < S // 2 + 100


BEGIN_AT_0 = {
    "causal": Mask.causal(5),
    "prefix": Mask.prefix(3, 2),
    "lengths": Mask.lengths(query=4, key=6),
}


@pytest.mark.parametrize("name", BEGIN_AT_0)
def test_what_is_said_to_begin_at_the_first_key_does(name):
    (part,) = BEGIN_AT_0[name].parts
    assert part.from_first
    assert [part.interval(i)[0] for i in (0, 7, 100)] == [0, 0, 0]
    assert not any(part.from_first for part, *_ in KINDS.values())


def test_a_band_is_known_from_the_interval():
    assert mask_of("reach").split_band() == ((70, 99), Mask())
    for name in ("chunked", "widening", "reach, one a row", "chunked, an offset a row"):
        assert mask_of(name).split_band() == ((None, None), mask_of(name))
    for mask in (Mask.prefix(3, 0), Mask.lengths(key=3), Mask.lengths(query=3), Mask.causal([1])):
        assert mask.split_band() == ((None, None), mask)
    assert Mask.window(4, None, 1).split_band() == ((-3, None), Mask())
    assert Mask.causal(2).split_band() == ((None, 2), Mask())


@dataclass(frozen=True)
class OneSeesLess(IntervalPart):
    """One query sees a key less than others do, so that no sum tells where it ends."""

    def interval(self, i):
        return i - 3, i + 1 if i == 1 else i + 2


def test_an_end_that_depends_on_which_query_asks_is_no_band():
    assert OneSeesLess().band() is None


def test_the_number_of_rows_is_checked():
    with pytest.raises(ValueError, match=r"reach must be one integer or one a row, shape \(3,\)"):
        mask_of("reach, one a row").resolve(3, N, T, S)


def arrays():
    draw = np.random.default_rng(0).normal
    shapes = (B, T, N, 16), (B, S, N, 16), (B, S, N, 16)
    return [jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes]


def output_and_gradients(backend, mask):
    def attend(query, key, value):
        with splash.interpreted():
            return dot_product_attention(query, key, value, mask=mask, backend=backend)

    output, pull = jax.vjp(attend, *arrays())
    weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
    return dict(zip(("output", "query", "key", "value"), (output, *pull(weights)), strict=True))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("backend", ["decode", "blocked", "native", "splash"])
def test_every_backend_takes_it(backend, name, close, monkeypatch):
    if backend == "splash" and name not in INTEGERS:
        kind, field = KINDS[name][0], "offset" if "offset" in name else "reach"
        field = "least" if isinstance(kind, Widening) else field
        assert f"splash needs the {field} of a" in load("splash").refuse(call_of(name))
        return
    monkeypatch.setattr(load("blocked"), "block", 32)
    monkeypatch.setattr(load("blocked"), "edge", 16)
    expected = output_and_gradients("reference", Mask.dense(table(name)))
    close(output_and_gradients(backend, mask_of(name)), expected)


def call_of(name):
    return prepare(*arrays(), mask=mask_of(name), platform="tpu")


MESHED = {
    "chunked": Mask((Chunked(24),)),
    "reach, one a row": Mask((Reach(jnp.asarray(ROWS)),)),
    "widening": Mask((Widening(20),)),
    "padding that some devices have alone": Mask.lengths(query=40, key=70),
    "prefix": Mask.prefix(30),
}


@pytest.mark.parametrize("name", MESHED)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_a_mesh_changes_nothing(strategy, name, close):
    query, _, value = arrays()
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    call = partial(dot_product_attention, mask=MESHED[name])

    def results(*x):
        output, pull = jax.vjp(call, *x)
        return output, pull(jnp.cos(output))

    expected = jax.jit(results)(query, query, value[:, :T])
    with jax.set_mesh(mesh), context_parallel(strategy):
        close(jax.jit(results)(query, query, value[:, :T]), expected)


def test_a_ring_sends_no_pieces_that_are_hidden():
    route = partial(make_route, ("context",), 4, 1, False, t=32, s=32)
    assert route(Mask((Chunked(32),))).hops == (0, 0)
    assert route(Mask((Chunked(64),))).hops == (1, 0)
    assert route(Mask.causal()).hops == (3, 0)
    assert route(Mask((Reach(40),)) & Mask.lengths(key=jnp.array([9, 4]))).hops == (2, 0)
    assert route(Mask((Reach(jnp.asarray(ROWS)),))).hops == (3, 0)
