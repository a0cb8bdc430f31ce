"""gpt-oss as published, its experts in blocks of four bits: equal to transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flax_attn import set_backend
from flax_attn.convert import ConversionError, state_dict
from flax_attn.convert.headers import read_headers
from flax_attn.models import from_pretrained, generate
from flax_attn.models.hugging_face.mxfp4 import dequantized
from flax_attn.parity.tolerance import LOW_FORWARD, reordered

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 61,
}
# What the config on the Hub says beside the sizes.
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"],
}
PUBLISHED = {
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "quantization_config": QUANTIZED,
}


def pack(weights):
    """Replace the kernels of experts by random blocks and scales, neither infinite nor 0."""
    random = np.random.default_rng(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        e, i, o = weights.pop(name).shape
        for part, shape, low, high in (
            ("blocks", (e, o, i // 32, 16), 0, 256),
            ("scales", (e, o, i // 32), 110, 125),
        ):
            weights[f"{name}_{part}"] = torch.from_numpy(
                random.integers(low, high, shape, np.uint8)
            )


def unpacked(weights):
    """Return the weights as transformers reads them."""
    found = {
        name: weight
        for name, weight in weights.items()
        if not name.endswith(("_blocks", "_scales"))
    }
    names = [name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")]
    both = {name: (weights[f"{name}_blocks"], weights[f"{name}_scales"]) for name in names}
    return found | {name: convert_moe_packed_tensors(*pair) for name, pair in both.items()}


@pytest.fixture
def folder(tmp_path):
    GptOssForCausalLM(GptOssConfig(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED))
    weights = load_file(tmp_path / "model.safetensors")
    pack(weights)
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_published_gptoss_has_the_weights_of_transformers(folder, scan_layers):
    ours = from_pretrained(folder, scan_layers=scan_layers)
    theirs = unpacked(load_file(folder / "model.safetensors"))
    found = state_dict(ours, type(ours).family.layout)
    assert found.keys() == theirs.keys()
    assert {array.dtype for array in found.values()} == {jnp.dtype(jnp.bfloat16)}
    for name, weight in theirs.items():
        np.testing.assert_array_equal(
            found[name].astype(np.float32), weight.float().numpy(), err_msg=name
        )


def test_every_byte_under_every_scale(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(255, 1, 1, 1)
    scales = (
        torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).repeat(1, 1, 16)
    )  # 255 is no number
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    entry = dequantized(read_headers(tmp_path / "model.safetensors"))["x"]
    theirs = convert_moe_packed_tensors(blocks, scales).float().numpy()
    assert entry.shape == theirs.shape
    np.testing.assert_array_equal(entry.read().astype(np.float32), theirs)


def test_blocks_without_their_scales_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    weights[f"{name}_scales"] = weights[f"{name}_scales"][:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConversionError) as raised:
        from_pretrained(folder)
    lines = [line.strip() for line in str(raised.value).splitlines()[1:]]
    wrong = [f"missing {name} ", f"unexpected {name}_blocks ", f"unexpected {name}_scales "]
    assert len(lines) == 3
    assert all(line.startswith(start) for line, start in zip(lines, wrong, strict=True)), lines


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_held_as_it_is_stored_it_is_the_model_in_floats(folder, backend):
    floats = from_pretrained(folder, param_dtype=jnp.float32)
    held = from_pretrained(folder, param_dtype=jnp.float32, weights="stored")
    for model in (floats, held):
        set_backend(model, backend)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 9)))
    for some in (tokens, tokens[:1, :5]):
        found, expected = ({"": np.asarray(model(some))} for model in (held, floats))
        assert max(reordered(found, expected).values()) <= 1
    experts = held.trf_blocks[1].ff.experts
    assert experts.W_gate.weight.dtype == jnp.uint8
    # 32 numbers take 16 bytes and a scale.
    assert experts.W_gate.weight.nbytes + experts.W_gate.scale.nbytes == 4 * 64 * 17
    assert generate(held, [3, 1, 4], 4) == generate(floats, [3, 1, 4], 4)


def test_held_in_bfloat16_it_is_as_near_as_floats(folder):
    whole = from_pretrained(folder, param_dtype=jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 9)))
    exact = np.asarray(whole(tokens))
    errors = []
    for weights in (None, "stored"):
        model = from_pretrained(folder, param_dtype=jnp.bfloat16, weights=weights)
        # Routers compute in float32.
        with jax.numpy_dtype_promotion("standard"):
            found = np.asarray(model(tokens)).astype(np.float32)
        assert model.trf_blocks[0].ff.experts.W_up.param_dtype == jnp.bfloat16
        errors.append(np.abs(found - exact).max())
    floats, held = errors
    assert held <= LOW_FORWARD * floats


def test_a_folder_of_floats_holds_nothing_as_it_is_stored(tmp_path):
    GptOssForCausalLM(GptOssConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a folder whose matrices are stored in 8 or 4 bits"):
        from_pretrained(tmp_path, weights="stored")
