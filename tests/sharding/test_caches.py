"""Layers with a cache on a mesh: outputs of one device, and nothing more is sent.

This holds whatever the kind of the axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import DifferentialAttention, KVCache, Mask, MultiHeadAttention, RoPE
from flax_attn.parity import tolerance
from flax_attn.plan.collectives import collectives
from flax_attn.plan.hlo import read
from flax_attn.proof.build import drawn
from flax_attn.sharding.parameters import shard

X = np.random.default_rng(0).normal(size=(4, 13, 8))
IDS = np.repeat([[0, 1, 2]], [4, 5, 7], axis=1)
LENGTHS = jnp.array([6, 3, 0, 5])
AXES = {"data": 2, "tensor": 2, "context": 2}
CALLS = {
    "full": ({}, 16, {"mask": Mask.segments(IDS)}),
    "ring buffer": ({"window": 4}, 8, {}),
    "uneven ring buffer": ({"window": 4}, 7, {}),  # is whole on each device, where tokens are split
}


def layer(param_dtype=jnp.float64, **options):
    options |= {"num_kv_heads": 2, "rope": RoPE(), "param_dtype": param_dtype}
    return drawn(lambda: MultiHeadAttention(8, 16, None, 0.0, 4, **options, rngs=nnx.Rngs(0)))


def in_steps(layer, capacity, **options):
    """Return what two chunks and a token give, whose rows differ in length."""

    def call(layer, x, cache, lengths):
        return layer.attend(x, cache=cache, lengths=lengths, **options)

    call, cache, found = nnx.jit(call), layer.init_cache(4, capacity), []
    for i, j in ((0, 6), (6, 12), (12, 13)):
        attended = call(layer, jnp.asarray(X[:, i:j]), cache, jnp.minimum(LENGTHS, j - i))
        cache = attended.cache
        found.append(np.asarray(attended.output))
    return {"output": np.concatenate(found, axis=1)}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "explicit") for name in CALLS), ("full", "both")]
)
def test_outputs_are_those_of_one_device(name, kind, x64, mesh_like):
    options, capacity, call = CALLS[name]
    expected, mesh = in_steps(layer(**options), capacity, **call), mesh_like(kind, **AXES)
    with jax.set_mesh(mesh):
        found = in_steps(shard(layer(**options), mesh), capacity, **call)
    assert max(tolerance.relative(found, expected).values()) <= tolerance.FORWARD


def test_calls_outside_of_jit_give_the_same(x64, mesh_like):
    x, mesh = jnp.asarray(X[:, :1]), mesh_like("explicit", **AXES)
    expected = layer().attend(x, cache=layer().init_cache(4, 16)).output
    with jax.set_mesh(mesh):
        own = shard(layer(), mesh)
        found = own.attend(x, cache=own.init_cache(4, 16))
    np.testing.assert_allclose(found.output, expected, rtol=0, atol=1e-13)
    key = found.cache.key
    assert key.sharding.shard_shape(key.shape) == (2, 1, 8, 4)


def test_heads_are_rotated_where_they_lie_outside_of_jit_too(mesh_like):
    mesh = mesh_like("explicit", tensor=2)
    x = jax.device_put(jnp.ones((2, 3, 4, 6)), jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
    with jax.set_mesh(mesh):
        assert [RoPE(width=width)(x).sharding.shard_shape(x.shape) for width in (4, 6)] == [
            (2, 3, 2, 6)
        ] * 2


def test_the_halves_of_differential_heads_meet(x64, mesh_like):
    def make():
        return DifferentialAttention(8, 16, None, 0.0, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    run, x, mesh = (
        nnx.jit(lambda layer, x: layer(x)),
        jnp.asarray(X),
        mesh_like("explicit", tensor=2),
    )
    expected = run(drawn(make), x)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(run(shard(drawn(make), mesh), x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rows", [None, 1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_cache_that_was_made_without_a_mesh_takes_tokens_that_lie_on_one(rows, dtype, mesh_like):
    cache = KVCache.zeros(rows, 8, 2, 3, dtype=dtype)
    batch = () if rows is None else (rows,)
    new = jnp.asarray(np.random.default_rng(1).normal(size=(*batch, 2, 2, 3)), dtype)
    append = jax.jit(lambda cache, x: cache.append(x, x, 2))
    mesh = mesh_like("explicit", tensor=2)
    spec = jax.P(*[None] * len(batch), None, "tensor")
    on_mesh = append(cache, jax.device_put(new, jax.NamedSharding(mesh, spec)))
    assert on_mesh.key.sharding.shard_shape(on_mesh.key.shape) == (*batch, 1, 8, 3)
    jax.tree.map(np.testing.assert_array_equal, on_mesh, append(cache, new))


@pytest.mark.parametrize("name", CALLS)
def test_nothing_more_is_sent_than_on_auto_axes(name, mesh_like):
    auto, explicit = (sent(name, mesh_like(kind, **AXES)) for kind in ("auto", "explicit"))
    assert auto > 0
    assert explicit <= auto


def sent(name, mesh):
    """Return how many bytes a device sends for a token after others."""
    options, capacity, call = CALLS[name]
    with jax.set_mesh(mesh):
        graph, state = nnx.split(shard(layer(jnp.float32, **options), mesh))
        cache = nnx.merge(graph, state).init_cache(4, capacity)

        @jax.jit
        def run(state, x, cache):
            return nnx.merge(graph, state).attend(x, cache=cache, **call)

        text = run.lower(state, jnp.ones((4, 1, 8)), cache).compile().as_text()
    return sum(one.bytes for one in collectives(read(text), mesh.shape))
