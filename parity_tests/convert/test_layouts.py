"""Every layout against an index spec in plain numpy, and against the formula of its owners."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.convert import ConversionError
from flax_attn.parity import tolerance

HEADS, WIDTH = 4, 2
D = HEADS * WIDTH
NAMES = ("W_query", "W_key", "W_value")


def seeded(seed=0, **options):
    """Return a square module of both sides, and the PyTorch parameters as numpy arrays."""
    options = {"dropout": 0.0, "num_heads": HEADS, "qkv_bias": True, "causal": False} | options
    scores = {"scale": options.pop("scale", None)}
    theirs = torch_ref.MultiHeadAttention(
        D, D, None, **options, scores=torch_ref.Scores(**scores)
    ).double()
    random = np.random.default_rng(seed)
    for parameter in theirs.parameters():
        parameter.data = torch.from_numpy(random.normal(size=parameter.shape))
    numerics = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
    ours = flax_attn.MultiHeadAttention(
        D, D, None, **options, scores=flax_attn.Scores(**scores), **numerics
    )
    convert.load_state_dict(ours, theirs.state_dict())
    return ours, theirs, {name: value.numpy() for name, value in theirs.state_dict().items()}


def transposed(matrix):
    """Return the transpose, element by element."""
    rows, columns = matrix.shape
    return np.array([[matrix[i, j] for i in range(rows)] for j in range(columns)])


def stacked(parts):
    """Return the parts one below the other."""
    return np.array([row for part in parts for row in part])


def head_apart(weight, width=WIDTH):
    """Return `kernel[i, n, h] = weight[n * width + h, i]`."""
    out, inputs = weight.shape
    return np.array(
        [
            [[weight[n * width + h, i] for h in range(width)] for n in range(out // width)]
            for i in range(inputs)
        ]
    )


def spec_flax(w):
    spec = {"out.bias": w["out_proj.bias"]}
    for ours, theirs in zip(NAMES, ("query", "key", "value"), strict=True):
        bias, n = w[f"{ours}.bias"], len(w[f"{ours}.bias"]) // WIDTH
        spec[f"{theirs}.kernel"] = head_apart(w[f"{ours}.weight"])
        spec[f"{theirs}.bias"] = np.array(
            [[bias[i * WIDTH + h] for h in range(WIDTH)] for i in range(n)]
        )
    out = w["out_proj.weight"]
    spec["out.kernel"] = np.array(
        [[out[:, n * WIDTH + h] for h in range(WIDTH)] for n in range(HEADS)]
    )
    return spec


def spec_fused(w, weight, bias):
    return {
        weight: stacked(w[f"{name}.weight"] for name in NAMES),
        bias: stacked(w[f"{name}.bias"] for name in NAMES),
        "out_proj.weight": w["out_proj.weight"],
        "out_proj.bias": w["out_proj.bias"],
    }


def spec_gpt2(w):
    fused = spec_fused(w, "c_attn.weight", "c_attn.bias")
    return {
        "c_attn.weight": transposed(fused["c_attn.weight"]),
        "c_attn.bias": fused["c_attn.bias"],
        "c_proj.weight": transposed(w["out_proj.weight"]),
        "c_proj.bias": w["out_proj.bias"],
    }


def renamed(*theirs):
    """Return a spec that only renames the four projections."""

    def spec(w):
        names = dict(zip((*NAMES, "out_proj"), theirs, strict=True))
        return {
            f"{names[name.partition('.')[0]]}.{name.partition('.')[2]}": array
            for name, array in w.items()
        }

    return spec


SPECS = {
    "torch_ref": dict,
    "torch": dict,
    "fused_qkv": lambda w: spec_fused(w, "qkv_proj.weight", "qkv_proj.bias"),
    "torch_mha": lambda w: spec_fused(w, "in_proj_weight", "in_proj_bias"),
    "torch_transformer": dict,
    "hf_gpt2": spec_gpt2,
    "hf_llama": renamed("q_proj", "k_proj", "v_proj", "o_proj"),
    "hf_bert": renamed("self.query", "self.key", "self.value", "output.dense"),
    "hf_t5": renamed("q", "k", "v", "o"),
    "flax": spec_flax,
}
OPTIONS = {"hf_t5": {"qkv_bias": False, "out_bias": False, "scale": 1.0}}
NOT_OURS = {"nnx_mha", "equinox_mha"}  # from other people's modules: test_flax_and_equinox.py


def assert_same(ours, spec):
    assert set(ours) == set(spec)
    for name, array in spec.items():
        assert ours[name].shape == array.shape, name
        assert (ours[name] == array).all(), name


def test_every_layout_has_a_spec():
    assert set(convert.LAYOUTS) - NOT_OURS == set(SPECS)


@pytest.mark.parametrize("layout", SPECS)
def test_export_of_a_square_module(layout):
    ours, _, weights = seeded(**OPTIONS.get(layout, {}))
    assert_same(convert.state_dict(ours, layout), SPECS[layout](weights))


@pytest.mark.parametrize("layout", SPECS)
def test_import_into_a_square_module(layout):
    *_, weights = seeded(seed=1, **OPTIONS.get(layout, {}))
    other, *_ = seeded(seed=2, **OPTIONS.get(layout, {}))
    convert.load_state_dict(other, SPECS[layout](weights), layout)
    for name in (*NAMES, "out_proj"):
        assert (getattr(other, name).kernel[...] == transposed(weights[f"{name}.weight"])).all()
        if layout not in OPTIONS:
            assert (getattr(other, name).bias[...] == weights[f"{name}.bias"]).all()


@pytest.mark.parametrize("layout", ["torch_ref", "torch", "fused_qkv", "hf_llama", "flax"])
def test_grouped_queries(layout):
    ours, _, weights = seeded(num_kv_heads=2)
    spec = SPECS[layout](weights)
    assert_same(convert.state_dict(ours, layout), spec)
    other, *_ = seeded(seed=2, num_kv_heads=2)
    convert.load_state_dict(other, spec, layout)
    assert_same(convert.state_dict(other), weights)


def softmax(x):
    exps = np.exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def heads_of(projected):
    return np.stack(np.split(projected, projected.shape[-1] // WIDTH, axis=-1))


def causal_attention(query, key, value):
    """Return attention over (n, t, h) arrays, heads joined."""
    group = len(query) // len(key)
    key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
    scores = np.einsum("nth,nsh->nts", query, key) / WIDTH**0.5
    weights = softmax(np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf))
    return np.concatenate(list(weights @ value), axis=-1)


def assert_equal_output(output, x, module):
    ours = np.asarray(module(jnp.asarray(x)))
    assert tolerance.relative({"output": ours}, {"output": output})["output"] <= tolerance.FORWARD


def test_hugging_face_gpt2_formula():
    random = np.random.default_rng(3)
    shapes = {
        "c_attn.weight": (D, 3 * D),
        "c_attn.bias": (3 * D,),
        "c_proj.weight": (D, D),
        "c_proj.bias": (D,),
    }
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    module, *_ = seeded(causal=True)
    convert.load_state_dict(module, weights, "hf_gpt2")
    x = random.normal(size=(5, D))
    query, key, value = np.split(x @ weights["c_attn.weight"] + weights["c_attn.bias"], 3, axis=-1)
    joined = causal_attention(heads_of(query), heads_of(key), heads_of(value))
    assert_equal_output(joined @ weights["c_proj.weight"] + weights["c_proj.bias"], x, module)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_fused_projection_formula(kv_heads):
    random, kv = np.random.default_rng(4), kv_heads * WIDTH
    fused, bias = random.normal(size=(D + 2 * kv, D)), random.normal(size=D + 2 * kv)
    out, out_bias = random.normal(size=(D, D)), random.normal(size=D)
    weights = {
        "qkv_proj.weight": fused,
        "qkv_proj.bias": bias,
        "out_proj.weight": out,
        "out_proj.bias": out_bias,
    }
    module, *_ = seeded(causal=True, num_kv_heads=kv_heads)
    convert.load_state_dict(module, weights, "fused_qkv")
    x = random.normal(size=(5, D))
    query, key, value = np.split(x @ fused.T + bias, [D, D + kv], axis=-1)
    joined = causal_attention(heads_of(query), heads_of(key), heads_of(value))
    assert_equal_output(joined @ out.T + out_bias, x, module)


REFUSED = [
    (
        "torch_mha",
        {"num_kv_heads": 2},
        r"layout 'torch_mha': it has no grouped queries; got num_heads=4, num_kv_heads=2",
    ),
    ("hf_gpt2", {"num_kv_heads": 1}, r"no grouped queries"),
    ("torch_mha", {"d_in": 6}, r"output is as wide as its input; got d_in=6, d_out=8"),
    ("hf_gpt2", {"d_in": 6}, r"output is as wide as its input"),
    (
        "torch_mha",
        {"qkv_bias": False},
        r"all have a bias or none has; got qkv_bias=False, out_bias=True",
    ),
    ("hf_gpt2", {"qkv_bias": False}, r"all have a bias or none has"),
    (
        "flax",
        {"out_bias": False},
        r"all have a bias or none has; got qkv_bias=True, out_bias=False",
    ),
    (
        "hf_gpt2",
        {"qkv_bias": False, "out_bias": False},
        r"projections have a bias; got qkv_bias=False, out_bias=False",
    ),
    ("hf_gpt2", {"kdim": 5, "vdim": 3}, r"self-attention; got d_in=8, kdim=5, vdim=3"),
]


@pytest.mark.parametrize(("layout", "options", "match"), REFUSED)
def test_a_layout_refuses_what_it_cannot_hold(layout, options, match):
    arguments = {
        "d_in": D,
        "d_out": D,
        "context_length": None,
        "dropout": 0.0,
        "num_heads": 4,
        "qkv_bias": True,
    }
    module = flax_attn.MultiHeadAttention(**arguments | options, rngs=nnx.Rngs(0))
    with pytest.raises(ConversionError, match=match):
        convert.state_dict(module, layout)
    with pytest.raises(ConversionError, match=match):
        convert.load_state_dict(module, {}, layout)


@pytest.mark.parametrize("layout", ["torch_mha", "hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "flax"])
def test_a_single_head_is_refused(layout):
    with pytest.raises(ConversionError, match=r"SelfAttention cannot be stored.*output projection"):
        convert.state_dict(flax_attn.SelfAttention(3, 2, rngs=nnx.Rngs(0)), layout)


def test_a_refusal_says_where():
    att = flax_attn.MultiHeadAttention(D, D, 9, 0.0, 4, True, num_kv_heads=2, rngs=nnx.Rngs(0))
    block = flax_attn.TransformerBlock(att, flax_attn.FeedForward(D, rngs=nnx.Rngs(0)), None, None)
    with pytest.raises(ConversionError, match=r"att \(MultiHeadAttention\) cannot be stored"):
        convert.state_dict(block, "torch_mha")


def test_unknown_layout():
    module, *_ = seeded()
    for act in (
        lambda: convert.state_dict(module, "onnx"),
        lambda: convert.load_state_dict(module, {}, "onnx"),
    ):
        with pytest.raises(
            ConversionError, match=r"one of 'torch_ref', .*, a Layout or .*; got 'onnx'"
        ):
            act()
