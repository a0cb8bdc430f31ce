"""Decoding on a mesh: the tokens of one device, with a cache split over rows, heads and tokens."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig, generate
from flax_attn.models import T5, T5Config
from flax_attn.sharding import shard

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
SIZES = {"context_length": 64, "vocab_size": 32}
AXES = {"data": 2, "tensor": 2, "context": 2}
DRAWS = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "key": jnp.array([3, 14], jnp.uint32)}


def build(family):
    if family == "GPT2":
        return GPT2(GPT2Config(16, 4, 1, **SIZES), rngs=nnx.Rngs(0))
    if family == "T5":
        return T5(T5Config(8, 12, 2, 4, 1, 1, vocab_size=32), rngs=nnx.Rngs(0))
    return Llama(LlamaConfig(16, 24, 4, 1, 2, **SIZES), rngs=nnx.Rngs(0))


CASES = [
    ("GPT2", "auto", {}),
    ("GPT2", "both", {}),
    ("Llama", "auto", DRAWS),
    ("Llama", "explicit", DRAWS),
    ("T5", "explicit", {"start": [0, 1]}),  # two tokens of the start, which lie on two devices
]


@pytest.mark.parametrize(("family", "kind", "options"), CASES)
def test_tokens_are_those_of_one_device(family, kind, options, mesh_like):
    expected = generate(build(family), PROMPTS, 4, **options)
    mesh = mesh_like(kind, **AXES)
    with jax.set_mesh(mesh):
        assert generate(shard(build(family), mesh), PROMPTS, 4, **options) == expected


def test_a_model_may_lie_on_a_mesh_that_is_not_set(mesh_like):
    expected = generate(build("Llama"), PROMPTS, 4)
    assert generate(shard(build("Llama"), mesh_like("explicit", **AXES)), PROMPTS, 4) == expected


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_cache_is_split_over_rows_heads_and_tokens(kind, mesh_like):
    mesh = mesh_like(kind, **AXES)
    with jax.set_mesh(mesh):
        block = shard(build("Llama"), mesh).trf_blocks[0]
        block.eval()
        step = jax.jit(lambda x, cache: block.attend(x, cache=cache).cache)
        cache = step(jnp.ones((4, 1, 16)), block.init_cache(4, 32))
        cache = step(jnp.ones((4, 1, 16)), cache)
    assert tuple(cache.key.sharding.spec)[:3] == ("data", "tensor", "context")
    assert cache.key.addressable_shards[0].data.shape == (2, 1, 16, 4)
