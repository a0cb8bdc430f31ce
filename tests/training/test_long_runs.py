"""Many steps leave nothing behind: neither arrays nor process memory grow with their number."""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, MultiHeadAttention, RoPE
from flax_attn.training import train_step

PAGE, MIB = 4096, 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def held():
    """Return how many arrays live, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(x.nbytes for x in arrays)


def assert_flat(step, warm, steps):
    """Assert that after warm-up, steps add no arrays, and less than 1 MiB per 50 steps."""
    for _ in range(warm):
        step()
    arrays, memory = held(), resident()
    for _ in range(steps):
        step()
    assert held() == arrays
    assert resident() - memory < max(8, steps / 50) * MIB


@pytest.fixture(autouse=True)
def needs_linux():
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process is read from /proc")


def test_decoding_with_a_ring_buffer():
    layer = MultiHeadAttention(
        *(16, 16, None, 0.0, 4), num_kv_heads=2, window=8, rope=RoPE(), rngs=nnx.Rngs(0)
    )
    run = nnx.jit(lambda layer, x, cache: layer.attend(x, cache=cache), donate_argnums=2)
    state = {"cache": layer.init_cache(3, 9), "x": jax.random.normal(jax.random.key(0), (3, 1, 16))}

    def step():
        attended = run(layer, state["x"], state["cache"])
        state["cache"] = attended.cache
        state["finite"] = jnp.isfinite(attended.output).all()

    assert_flat(step, 50, 1000)
    assert state["cache"].length.tolist() == [1050] * 3
    assert state["finite"]


def test_training():
    config = GPT2Config(16, 2, 1, context_length=16, vocab_size=31, dropout=0.1)
    model = GPT2(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    draw = np.random.default_rng(0)

    def step():
        tokens, lengths = draw.integers(0, 31, (4, 12)), draw.integers(1, 13, 4)
        assert jnp.isfinite(train_step(model, optimizer, tokens, lengths=lengths))

    assert_flat(step, 20, 200)
