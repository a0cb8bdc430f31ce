"""Decoding on a mesh: the tokens of one device, from a cache that is split over rows, heads and tokens."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig, generate
from flax_attn.sharding import shard

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
SIZES = {"context_length": 64, "vocab_size": 32}


def build(family):
    if family == "GPT2":
        return GPT2(GPT2Config(16, 4, 1, **SIZES), rngs=nnx.Rngs(0))
    return Llama(LlamaConfig(16, 24, 4, 1, 2, **SIZES), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_tokens_are_those_of_one_device(family, mesh_like):
    expected = generate(build(family), PROMPTS, 6)
    with jax.set_mesh(mesh_like(data=2, tensor=2, context=2)):
        model = shard(build(family), mesh_like(data=2, tensor=2, context=2))
        assert generate(model, PROMPTS, 6) == expected


def test_a_cache_is_split_over_rows_heads_and_tokens(mesh_like):
    mesh = mesh_like(data=2, tensor=2, context=2)
    with jax.set_mesh(mesh):
        block = shard(build("Llama"), mesh).trf_blocks[0]
        block.eval()
        step = jax.jit(lambda x, cache: block(x, cache=cache)[1])
        cache = step(jnp.ones((4, 1, 16)), block.init_cache(4, 32))
        cache = step(jnp.ones((4, 1, 16)), cache)
    assert tuple(cache.key.sharding.spec) == ("data", "tensor", "context")
    assert cache.key.addressable_shards[0].data.shape == (2, 1, 16, 4)


def test_explicit_axes_are_refused(mesh_like):
    with (
        jax.set_mesh(mesh_like("explicit", data=2)),
        pytest.raises(ValueError, match="generate runs on Auto axes; got"),
    ):
        generate(build("GPT2"), PROMPTS, 2)
