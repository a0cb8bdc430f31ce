"""Recurrent attention on a mesh: outputs, gradients and caches of one device.

Each device has its rows and heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GatedDeltaNet, KimiDeltaAttention, Mask
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn
from flax_attn.sharding import context_parallel
from flax_attn.sharding.parameters import shard

pytestmark = pytest.mark.usefixtures("x64")
B, T, D = 4, 6, 8
X = np.random.default_rng(0).normal(size=(B, T, D))
COTANGENT = np.random.default_rng(1).normal(size=X.shape)
LENGTHS, IDS = jnp.array([6, 4, 0, 5]), np.array([[0, 0, 1, 1, 1, 2]])
KINDS = {
    "gated": lambda: GatedDeltaNet(
        D, D, 4, 3, num_key_heads=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    ),
    "one head of keys": lambda: GatedDeltaNet(
        D, D, 4, 3, num_key_heads=1, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    ),
    "kimi": lambda: KimiDeltaAttention(
        D, D, 2, 3, value_dim=5, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    ),
}
CASES = [
    ("gated", "auto", {"data": 2, "tensor": 2, "context": 2}),
    ("gated", "explicit", {"fsdp": 2, "tensor": 2, "context": 2}),
    ("one head of keys", "auto", {"data": 2, "tensor": 4}),  # computed on every device of the axis
    ("kimi", "both", {"data": 4, "tensor": 2}),
]


def computed(layer):
    """Return the output, all gradients, and what a cache has after the tokens."""

    def weighed(layer, x):
        y = layer(x, mask=Mask.segments(IDS), lengths=LENGTHS)
        return (y * COTANGENT).sum(), y

    gradients, y = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(layer, jnp.asarray(X))
    leaves = {
        str(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
    }
    return {"output": np.asarray(y)}, leaves


@pytest.mark.parametrize(("kind", "axes", "sizes"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_one_device(kind, axes, sizes, mesh_like):
    expected = computed(drawn(KINDS[kind]))
    mesh = mesh_like(axes, **sizes)
    with jax.set_mesh(mesh):
        found = computed(shard(drawn(KINDS[kind]), mesh))
    assert max(tolerance.relative(found[0], expected[0]).values()) <= tolerance.FORWARD
    assert max(tolerance.gradient_errors(found[1], expected[1]).values()) <= tolerance.GRADIENT


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_a_cache_lies_where_rows_and_heads_are(axes, mesh_like):
    mesh = mesh_like(axes, data=2, tensor=2)
    run = nnx.jit(lambda layer, x, cache: layer.attend(x, cache=cache))
    with jax.set_mesh(mesh):
        layer = shard(drawn(KINDS["gated"]), mesh)
        first = run(layer, jnp.asarray(X), layer.init_cache(B, T))
        then = run(layer, jnp.asarray(X[:, :1]), first.cache)
    cache = then.cache
    assert cache.state.sharding.spec[:2] == ("data", "tensor")
    assert cache.value.sharding.spec == jax.P("data", None, "tensor")
    alone = drawn(KINDS["gated"])
    first = run(alone, jnp.asarray(X), alone.init_cache(B, T))
    expected = run(alone, jnp.asarray(X[:, :1]), first.cache).output
    np.testing.assert_allclose(then.output, expected, rtol=0, atol=1e-13)


def test_tokens_in_zigzag_order_are_refused(mesh_like):
    layer = drawn(KINDS["gated"])
    message, mesh = (
        r"a state passes through the tokens in their own order; got order='zigzag'",
        mesh_like(context=2),
    )
    with (
        jax.set_mesh(mesh),
        context_parallel(order="zigzag"),
        pytest.raises(ValueError, match=message),
    ):
        layer(jnp.asarray(X))
