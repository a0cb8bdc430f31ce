"""DeepSeek-V3 as published, in eight bits with a scale for each block: equal to transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from flax_attn import Linear
from flax_attn.models import from_pretrained
from parity_tests.models.folders import edit, load_weights, problems, save_weights, shorten
from parity_tests.models.held import (
    assert_same_model,
    assert_same_weights,
    both_forms,
    some_tokens,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 61,
}
# It does not divide the 18 rows of the latents, as 128 does not divide their 576.
BLOCK = (16, 8)
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
SCALE = "_scale_inv"


def is_scale(name):
    return name.endswith(SCALE)


def is_quantized(name, weight):
    # Routers, norms and the table stay as they are, as in the published files.
    return ".layers." in name and weight.ndim == 2 and not name.endswith("gate.weight")


def blocks_of(shape, block):
    """Return how many blocks each axis takes, the last of which may not be whole."""
    return [-(-size // edge) for size, edge in zip(shape, block, strict=True)]


def in_eight_bits(name, shape, block, random):
    """Return a random matrix and its scales, by their names."""
    numbers = 64 * torch.randn(shape, generator=random)
    scales = 1e-3 + 1e-3 * torch.rand(blocks_of(shape, block), generator=random)
    return {name: numbers.to(torch.float8_e4m3fn), name + SCALE: scales}


def quantized(weights, block=BLOCK):
    """Return weights with random matrices in eight bits for those of layers."""
    random = torch.Generator().manual_seed(0)
    found = dict(weights)
    for name, weight in weights.items():
        if is_quantized(name, weight):
            found |= in_eight_bits(name, weight.shape, block, random)
    return found


def dequantized(weight, scales, dtype):
    """Return a matrix as transformers reads it, which takes whole blocks only."""
    rows, columns = weight.shape
    whole = [n * edge for n, edge in zip(scales.shape, BLOCK, strict=True)]
    padded = torch.zeros(whole, dtype=torch.float8_e4m3fn)
    # PyTorch assigns no slices of these floats: the bytes are copied.
    padded.view(torch.uint8)[:rows, :columns] = weight.view(torch.uint8)
    floats = Fp8Dequantize(None)._dequantize_one(padded, scales, dtype)
    return floats[:rows, :columns].contiguous()


def unpacked(weights, dtype):
    """Return the weights as transformers reads them."""
    found = {}
    for name, weight in weights.items():
        if name + SCALE in weights:
            found[name] = dequantized(weight, weights[name + SCALE], dtype)
        elif not is_scale(name):
            found[name] = weight.to(dtype)
    return found


LATENTS = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def save_model(folder):
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path)
    edit(tmp_path, quantization_config=QUANTIZED)
    weights = quantized(load_weights(tmp_path))
    # 18 rows are one block and a part of another.
    assert weights[LATENTS + SCALE].shape == (2, 4)
    save_weights(weights, tmp_path)
    return tmp_path


def cast_scales(folder, dtype):
    """Store scales in a dtype, and return all weights of the folder."""
    weights = load_weights(folder)
    for name in filter(is_scale, weights):
        weights[name] = weights[name].to(dtype)
    save_weights(weights, folder)
    return weights


# Where none is asked for, weights have the dtype of the config.
DTYPES = {None: torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_published_deepseek_has_the_weights_of_transformers(folder, dtype, scales):
    weights = cast_scales(folder, scales)
    ours = from_pretrained(folder, param_dtype=dtype and jnp.dtype(dtype))
    found = assert_same_weights(ours, unpacked(weights, DTYPES[dtype]))
    # The bias of a router, a vector, keeps its own dtype.
    matrices = [array for array in found.values() if array.ndim > 1]
    assert {array.dtype for array in matrices} == {jnp.dtype(dtype or "bfloat16")}


@pytest.fixture
def theirs(folder, tmp_path_factory):
    """Return transformers' model of the same weights in float32, which it reads on CPUs."""
    plain = tmp_path_factory.mktemp("plain")
    DeepseekV3Config(**SIZES).save_pretrained(plain)
    save_weights(unpacked(load_weights(folder), torch.float32), plain)
    return DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def test_its_logits_are_those_of_transformers(folder, theirs):
    tokens = some_tokens(SIZES["vocab_size"])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(np.array(tokens))).logits.numpy()
    found = from_pretrained(folder, param_dtype=jnp.float32)(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.fixture
def requantized(folder, block):
    """Return the folder with its matrices in other blocks."""
    edit(folder, quantization_config=QUANTIZED | {"weight_block_size": list(block)})
    weights = load_weights(folder)
    plain = {name: weight for name, weight in weights.items() if not is_scale(name)}
    save_weights(quantized(plain, block), folder)
    return folder


@pytest.mark.parametrize("block", [BLOCK, (16, 32)])
def test_held_as_it_is_stored_it_is_the_model_in_floats(requantized):
    held, floats = both_forms(requantized)
    assert_same_model(held, floats, SIZES["vocab_size"])
    layer = held.trf_blocks[1]
    assert layer.att.W_query_up.weight.dtype == jnp.float8_e4m3fn
    # Absorbed, it is read as floats.
    assert type(layer.att.W_key_value) is Linear
    assert layer.ff.experts.W_down.weight.nbytes == 4 * 32 * 16


def without_reason(line):
    """Return what a line says of a weight, without the shape or the reason behind it."""
    return line.partition(" (")[0].partition(":")[0]


def test_a_weight_without_its_scales_is_named(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    shorten(folder, name + SCALE)
    unexpected, not_readable = map(without_reason, problems(folder))
    assert unexpected == f"unexpected {name}{SCALE}"
    assert not_readable == f"not readable {name}"


WRONG = {
    "activation_scheme": (
        "static",
        'activation_scheme must be "dynamic", no other value is supported; got "static"',
    ),
    "weight_block_size": ([0, 128], r"weight_block_size must be from 1 to 4194304; got 0"),
    "fmt": ("e5m2", 'fmt must be "e4m3"'),
    "quant_method": ("gptq", "quant_method must be one of 'mxfp4', 'fp8'; got 'gptq'"),
}


@pytest.mark.parametrize("field", WRONG)
def test_another_quantization_is_refused(folder, field):
    value, message = WRONG[field]
    edit(folder, quantization_config=QUANTIZED | {field: value})
    with pytest.raises(ValueError, match=f"config.json: quantization_config: {message}"):
        from_pretrained(folder)
