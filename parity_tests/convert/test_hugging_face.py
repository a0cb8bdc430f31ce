"""Hugging Face's attention modules: state dicts are loaded and stored, and outputs are equal."""

import pytest
import torch
from flax import nnx
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config
from transformers.models.bert.modeling_bert import BertAttention, BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

import flax_attn
from flax_attn import convert
from flax_attn.convert import ConversionError

BATCH, T, S, HEADS, KV_HEADS, WIDTH = 3, 5, 7, 6, 2, 4
D = HEADS * WIDTH


def attention(bias, **options):
    return flax_attn.MultiHeadAttention(
        D,
        D,
        None,
        0.0,
        HEADS,
        bias,
        out_bias=bias,
        param_dtype="float64",
        rngs=nnx.Rngs(0),
        **options,
    )


def tokens(rig, length):
    x = rig.normal(BATCH, length, D)
    return x, torch.from_numpy(x)


def test_gpt2(rig):
    config = GPT2Config(n_embd=D, n_head=HEADS, attn_implementation="sdpa")
    theirs, ours = rig.theirs(GPT2Attention(config, layer_idx=0)), attention(True)
    rig.load_both_ways(ours, theirs, "hf_gpt2")
    x, tensor = tokens(rig, T)
    rig.assert_equal(
        rig.run(ours, x),
        theirs(tensor, attention_mask=torch.ones(T, T, dtype=torch.bool).tril())[0],
    )


def angles(base):
    """Return cosines and sines of positions 0 ... T - 1.

    Hugging Face's own are in float32, whatever the dtype.
    """
    frequencies = base ** (-torch.arange(0, WIDTH, 2, dtype=torch.double) / WIDTH)
    turned = torch.outer(torch.arange(T, dtype=torch.double), frequencies).repeat(1, 2)[None]
    return turned.cos(), turned.sin()


@pytest.mark.parametrize(("kv_heads", "bias"), [(KV_HEADS, True), (HEADS, False), (1, False)])
def test_llama(rig, kv_heads, bias):
    config = LlamaConfig(
        hidden_size=D,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        attention_bias=bias,
        # Llama's own formula takes the softmax in float32, whatever the dtype.
        attn_implementation="sdpa",
    )
    theirs = rig.theirs(LlamaAttention(config, layer_idx=0))
    ours = attention(bias, num_kv_heads=kv_heads, rope=flax_attn.RoPE(base=500.0))
    rig.load_both_ways(ours, theirs, "hf_llama")
    x, tensor = tokens(rig, T)
    rig.assert_equal(rig.run(ours, x), theirs(tensor, position_embeddings=angles(500.0))[0])


def test_bert(rig):
    config = BertConfig(hidden_size=D, num_attention_heads=HEADS, attn_implementation="sdpa")
    theirs, ours = rig.theirs(BertAttention(config)), attention(True, causal=False)
    rig.load_both_ways(ours, theirs, "hf_bert")
    x, tensor = tokens(rig, T)
    rig.assert_equal(rig.run(ours, x), theirs.output.dense(theirs.self(tensor)[0]))


def test_bert_out_of_a_whole_layer(rig):
    config = BertConfig(
        hidden_size=D, num_attention_heads=HEADS, intermediate_size=5, attn_implementation="sdpa"
    )
    theirs, ours = rig.theirs(BertLayer(config)), attention(True, causal=False)
    convert.load_state_dict(ours, theirs.state_dict(), "hf_bert", prefix="attention.")
    x, tensor = tokens(rig, T)
    rig.assert_equal(
        rig.run(ours, x), theirs.attention.output.dense(theirs.attention.self(tensor)[0])
    )


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_t5(rig, cross):
    config = T5Config(d_model=D, d_kv=WIDTH, num_heads=HEADS, attn_implementation="eager")
    theirs = rig.theirs(T5Attention(config, has_relative_attention_bias=True))
    ours = attention(False, causal=False, scores=flax_attn.Scores(scale=1.0))
    rig.load_both_ways(ours, theirs, "hf_t5")
    (x, tensor), (y, other) = tokens(rig, T), tokens(rig, S)
    output, bias, _ = theirs(tensor, key_value_states=other if cross else None)
    rig.assert_equal(rig.run(ours, x, y if cross else x, bias=bias.detach().numpy()), output)


T5 = {"qkv_bias": False, "out_bias": False, "scores": flax_attn.Scores(scale=1.0)}
REFUSED = [
    ("hf_llama", {"d_in": 5}, r"output is as wide as its input; got d_in=5, d_out=24"),
    ("hf_llama", {"kdim": 5}, r"self-attention; got d_in=24, kdim=5, vdim=24"),
    ("hf_llama", {"qkv_bias": False}, r"all have a bias or none has"),
    ("hf_bert", {"num_kv_heads": KV_HEADS}, r"no grouped queries"),
    ("hf_bert", {"qkv_bias": False, "out_bias": False}, r"projections have a bias"),
    ("hf_bert", {"vdim": 5}, r"self-attention"),
    (
        "hf_t5",
        T5 | {"qkv_bias": True, "out_bias": True},
        r"have no bias; got qkv_bias=True, out_bias=True",
    ),
    (
        "hf_t5",
        T5 | {"qkv_bias": True},
        r"projections have no bias; got qkv_bias=True, out_bias=False",
    ),
    ("hf_t5", T5 | {"num_kv_heads": 1}, r"no grouped queries"),
    ("hf_t5", T5 | {"d_in": 5}, r"output is as wide as its input"),
    ("hf_t5", T5 | {"vdim": 5}, r"self-attention"),
    (
        "hf_t5",
        T5 | {"scores": flax_attn.Scores()},
        r"have the scale 1, no .*scale=None.*Pass scores=Scores\(scale=1\.0",
    ),
    (
        "hf_t5",
        T5 | {"scores": flax_attn.Scores(scale=1.0, sinks=True)},
        r"no soft cap and no sinks; got .*sinks=True",
    ),
]


@pytest.mark.parametrize(("layout", "options", "match"), REFUSED)
def test_a_layout_refuses_what_its_model_cannot_hold(layout, options, match):
    arguments = {
        "d_in": D,
        "d_out": D,
        "context_length": None,
        "dropout": 0.0,
        "num_heads": HEADS,
        "qkv_bias": True,
    }
    module = flax_attn.MultiHeadAttention(**arguments | options, causal=False, rngs=nnx.Rngs(0))
    with pytest.raises(ConversionError, match=match):
        convert.state_dict(module, layout)


SCORES = {"scale": 0.5, "soft_cap": 30.0, "sinks": True, "function": max}


@pytest.mark.parametrize("layout", ["torch_mha", "hf_gpt2", "hf_llama", "hf_bert", "flax"])
@pytest.mark.parametrize(("name", "value"), SCORES.items())
def test_scores_that_the_other_layer_does_not_compute_are_refused(layout, name, value):
    module = nnx.eval_shape(lambda: attention(True, scores=flax_attn.Scores(**{name: value})))
    with pytest.raises(ConversionError, match=rf"scale 1 / sqrt.*no sinks; got .*{name}={value}"):
        convert.state_dict(module, layout)


@pytest.mark.parametrize("layout", ["torch_mha", "hf_gpt2", "hf_bert", "hf_t5", "flax"])
def test_rotary_positions_that_the_other_layer_does_not_compute_are_refused(layout):
    module = nnx.eval_shape(lambda: attention(True, rope=flax_attn.RoPE(base=500.0)))
    with pytest.raises(
        ConversionError, match=r"it has no rotary positions; got rope=RoPE\(base=500\.0"
    ):
        convert.state_dict(module, layout)


@pytest.mark.parametrize("layout", ["torch_ref", "torch", "fused_qkv"])
def test_sinks_are_a_parameter_of_layouts_with_our_names(layout):
    weights = convert.state_dict(attention(True, scores=flax_attn.Scores(sinks=True)), layout)
    assert weights["sinks"].shape == (HEADS,)
