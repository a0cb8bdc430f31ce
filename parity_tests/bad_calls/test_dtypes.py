"""Dtypes of one framework in place of those of the other."""

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import GPT2, FeedForward, GPT2Config, LayerNorm, MultiHeadAttention

CONFIG = GPT2Config(6, 2, 1, context_length=8, vocab_size=11)
MODULES = {
    "norm": lambda **options: LayerNorm(6, **options),
    "feed-forward": lambda **options: FeedForward(6, rngs=nnx.Rngs(0), **options),
    "attention": lambda **options: MultiHeadAttention(
        6, 6, num_heads=2, rngs=nnx.Rngs(0), **options
    ),
    "model": lambda **options: GPT2(CONFIG, rngs=nnx.Rngs(0), **options),
    "folder": lambda **options: GPT2.from_pretrained("nowhere", **options),
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_a_dtype_of_torch_is_refused(build, name):
    rule = (
        rf"^{name} must be a JAX dtype; got torch\.float32\. Pass {name}=jnp\.float32, or another"
        r" of jax\.numpy$"
    )
    with pytest.raises(ValueError, match=rule):
        build(**{name: torch.float32})


CACHES = {
    "cache": lambda side, dtype: side.KVCache.zeros(2, 8, 3, 4, dtype=dtype),
    "state": lambda side, dtype: side.DeltaCache.zeros(2, 4, 3, 4, dtype=dtype),
}


# Each with the side that refuses it.
FOREIGN = {
    "torch": (flax_attn, torch.float32, r"a JAX dtype; got torch\.float32\. Pass dtype=jnp\."),
    "unknown": (flax_attn, "float31", r"a JAX dtype; got float31\."),
    "jax": (torch_ref, jnp.bfloat16, r"a PyTorch dtype; got .*bfloat16.*\. Pass dtype=torch\."),
    "name": (torch_ref, "bfloat16", r"a PyTorch dtype; got .*bfloat16.*\. Pass dtype=torch\."),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_the_dtype_of_a_cache_is_of_its_framework(make, name, no_shape_checks):
    side, dtype, rule = FOREIGN[name]
    with pytest.raises(ValueError, match=f"^dtype must be {rule}"):
        make(side, dtype)


@pytest.mark.parametrize("kind", ["attention", "model"])
def test_a_cache_of_a_module_refuses_a_dtype_of_torch(kind):
    with pytest.raises(ValueError, match=r"^dtype must be a JAX dtype; got torch\.float32\."):
        MODULES[kind]().init_cache(2, 8, dtype=torch.float32)
