"""Faults of context parallel attention that were shipped elsewhere, or nearly: each must be seen by the comparison."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout
from flax_attn.backends.blocked.passes import Partial
from flax_attn.functional.places import Places
from flax_attn.parity import tolerance
from flax_attn.sharding import attention, context_parallel, order, ring, route, shards, softmax, strategies

from ..backends.conformance import FAST
from .cases import Case

CASE = Case("causal", "", "ring", "", 2, "everything")


def fold_without_maxima(one, other):
    total = one.total + other.total
    weights = [softmax.tokens_first(part.total / jnp.where(total == 0, 1, total)) for part in (one, other)]
    return Partial(one.output * weights[0] + other.output * weights[1], jnp.maximum(one.top, other.top), total)


def stays_abroad(send):
    return lambda self, pieces, hops, last=None: pieces if hops < -1 else send(self, pieces, hops, last)


FAULTS = {  # what is replaced by what, under which balance, and what is wrong then
    "none": (ring, "with_sinks", softmax.with_sinks, "none", set()),
    "a sink counted twice": (
        *(ring, "with_sinks", lambda done, sinks: softmax.with_sinks(softmax.with_sinks(done, sinks), sinks)),
        *("none", {"output", "query", "key", "value", "bias", "sinks"}),
    ),
    "positions counted in each shard": (
        *(attention, "_token_places", lambda division, size: Places(jnp.zeros(1, jnp.int32), size)),
        *("none", {"output", "query", "key", "value", "bias"}),
    ),
    "a fold without the maximum": (ring, "fold", fold_without_maxima, "none", {"output", "query", "key", "value"}),
    "a wrong inverse of zigzag": (strategies, "exchange_back", order.exchange, "zigzag", {"output", "query"}),
    "dropout by the index in a shard": (
        *(shards, "PlacedDropout", lambda rate, key, places: KeyedDropout(rate, key)),
        *("none", {"output", "query", "key", "value"}),
    ),
    "gradients of keys that do not come home": (
        *(route.Route, "send", stays_abroad(route.Route.send)),
        *("none", {"key", "value"}),
    ),
    "gradients of a bias from the last piece alone": (
        *(Places, "put", lambda self, array, part, axis: jax.lax.dynamic_update_slice_in_dim(
            jnp.zeros_like(array), part.astype(array.dtype), self.starts[0], axis)),
        *("none", {"bias"}),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
    jax.clear_caches()  # of programs that were traced with a fault


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch, mesh_like):
    target, attribute, replacement, balance, wrong = FAULTS[name]
    arrays = CASE.arrays()
    jit = partial(jax.jit, compiler_options=FAST)
    expected = jit(partial(CASE.both, backend="reference"))(arrays)
    jax.clear_caches()
    monkeypatch.setattr(target, attribute, replacement)
    with jax.set_mesh(mesh_like(context=4)), context_parallel("ring", balance):
        found = jit(CASE.both)(arrays)
    apart = {name for name in found if _apart(found[name], expected[name])}
    assert wrong <= apart
    assert bool(wrong) == bool(apart)


def _apart(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return not np.abs(ours - theirs).max() <= tolerance.GRADIENT * np.abs(theirs).max()
