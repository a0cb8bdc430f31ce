"""gpt-oss as published, its experts in blocks of four bits: equal to transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flax_attn import set_backend
from flax_attn.convert.headers import read_headers
from flax_attn.models import from_pretrained
from flax_attn.models.hugging_face.mxfp4 import dequantized
from flax_attn.parity.tolerance import LOW_FORWARD
from parity_tests.models.folders import edit, load_weights, problems, save_weights, shorten
from parity_tests.models.held import (
    assert_same_model,
    assert_same_weights,
    both_forms,
    some_tokens,
)

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


def random_bytes(random, low, high, *shape):
    return torch.from_numpy(random.integers(low, high, shape, np.uint8))


def pack(weights):
    """Replace the kernels of experts by random blocks and scales."""
    random = np.random.default_rng(0)
    kernels = [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]
    for name in kernels:
        e, i, o = weights.pop(name).shape
        # A block has 32 numbers in 16 bytes.
        weights[f"{name}_blocks"] = random_bytes(random, 0, 256, e, o, i // 32, 16)
        # Powers of two from 2**-17 to 2**-3: no number is infinite, and none becomes 0.
        weights[f"{name}_scales"] = random_bytes(random, 110, 125, e, o, i // 32)


def unpacked(weights):
    """Return the weights as transformers reads them."""
    found = {}
    for name, weight in weights.items():
        kernel = name.removesuffix("_blocks")
        if kernel != name:
            found[kernel] = convert_moe_packed_tensors(weight, weights[f"{kernel}_scales"])
        elif not name.endswith("_scales"):
            found[name] = weight
    return found


@pytest.fixture
def folder(tmp_path):
    model = GptOssForCausalLM(GptOssConfig(**SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    edit(tmp_path, **PUBLISHED)
    weights = load_weights(tmp_path)
    pack(weights)
    save_weights(weights, tmp_path)
    return tmp_path


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_published_gptoss_has_the_weights_of_transformers(folder, scan_layers):
    ours = from_pretrained(folder, scan_layers=scan_layers)
    found = assert_same_weights(ours, unpacked(load_weights(folder)))
    assert {array.dtype for array in found.values()} == {jnp.dtype(jnp.bfloat16)}


def every_byte():
    """Return blocks of every byte, once for each of their scales."""
    block = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    # A scale of 255 is no number.
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1)
    return block.repeat(255, 1, 1, 1), scales.repeat(1, 1, 16)


def test_every_byte_under_every_scale(tmp_path):
    blocks, scales = every_byte()
    file = tmp_path / "model.safetensors"
    save_file({"x_blocks": blocks, "x_scales": scales}, file)
    found = dequantized(read_headers(file))["x"].read()
    theirs = convert_moe_packed_tensors(blocks, scales).float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), theirs, strict=True)


def test_blocks_without_their_scales_are_named(folder):
    name = "model.layers.1.mlp.experts.down_proj"
    shorten(folder, f"{name}_scales")
    missing, blocks, scales = problems(folder)
    assert missing.startswith(f"missing {name} ")
    assert blocks.startswith(f"unexpected {name}_blocks ")
    assert scales.startswith(f"unexpected {name}_scales ")


@pytest.fixture
def forms(folder, backend):
    """Return the model as it is stored, and in floats."""
    models = both_forms(folder)
    for model in models:
        set_backend(model, backend)
    return models


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_held_as_it_is_stored_it_is_the_model_in_floats(forms):
    assert_same_model(*forms, SIZES["vocab_size"])
    gate = forms[0].trf_blocks[1].ff.experts.W_gate
    assert gate.weight.dtype == jnp.uint8
    # 32 numbers take 16 bytes and a scale.
    assert gate.weight.nbytes + gate.scale.nbytes == 4 * 64 * 17


def error_in_bfloat16(folder, weights, tokens, exact):
    model = from_pretrained(folder, param_dtype=jnp.bfloat16, weights=weights)
    assert model.trf_blocks[0].ff.experts.W_up.param_dtype == jnp.bfloat16
    # Routers compute in float32.
    with jax.numpy_dtype_promotion("standard"):
        found = model(tokens)
    return np.abs(np.asarray(found).astype(np.float32) - exact).max()


def test_held_in_bfloat16_it_is_as_near_as_floats(folder):
    tokens = some_tokens(SIZES["vocab_size"])
    exact = np.asarray(from_pretrained(folder, param_dtype=jnp.float32)(tokens))
    floats = error_in_bfloat16(folder, None, tokens, exact)
    held = error_in_bfloat16(folder, "stored", tokens, exact)
    assert held <= LOW_FORWARD * floats


def test_a_folder_of_floats_holds_nothing_as_it_is_stored(tmp_path):
    GptOssForCausalLM(GptOssConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a folder whose matrices are stored in 8 or 4 bits"):
        from_pretrained(tmp_path, weights="stored")
