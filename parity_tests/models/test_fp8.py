"""DeepSeek-V3 as published, in eight bits with a scale for each block: equal to transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from flax_attn import Linear
from flax_attn.convert import ConversionError, state_dict
from flax_attn.models import from_pretrained, generate
from flax_attn.parity.tolerance import reordered

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
BLOCK = (
    16,
    8,
)  # which does not divide the 18 rows of the latents, as 128 does not divide their 576
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
SCALE = "_scale_inv"


def quantized(weights, scale_dtype=torch.float32, block=BLOCK):
    """Return the matrices of layers in eight bits, and their scales."""
    random, found = torch.Generator().manual_seed(0), {}
    for name, weight in weights.items():
        found[name] = weight
        if ".layers." in name and weight.ndim == 2 and not name.endswith("gate.weight"):
            found[name] = (64 * torch.randn(weight.shape, generator=random)).to(torch.float8_e4m3fn)
            blocks = [-(-size // edge) for size, edge in zip(weight.shape, block, strict=True)]
            found[name + SCALE] = (1e-3 + 1e-3 * torch.rand(blocks, generator=random)).to(
                scale_dtype
            )
    return found


def unpacked(weights, dtype):
    """Return the weights as transformers reads them, after padding them to whole blocks."""
    found = {name: weight.to(dtype) for name, weight in weights.items() if not name.endswith(SCALE)}
    for name in [name.removesuffix(SCALE) for name in weights if name.endswith(SCALE)]:
        (rows, columns), scales = weights[name].shape, weights[name + SCALE]
        whole = torch.zeros(
            [n * edge for n, edge in zip(scales.shape, BLOCK, strict=True)],
            dtype=torch.float8_e4m3fn,
        )
        whole.view(torch.uint8)[:rows, :columns] = weights[name].view(torch.uint8)
        found[name] = (
            Fp8Dequantize(None)._dequantize_one(whole, scales, dtype)[:rows, :columns].contiguous()
        )
    return found


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path)
    edit(tmp_path, quantization_config=QUANTIZED)
    weights = quantized(load_file(tmp_path / "model.safetensors"))
    assert weights[f"model.layers.0.self_attn.kv_a_proj_with_mqa.weight{SCALE}"].shape == (2, 4)
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def edit(folder, **fields):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_published_deepseek_has_the_weights_of_transformers(folder, dtype, scales):
    file = folder / "model.safetensors"
    weights = {
        name: weight.to(scales) if name.endswith(SCALE) else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file)
    ours = from_pretrained(folder, param_dtype=None if dtype is None else jnp.dtype(dtype))
    theirs = unpacked(weights, torch.bfloat16 if dtype is None else torch.float32)
    found = state_dict(ours, type(ours).family.layout)
    assert found.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert weight.ndim < 2 or found[name].dtype == (
            dtype or "bfloat16"
        )  # a router's bias keeps its own
        np.testing.assert_array_equal(
            found[name].astype(np.float32), weight.float().numpy(), err_msg=name
        )


def test_its_logits_are_those_of_transformers(folder, tmp_path_factory):
    plain = tmp_path_factory.mktemp("plain")
    DeepseekV3Config(**SIZES).save_pretrained(plain)
    save_file(
        unpacked(load_file(folder / "model.safetensors"), torch.float32),
        plain / "model.safetensors",
    )
    theirs = DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 9))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    found = from_pretrained(folder, param_dtype=jnp.float32)(jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("block", [BLOCK, (16, 32)])
def test_held_as_it_is_stored_it_is_the_model_in_floats(folder, block):
    edit(folder, quantization_config=QUANTIZED | {"weight_block_size": list(block)})
    file = folder / "model.safetensors"
    plain = {name: weight for name, weight in load_file(file).items() if not name.endswith(SCALE)}
    save_file(quantized(plain, block=block), file)
    floats = from_pretrained(folder, param_dtype=jnp.float32)
    held = from_pretrained(folder, param_dtype=jnp.float32, weights="stored")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 9)))
    for some in (tokens, tokens[:1, :5]):
        found, expected = ({"": np.asarray(model(some))} for model in (held, floats))
        assert max(reordered(found, expected).values()) <= 1
    attention, experts = held.trf_blocks[1].att, held.trf_blocks[1].ff.experts
    assert attention.W_query_up.weight.dtype == jnp.float8_e4m3fn
    # Absorbed, it is read as floats.
    assert type(attention.W_key_value) is Linear
    assert experts.W_down.weight.nbytes == 4 * 32 * 16
    assert generate(held, [3, 1, 4], 4) == generate(floats, [3, 1, 4], 4)


def test_a_weight_without_its_scales_is_named(folder):
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name + SCALE] = weights[name + SCALE][:, :-1].contiguous()
    save_file(weights, file)
    with pytest.raises(ConversionError) as raised:
        from_pretrained(folder)
    lines = [line.strip() for line in str(raised.value).splitlines()[1:]]
    assert [line.partition(" (")[0].partition(":")[0] for line in lines] == [
        f"unexpected {name}{SCALE}",
        f"not readable {name}",
    ], lines


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
