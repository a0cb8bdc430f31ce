"""Folders of models with experts: what is refused, what is filled in, and what is left out."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_attn import RoPE, YaRNScaling, convert
from flax_attn.models import from_pretrained
from flax_attn.models.deepseekv3 import DeepseekV3, DeepseekV3Config
from flax_attn.models.gptoss import GptOss, GptOssConfig
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.qwen3moe import Qwen3Moe, Qwen3MoeConfig

SIZES = {"num_heads": 4, "num_layers": 2, "context_length": 16, "vocab_size": 11}
HEADS = {"num_kv_heads": 2, "head_dim": 2}
WIDTHS = {
    "kv_lora_rank": 5,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}
CONFIGS = {
    Mixtral: MixtralConfig(8, 12, num_experts=4, **HEADS, **SIZES),
    Qwen3Moe: Qwen3MoeConfig(8, 12, num_experts=4, top_k=2, d_expert=5, **HEADS, **SIZES),
    GptOss: GptOssConfig(
        8, 12, num_experts=4, top_k=2, window=3, full_layers=(1,), **HEADS, **SIZES
    ),
    DeepseekV3: DeepseekV3Config(
        8,
        12,
        num_experts=8,
        top_k=2,
        groups=2,
        top_groups=1,
        d_expert=5,
        num_dense_layers=1,
        **WIDTHS,
        **SIZES,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder for each family."""
    found = {}
    for cls, config in CONFIGS.items():
        found[cls] = tmp_path_factory.mktemp(cls.__name__)
        cls(config, rngs=nnx.Rngs(0)).save_pretrained(found[cls])
    return found


def edited(folder, to, *gone, **changes):
    """Write the config of a folder with fields changed and removed, and link its weights."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if n not in gone}))
    (to / "model.safetensors").symlink_to(folder / "model.safetensors")
    return to


@pytest.mark.parametrize("cls", CONFIGS)
def test_what_is_written_is_read(cls, folders):
    assert from_pretrained(folders[cls]).config == CONFIGS[cls]


REFUSED = [
    (Mixtral, {"router_jitter_noise": 0.1}, r"router_jitter_noise must be 0\.0, .*; got 0\.1"),
    (Mixtral, {"num_experts_per_tok": 5}, r"top_k must be at most .*top_k=5, num_experts=4"),
    (
        GptOss,
        {"quantization_config": {"quant_method": "gptq"}},
        "quant_method must be one of 'mxfp4', 'fp8'; got 'gptq'",
    ),
    (
        GptOss,
        {"layer_types": ["chunked", "full_attention"]},
        r"layer_types must name 'sliding_attention'.*'chunked'",
    ),
    (
        DeepseekV3,
        {"scoring_func": "softmax"},
        r"scoring_func must be \"sigmoid\", .*; got \"softmax\"",
    ),
    (
        DeepseekV3,
        {"topk_method": "greedy"},
        r"topk_method must be \"noaux_tc\", .*; got \"greedy\"",
    ),
    (DeepseekV3, {"num_key_value_heads": 2}, r"num_key_value_heads must be 4, .*; got 2"),
    (DeepseekV3, {"n_group": 3}, r"groups must divide num_experts.*num_experts=8, groups=3"),
]


@pytest.mark.parametrize(("cls", "changes", "match"), REFUSED)
def test_a_config_that_asks_for_another_function(cls, changes, match, folders, tmp_path):
    with pytest.raises(ValueError, match=match):
        from_pretrained(edited(folders[cls], tmp_path, **changes))


UNWRITABLE = [
    (
        Mixtral,
        {"window": 3, "full_layers": (1,)},
        r"Mixtral has its window in every layer.*full_layers=\(1,\)",
    ),
    (
        Qwen3Moe,
        {"window": 3, "full_layers": (0,)},
        r"Qwen3Moe has its window in every layer.*full_layers=\(0,\)",
    ),
    (
        DeepseekV3,
        {"window": 3},
        r"DeepseekV3 has no window in transformers; got 3\. Save with convert\.save",
    ),
]


@pytest.mark.parametrize(("cls", "changes", "match"), UNWRITABLE)
def test_a_config_that_transformers_does_not_compute(cls, changes, match):
    with pytest.raises(ValueError, match=match):
        cls.family.write(replace(CONFIGS[cls], **changes))


def test_a_gpt_oss_without_positions_has_those_of_transformers(folders, tmp_path):
    gone = ("rope_parameters", "rope_scaling", "rope_theta", "layer_types")
    config = from_pretrained(edited(folders[GptOss], tmp_path, *gone, sliding_window=3)).config
    assert config.rope == RoPE(150000.0, scaling=YaRNScaling(32.0, 4096, truncate=False))
    assert config.windows == (3, None)


def test_a_mscale_of_keys_alone_is_kept(folders, tmp_path):
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "mscale_all_dim": 0.5,
    }
    read = from_pretrained(
        edited(folders[DeepseekV3], tmp_path, rope_parameters=yarn, rope_scaling=None)
    ).config
    assert read.scale == pytest.approx(5**-0.5 * (1 + 0.05 * np.log(4)) ** 2)
    assert read.rope.scaling.amplitude() == pytest.approx(1 + 0.1 * np.log(4))
    again = DeepseekV3.family.write(read)
    assert again["rope_parameters"]["mscale_all_dim"] == 0.5


def test_the_layer_behind_the_last_is_left_out(folders, tmp_path):
    edited(folders[DeepseekV3], tmp_path)
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["model.layers.61.eh_proj.weight"] = np.zeros((2, 3), np.float32)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    assert from_pretrained(tmp_path).config == CONFIGS[DeepseekV3]
    weights["model.layers.60.eh_proj.weight"] = np.zeros((2, 3), np.float32)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(convert.ConversionError, match=r"unexpected model\.layers\.60\.eh_proj"):
        from_pretrained(tmp_path)


def test_a_selection_bias_keeps_its_dtype(folders):
    model = from_pretrained(folders[DeepseekV3], param_dtype=jnp.bfloat16)
    router = model.trf_blocks[1].ff.router
    assert router.selection_bias.dtype == jnp.float32
    assert router.W_router.kernel.dtype == jnp.bfloat16
