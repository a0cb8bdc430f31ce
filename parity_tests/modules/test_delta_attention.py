"""Recurrent attentions as layers: transformers' own, caches that do not grow, invalid rows.

Padding, too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear

from flax_attn import FeedForward, GatedDeltaNet, KimiDeltaAttention, TransformerBlock, convert
from flax_attn.convert.rules import Layout, Rule
from flax_attn.models.hugging_face.family import linears
from flax_attn.proof.build import drawn
from parity_tests.asserts import assert_results_near

B, T, D, N, H, W = 2, 7, 6, 2, 4, 3
X = np.random.default_rng(0).normal(size=(B, T, D))
# Our names of the layers, and those of transformers.
LINEARS = {
    "W_query": "q_proj",
    "W_key": "k_proj",
    "W_value": "v_proj",
    "W_beta": "b_proj",
    "out_proj": "o_proj",
    "W_decay_down": "forget_gate.f_a_proj",
    "W_decay_up": "forget_gate.f_b_proj",
    "W_gate_down": "g_a_proj",
    "W_gate_up": "g_b_proj",
}
CONVOLUTIONS = tuple(f"conv_{name}.kernel" for name in ("query", "key", "value"))
KIMI = Layout(
    (
        *linears(LINEARS),
        Rule(CONVOLUTIONS, "conv1d.weight", "w d -> d 1 w"),
        Rule(("rate.A_log",), "forget_gate.A_log", "n -> 1 1 n 1"),
        Rule(("rate.dt_bias",), "forget_gate.dt_bias"),
        Rule(("norm.scale",), "o_norm.weight"),
    )
)


def kimi_config():
    kinds = ["linear_attention", "full_attention"]
    config = KimiLinearConfig(
        hidden_size=D, num_hidden_layers=2, layer_types=kinds, rms_norm_eps=0.01
    )
    config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim = N, H, W
    return config


def kimi():
    """Return the layer of transformers, every parameter random."""
    layer = modeling_kimi_linear.KimiLinearDeltaAttention(kimi_config(), 0).double()
    random = np.random.default_rng(1)
    for parameter in layer.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.5, tuple(parameter.shape)))
    return layer


def gated_delta_net(**options):
    options = {"num_key_heads": 1, "param_dtype": jnp.float64} | options
    return drawn(lambda: GatedDeltaNet(D, D, N, H, **options, rngs=nnx.Rngs(0)))


COTANGENT = np.random.default_rng(2).normal(size=X.shape)


def test_kimi_delta_attention_is_that_of_transformers(float64_modules):
    theirs = kimi()
    with float64_modules(modeling_kimi_linear):
        reference = of_transformers(theirs)
    assert_results_near(of_flax(theirs.state_dict()), reference)


def of_transformers(layer):
    """Return the output, and the gradients by name."""
    output = layer(torch.from_numpy(X))
    (output * torch.from_numpy(COTANGENT)).sum().backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in layer.named_parameters()}
    return {"output": output.detach().numpy()}, gradients


def of_flax(state):
    """Return the output of a layer with this state, and the gradients by the names in it."""
    gradients, output = nnx.jit(nnx.grad(weighed, has_aux=True))(layer_of(state), jnp.asarray(X))
    leaves = nnx.to_flat_state(gradients)
    flat = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}
    return {"output": np.asarray(output)}, convert.to_layout(flat, KIMI)


def layer_of(state):
    numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    layer = KimiDeltaAttention(D, D, N, H, kernel_size=W, eps=0.01, **numerics)
    convert.load_state_dict(layer, state, KIMI)
    return layer


def weighed(layer, x):
    output = layer(x)
    return (output * COTANGENT).sum(), output


def cached(module, x, cache, **options):
    """Return the output and the new cache."""
    attended = module.attend(x, cache=cache, **options)
    return attended.output, attended.cache


def test_a_cache_does_not_grow():
    layer, step = gated_delta_net(), nnx.jit(cached)
    small, large, after = (layer.init_cache(B, capacity) for capacity in (4, 8192, 4))
    # More tokens than the small ones are said to hold.
    for _ in range(5):
        _, after = step(layer, jnp.asarray(X[:, :1]), after)
    assert shapes_of(small) == shapes_of(large) == shapes_of(after)
    assert after.length.tolist() == [5, 5]


def shapes_of(cache):
    return jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def test_a_step_costs_the_same_after_any_number_of_tokens():
    """The program of a step is one: it has no argument whose size depends on what came before."""
    layer = gated_delta_net()
    lowered = [
        jax.jit(partial(cached, layer)).lower(jnp.asarray(X[:, :1]), layer.init_cache(B, capacity))
        for capacity in (256, 8192)
    ]
    assert lowered[0].as_text() == lowered[1].as_text()


def test_a_state_is_in_float32_at_least():
    layer = gated_delta_net(param_dtype=jnp.bfloat16)
    cache = layer.init_cache(B, 8)
    assert (cache.state.dtype, cache.key.dtype) == (jnp.float32, jnp.bfloat16)
    output, cache = nnx.jit(cached)(layer, jnp.asarray(X[:, :2], jnp.bfloat16), cache)
    assert output.dtype == jnp.bfloat16
    assert (cache.state.dtype, cache.key.dtype) == (jnp.float32, jnp.bfloat16)


# The second row is padding throughout.
LENGTHS = np.array([5, 0])
REAL = np.arange(T)[:, None] < LENGTHS[:, None, None]


def by_mask(side):
    return {"mask": side.Mask.lengths(query=LENGTHS, key=LENGTHS)}


PADDING = {
    "lengths": lambda side: {"lengths": side.array(LENGTHS)},
    "mask": by_mask,
    "both": lambda side: {"lengths": side.array(np.array([7, 0])), **by_mask(side)},
}


def compiled(side, layer, x, **options):
    return side.numpy(side.jit(lambda x: layer(x, **options))(side.array(x)))


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_padding_is_not_seen_whichever_way_it_is_said(side, kind):
    layer = side.build(kind, D, D, N, H)
    expected = np.where(REAL, compiled(side, layer, X), 0)
    for options in PADDING.values():
        output = compiled(side, layer, np.where(REAL, X, np.nan), **options(side))
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-14)


def test_a_row_with_lengths_that_cannot_be_gives_nan(side):
    layer = side.build("GatedDeltaNet", D, D, N, H)
    # Three tokens are given, and the first row is said to have four.
    output, cache = given_three(side, layer, [4, 2], layer.init_cache(B, 8))
    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1, :2]).all()
    assert (cache.length.tolist(), cache.invalid.tolist()) == ([-1, 2], [True, False])


def test_a_row_that_gave_nan_goes_on_to(side):
    layer = side.build("GatedDeltaNet", D, D, N, H)
    _, cache = given_three(side, layer, [4, 2], layer.init_cache(B, 8))
    output, cache = given_three(side, layer, [1, 1], cache)
    assert np.isnan(output[0]).all()
    assert cache.length.tolist() == [-1, 3]


def given_three(side, layer, lengths, cache):
    """Return the output for three tokens, and the cache behind them."""
    call = side.jit(lambda x, lengths, cache: cached(layer, x, cache, lengths=lengths))
    output, cache = call(side.array(X[:, :3]), side.array(np.array(lengths)), cache)
    return side.numpy(output), cache


IDS = np.array([[0, 0, 0, 4, 4, 4, 4], [1, 1, 1, 1, 1, 2, 2]])


def test_documents_under_a_cache_begin_where_the_mask_says(side):
    layer = side.build("KimiDeltaAttention", D, D, N, H)
    whole = compiled(side, layer, X, mask=side.Mask.segments(IDS))
    found = in_three_calls(side, layer)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-13)


def in_three_calls(side, layer):
    outputs, cache = [], layer.init_cache(B, T)
    step = side.jit(lambda x, cache: cached(layer, x, cache, mask=side.Mask.segments(IDS)))
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output, cache = step(side.array(X[:, start:stop]), cache)
        outputs.append(side.numpy(output))
    return np.concatenate(outputs, axis=1)


@pytest.fixture
def block():
    rngs = nnx.Rngs(0)
    attention, feed_forward = GatedDeltaNet(D, D, N, H, rngs=rngs), FeedForward(D, rngs=rngs)
    return TransformerBlock(attention, feed_forward, None, None)


def test_blocks_take_recurrent_attention(block):
    run = nnx.jit(lambda block, x: cached(block, x, block.init_cache(B, 8)))
    output, cache = run(block, jnp.asarray(X, jnp.float32))
    assert output.shape == X.shape
    assert cache.length.tolist() == [T, T]


def test_blocks_of_recurrent_attention_have_no_weights(block):
    rule = r"no scores, weights or positions; got return_weights=\. Leave it out"
    with pytest.raises(ValueError, match=rule):
        block.attend(jnp.asarray(X, jnp.float32), return_weights=True)
