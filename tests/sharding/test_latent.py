"""Latent attention on a mesh: outputs and gradients of one device.

Heads are divided, latents are whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import MultiHeadLatentAttention, RMSNorm, RoPE
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn
from flax_attn.sharding.parameters import shard

pytestmark = pytest.mark.usefixtures("x64")
X = np.random.default_rng(0).normal(size=(4, 6, 8))


def latent(form):
    def make():
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        widths = {
            "kv_lora_rank": 5,
            "q_lora_rank": 6,
            "qk_nope_head_dim": 3,
            "qk_rope_head_dim": 4,
            "v_head_dim": 2,
        }
        norms = {
            "q_norm": RMSNorm(6, param_dtype=jnp.float64),
            "kv_norm": RMSNorm(5, param_dtype=jnp.float64),
        }
        rope = RoPE(interleaved=True)
        return MultiHeadLatentAttention(
            8, 8, None, 0.0, 4, **widths, **norms, rope=rope, form=form, **numerics
        )

    return drawn(make)


def both(model):
    """Return the output, and all gradients."""
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=X.shape))

    def weighed(model, x):
        y = model(x)
        return (y * cotangent).sum(), y

    gradients, y = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, jnp.asarray(X))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"output": np.asarray(y)}, {str(path): np.asarray(leaf) for path, leaf in leaves}


def in_steps(model):
    """Return the output of a chunk and of steps behind it, and the cache after them."""
    step = nnx.jit(lambda model, x, cache: model.attend(x, cache=cache))
    cache, found = model.init_cache(4, 8), []
    for i, j in ((0, 4), (4, 5), (5, 6)):
        attended = step(model, jnp.asarray(X[:, i:j]), cache)
        cache = attended.cache
        found.append(np.asarray(attended.output))
    return np.concatenate(found, axis=1), cache


@pytest.mark.parametrize(
    ("form", "kind"), [("plain", "auto"), ("plain", "explicit"), ("absorbed", "explicit")]
)
def test_outputs_and_gradients_are_those_of_one_device(form, kind, mesh_like):
    output, gradients = both(latent("plain"))
    mesh = mesh_like(kind, data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = shard(latent(form), mesh)
        assert model.W_key_value.kernel[...].sharding.spec == jax.P(None, "tensor")
        found, of_mesh = both(model)
    errors = tolerance.relative(found, output)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    errors = tolerance.gradient_errors(of_mesh, gradients)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_steps_of_decoding_are_those_of_one_device(kind, mesh_like):
    reference, _ = in_steps(latent("auto"))
    mesh = mesh_like(kind, data=2, tensor=2)
    with jax.set_mesh(mesh):
        found, cache = in_steps(shard(latent("auto"), mesh))
    assert cache.key.sharding.shard_shape((4, 1, 8, 9)) == (2, 1, 8, 9)  # heads share it
    errors = tolerance.relative({"output": found}, {"output": reference})
    assert max(errors.values()) <= tolerance.FORWARD, errors
