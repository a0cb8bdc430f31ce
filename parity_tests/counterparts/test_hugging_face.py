"""The attention of Hugging Face's models, as it is, against ours; and a whole block of GPT-2."""

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from transformers import BertConfig, DynamicCache, GPT2Config, LlamaConfig, T5Config
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

import flax_attn
from flax_attn import Mask, convert
from flax_attn.convert import Rule
from flax_attn.parity import assert_parity, compare

B, T, D, HEADS = 3, 5, 8, 2
INPUTS = [(B, T, D)]


def attention(bias=True, **options):
    return flax_attn.MultiHeadAttention(
        D, D, None, 0.0, HEADS, bias, out_bias=bias, rngs=nnx.Rngs(0), **options
    )


def later(x):
    """Return what is added to scores, so that no token sees a later one."""
    t = x.shape[1]
    return torch.full((t, t), -torch.inf, dtype=x.dtype).triu(1)


def gpt2_in_steps(layer, x):
    cache = DynamicCache()
    steps = [layer(x[:, [i]], past_key_values=cache)[0] for i in range(x.shape[1])]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gpt2(implementation, checks):
    def call(layer, x):
        # The eager one is causal only by the mask that its model gives.
        hidden = later(x) if implementation == "eager" else None
        return layer(x, attention_mask=hidden)[0]

    config = GPT2Config(n_embd=D, n_head=HEADS, attn_implementation=implementation)
    assert_parity(
        attention(),
        GPT2Attention(config, layer_idx=0).eval(),
        INPUTS,
        layout="hf_gpt2",
        checks=(*checks.core, "cache = full"),
        torch_call=call,
        torch_cached=gpt2_in_steps,
    )


PACKED = ("W_query", "W_key", "W_value")
GPT2_BLOCK = [
    Rule(tuple(f"att.{name}.kernel" for name in PACKED), "attn.c_attn.weight", axis=1),
    Rule(tuple(f"att.{name}.bias" for name in PACKED), "attn.c_attn.bias"),
    Rule(("att.out_proj.kernel",), "attn.c_proj.weight"),
    Rule(("att.out_proj.bias",), "attn.c_proj.bias"),
    Rule(("norm{i}.scale",), "ln_{i}.weight"),
    Rule(("norm{i}.shift",), "ln_{i}.bias"),
    # Conv1D has a weight of (in, out), as ours.
    Rule(("ff.layers.0.kernel",), "mlp.c_fc.weight"),
    Rule(("ff.layers.0.bias",), "mlp.c_fc.bias"),
    Rule(("ff.layers.2.kernel",), "mlp.c_proj.weight"),
    Rule(("ff.layers.2.bias",), "mlp.c_proj.bias"),
]


def test_a_block_of_gpt2(checks):
    hidden = 12
    config = GPT2Config(n_embd=D, n_head=HEADS, n_inner=hidden, attn_implementation="sdpa")
    rngs = nnx.Rngs(0)
    ours = flax_attn.TransformerBlock(
        flax_attn.MultiHeadAttention(D, D, None, 0.0, HEADS, True, rngs=rngs),
        flax_attn.FeedForward(D, hidden, rngs=rngs),
        flax_attn.LayerNorm(D),
        flax_attn.LayerNorm(D),
    )
    theirs = GPT2Block(config, layer_idx=0).eval()
    assert_parity(ours, theirs, INPUTS, layout=GPT2_BLOCK, checks=checks.core)


def llama(implementation, base=500.0):
    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        attn_implementation=implementation,
    )
    ours = flax_attn.MultiHeadAttention(
        24, 24, None, 0.0, 6, True, num_kv_heads=2, rope=flax_attn.RoPE(base), rngs=nnx.Rngs(0)
    )
    return ours, LlamaAttention(config, layer_idx=0).eval(), LlamaRotaryEmbedding(config)


def angles_in_float64(x, base=500.0, width=4):
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.double) / width)
    places = torch.arange(x.shape[1], dtype=torch.double)
    # Each half of a head is turned by the same angles.
    turned = torch.outer(places, frequencies).repeat(1, 2)[None]
    return turned.cos().to(x.dtype), turned.sin().to(x.dtype)


LLAMA_INPUTS = [(B, T, 24)]


def test_llama(checks):
    def call(layer, x):
        return layer(x, position_embeddings=angles_in_float64(x))[0]

    ours, theirs, _ = llama("sdpa")
    options = {"layout": "hf_llama", "torch_call": call}
    assert_parity(ours, theirs, LLAMA_INPUTS, checks=checks.core, **options)


@pytest.mark.parametrize("part", ["angles", "softmax"])
def test_llama_by_itself_computes_a_part_in_float32(part, checks):
    ours, theirs, rotary = llama("sdpa" if part == "angles" else "eager")

    def call(layer, x):
        if part == "angles":
            turned = rotary(x, torch.arange(x.shape[1])[None])
        else:
            turned = angles_in_float64(x)
        return layer(x, position_embeddings=turned, attention_mask=later(x))[0]

    options = {"layout": "hf_llama", "torch_call": call, "locate": False}
    report = compare(ours, theirs, LLAMA_INPUTS, checks=checks.core, **options)
    if part == "softmax":
        assert report.passed
        assert "what PyTorch makes in float32 is float64" in "\n".join(report.notes)
    else:
        # Angles come from a table that was built in float32.
        assert [check.name for check in report.failed] == ["forward", "gradients"]
        assert FLOAT64 < report.check("forward").error < FLOAT32


FLOAT64, FLOAT32 = jnp.finfo(jnp.float64).eps, jnp.finfo(jnp.float32).eps


def padded(layer, x, lengths=None):
    mask = None if lengths is None else Mask.lengths(key=lengths)
    return layer(x, mask=mask)


def bert_padded(layer, x, lengths=None):
    seen = None
    if lengths is not None:
        real = torch.arange(x.shape[1]) < lengths[:, None]
        seen = real[:, None, None]
    # Without the norm that follows.
    return layer.output.dense(layer.self(x, attention_mask=seen)[0])


BERT = {"layout": "hf_bert", "flax_call": padded, "torch_call": bert_padded, "locate": False}


def test_bert(checks):
    config = BertConfig(hidden_size=D, num_attention_heads=HEADS, attn_implementation="sdpa")
    sides = attention(causal=False), BertAttention(config).eval()
    assert_parity(*sides, INPUTS, checks=(*checks.core, "padded rows"), **BERT)
    # A weight of 0 times a value of NaN is NaN.
    report = compare(*sides, INPUTS, checks=["non-finite padding"], **BERT)
    assert "PyTorch lets padding reach real tokens of output" in report.explain()


class RelativeAttention(flax_attn.MultiHeadAttention):
    """The first self-attention of a T5 encoder, which owns the table of the bias by distance."""

    def __init__(self, buckets, max_distance):
        # T5 does not divide scores by the root of the width.
        options = {"causal": False, "out_bias": False, "scores": flax_attn.Scores(scale=1.0)}
        super().__init__(D, D, None, 0.0, HEADS, rngs=nnx.Rngs(0), **options)
        self.table = nnx.Embed(buckets, HEADS, rngs=nnx.Rngs(0))
        self.max_distance = max_distance

    def __call__(self, x):
        places = jnp.arange(x.shape[1])
        table = self.table.embedding[...]
        bias = flax_attn.t5_bias(table, places, places, max_distance=self.max_distance)
        return super().__call__(x, bias=bias.astype(x.dtype))


def test_t5(checks):
    config = T5Config(
        d_model=D,
        d_kv=D // HEADS,
        num_heads=HEADS,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=4,
        attn_implementation="eager",
    )
    table = Rule(("table.embedding",), "relative_attention_bias.weight")
    assert_parity(
        RelativeAttention(6, 4),
        T5Attention(config, has_relative_attention_bias=True).eval(),
        INPUTS,
        layout=[*convert.LAYOUTS["hf_t5"].rules, table],
        checks=(*checks.core, "single token"),
        torch_call=lambda layer, x: layer(x)[0],
    )
