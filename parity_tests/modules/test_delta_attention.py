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
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn

B, T, D, N, H, W = 2, 7, 6, 2, 4, 3
X = np.random.default_rng(0).normal(size=(B, T, D))
LINEARS = {
    **{
        "W_query": "q_proj",
        "W_key": "k_proj",
        "W_value": "v_proj",
        "W_beta": "b_proj",
        "out_proj": "o_proj",
    },
    **{"W_decay_down": "forget_gate.f_a_proj", "W_decay_up": "forget_gate.f_b_proj"},
    **{"W_gate_down": "g_a_proj", "W_gate_up": "g_b_proj"},
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


def kimi():
    """Return the layer of transformers, every parameter random."""
    kinds = ["linear_attention", "full_attention"]
    config = KimiLinearConfig(
        hidden_size=D, num_hidden_layers=2, layer_types=kinds, rms_norm_eps=0.01
    )
    config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim = N, H, W
    layer, random = (
        modeling_kimi_linear.KimiLinearDeltaAttention(config, 0).double(),
        np.random.default_rng(1),
    )
    for parameter in layer.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.5, tuple(parameter.shape)))
    return layer


def gated_delta_net(**options):
    options = {"num_key_heads": 1, "param_dtype": jnp.float64} | options
    return drawn(lambda: GatedDeltaNet(D, D, N, H, **options, rngs=nnx.Rngs(0)))


def test_kimi_delta_attention_is_that_of_transformers(float64_modules):
    theirs, cotangent = kimi(), np.random.default_rng(2).normal(size=X.shape)
    with float64_modules(modeling_kimi_linear):
        reference = theirs(torch.from_numpy(X))
        (reference * torch.from_numpy(cotangent)).sum().backward()
    ours = KimiDeltaAttention(
        D, D, N, H, kernel_size=W, eps=0.01, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    convert.load_state_dict(ours, theirs.state_dict(), KIMI)

    def weighed(layer, x):
        output = layer(x)
        return (output * cotangent).sum(), output

    gradients, output = nnx.jit(nnx.grad(weighed, has_aux=True))(ours, jnp.asarray(X))
    flat = {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(gradients)
    }
    found = convert.to_layout(flat, KIMI)
    errors = tolerance.relative(
        {"output": np.asarray(output)}, {"output": reference.detach().numpy()}
    )
    assert errors["output"] <= tolerance.FORWARD, errors
    errors = tolerance.gradient_errors(
        found, {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    )
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def cached(module, x, cache, **options):
    """Return the output and the new cache."""
    attended = module.attend(x, cache=cache, **options)
    return attended.output, attended.cache


def test_a_cache_does_not_grow():
    layer = gated_delta_net()
    small, large = (layer.init_cache(B, capacity) for capacity in (4, 8192))
    step = nnx.jit(cached)
    after = small
    for _ in range(5):
        _, after = step(layer, jnp.asarray(X[:, :1]), after)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), cache) for cache in (small, large, after)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert after.length.tolist() == [5, 5]


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
    assert (output.dtype, cache.state.dtype, cache.key.dtype) == (
        jnp.bfloat16,
        jnp.float32,
        jnp.bfloat16,
    )


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_padding_is_not_seen_whichever_way_it_is_said(side, kind):
    layer, lengths = side.build(kind, D, D, N, H), np.array([5, 0])
    real = np.arange(T)[:, None] < lengths[:, None, None]
    x, mask = side.array(np.where(real, X, np.nan)), side.Mask.lengths(query=lengths, key=lengths)
    calls = [
        {"lengths": side.array(lengths)},
        {"mask": mask},
        {"lengths": side.array(np.array([7, 0])), "mask": mask},
    ]
    found = [
        side.numpy(side.jit(lambda x, options=options: layer(x, **options))(x)) for options in calls
    ]
    reference = side.numpy(side.jit(lambda x: layer(x))(side.array(X)))
    for output in found:
        np.testing.assert_allclose(output, np.where(real, reference, 0), rtol=0, atol=1e-14)


def test_a_row_with_lengths_that_cannot_be_gives_nan(side):
    layer = side.build("GatedDeltaNet", D, D, N, H)
    call = side.jit(lambda x, lengths, cache: cached(layer, x, cache, lengths=lengths))
    output, cache = call(side.array(X[:, :3]), side.array(np.array([4, 2])), layer.init_cache(B, 8))
    assert np.isnan(side.numpy(output)[0]).all()
    assert np.isfinite(side.numpy(output)[1, :2]).all()
    assert (cache.length.tolist(), cache.invalid.tolist()) == ([-1, 2], [True, False])
    output, cache = call(side.array(X[:, :3]), side.array(np.array([1, 1])), cache)
    assert np.isnan(side.numpy(output)[0]).all()
    assert cache.length.tolist() == [-1, 3]


def test_documents_under_a_cache_begin_where_the_mask_says(side):
    layer, ids = (
        side.build("KimiDeltaAttention", D, D, N, H),
        np.array([[0, 0, 0, 4, 4, 4, 4], [1, 1, 1, 1, 1, 2, 2]]),
    )
    mask, found, cache = side.Mask.segments(ids), [], layer.init_cache(B, T)
    whole = side.numpy(side.jit(lambda x: layer(x, mask=mask))(side.array(X)))
    step = side.jit(lambda x, cache: cached(layer, x, cache, mask=mask))
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output, cache = step(side.array(X[:, start:stop]), cache)
        found.append(side.numpy(output))
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=0, atol=1e-13)


def test_blocks_take_recurrent_attention():
    rngs = nnx.Rngs(0)
    block = TransformerBlock(
        GatedDeltaNet(D, D, N, H, rngs=rngs), FeedForward(D, rngs=rngs), None, None
    )
    run = nnx.jit(lambda block, x: cached(block, x, block.init_cache(B, 8)))
    output, cache = run(block, jnp.asarray(X, jnp.float32))
    assert output.shape == X.shape
    assert cache.length.tolist() == [T, T]
    with pytest.raises(
        ValueError, match=r"no scores, weights or positions; got return_weights=\. Leave it out"
    ):
        block.attend(jnp.asarray(X, jnp.float32), return_weights=True)
