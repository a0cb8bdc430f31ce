"""Dtypes of PyTorch in place of those of JAX."""

import pytest
import torch
from flax import nnx

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
