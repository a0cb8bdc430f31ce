"""Models of transformers through a folder into ours and back: the same function and bits."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.diffllama import modeling_diffllama
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.smollm3 import modeling_smollm3

import flax_attn
import torch_ref
from attn_spec.hugging_face.fields import read_fields
from flax_attn import convert
from flax_attn.convert.api import axes_of
from flax_attn.models import GPT2, Llama, from_pretrained
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.registry import FAMILIES
from flax_attn.parity import tolerance
from parity_tests.asserts import assert_near

B, T, CONTEXT = 3, 11, 16
GPT2_SIZES = {"n_embd": 6, "n_head": 2, "n_layer": 2, "n_positions": CONTEXT, "vocab_size": 13}
LLAMA_SIZES = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 13,
}
MODULES = (
    *(modeling_rope_utils, modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3),
    *(
        modeling_gemma,
        modeling_gemma2,
        modeling_gemma3,
        modeling_olmo2,
        modeling_phi3,
        modeling_smollm3,
    ),
    *(
        modeling_diffllama,
        modeling_mixtral,
        modeling_qwen3_moe,
        modeling_gpt_oss,
        modeling_deepseek_v3,
    ),
    modeling_qwen3_next,
)
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ATTENTION = {
    "Gemma2": "eager",
    "GptOss": "eager",
}  # transformers' SDPA does not cap scores, and has no sinks


@pytest.fixture
def in_float64(float64_modules):
    """Let transformers compute all in float64."""
    torch.set_default_dtype(torch.float64)
    with float64_modules(*MODULES):
        yield
    torch.set_default_dtype(torch.float32)


def config_of(kind, **fields):
    sizes = GPT2_SIZES if kind == "GPT2" else LLAMA_SIZES
    return getattr(transformers, f"{kind}Config")(**sizes | NO_IDS | {"dtype": "float64"} | fields)


def build(kind, dtype=torch.float64, **fields):
    """Return a model of transformers, every parameter random."""
    # Grouped products of experts, the other form, are not there in float64.
    forms = {"attn_implementation": ATTENTION.get(kind, "sdpa"), "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config_of(kind, **fields), **forms).to(dtype).eval()
    random = np.random.default_rng(0)
    biases = [
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    for parameter in (*model.parameters(), *biases):
        parameter.data = torch.from_numpy(random.normal(0, 0.5, parameter.shape)).to(dtype)
    return model


def read_config(folder):
    return loader.read_config(Llama, Llama.family, read_fields(folder))


def stored(kind, folder, **fields):
    """Return a model of transformers, and ours read from its folder."""
    theirs = build(kind, **fields)
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder)


def their_gradients(model, tokens, cotangent):
    logits = model(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(cotangent)).sum().backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def our_gradients(model, tokens, cotangent):
    def weighed(model, tokens, cotangent):
        logits = model(tokens)
        return (logits * cotangent).sum(), logits

    gradients, logits = nnx.jit(nnx.grad(weighed, has_aux=True))(
        model, jnp.asarray(tokens), jnp.asarray(cotangent)
    )
    flat = {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(gradients)
    }
    held = (*model.family.others, model.family.layout)[
        0
    ]  # what transformers holds, where it stores otherwise
    return np.asarray(logits), convert.to_layout(flat, held, axes=axes_of(model, held))


def assert_same_function(theirs, ours):
    random = np.random.default_rng(1)
    tokens, cotangent = random.integers(0, 13, (B, T)), random.normal(size=(B, T, 13))
    their_logits, their = their_gradients(theirs, tokens, cotangent)
    our_logits, our = our_gradients(ours, tokens, cotangent)
    assert_equal_logits(our_logits, their_logits)
    errors = tolerance.gradient_errors(our, their)
    assert our.keys() == their.keys()
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def assert_same_logits(theirs, ours, t):
    tokens = np.random.default_rng(1).integers(0, 13, (B, t))
    logits = nnx.jit(lambda model, tokens: model(tokens))(ours, jnp.asarray(tokens))
    assert_equal_logits(
        np.asarray(logits), theirs(torch.from_numpy(tokens)).logits.detach().numpy()
    )


def assert_equal_logits(ours, theirs):
    assert_near({"logits": ours}, {"logits": theirs})


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
GEMMA3 = {
    "query_pre_attn_scalar": 5,
    "sliding_window": 4,
    "layer_types": [SLIDING, FULL],
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 30.0},
        FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
TURNS = {"beta_fast": 0.2, "beta_slow": 0.05}  # at indices 1 and 3 of the 4 frequencies
QWEN3_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
QWEN3_NEXT = {
    **QWEN3_MOE,
    "shared_expert_intermediate_size": 9,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", FULL],
}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 5,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "first_k_dense_replace": 1,
}
FUNCTIONS = [
    ("GPT2", {"activation_function": "gelu", "reorder_and_upcast_attn": True}),
    (
        "GPT2",
        {"tie_word_embeddings": False, "n_inner": 10, "layer_norm_epsilon": 0.1, "n_layer": 1},
    ),
    ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "hidden_act": "gelu"}),
    (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": None,
            "num_hidden_layers": 1,
        },
    ),
    ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    ("Qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1, "head_dim": 6}),
    (
        "Qwen3",
        {"attention_bias": True, "rms_norm_eps": 0.1, **WINDOW, "layer_types": [SLIDING, FULL]},
    ),
    (
        "Phi3",
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
            "sliding_window": 4,
        },
    ),
    ("Gemma", {"attention_bias": True, "rms_norm_eps": 0.1, "num_hidden_layers": 1}),
    ("Gemma2", {"query_pre_attn_scalar": 5, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    ("Gemma3Text", GEMMA3),
    ("Olmo2", {"attention_bias": True, "rms_norm_eps": 0.1, "num_hidden_layers": 1}),
    ("DiffLlama", {"attention_bias": True, "rms_norm_eps": 0.1, "num_key_value_heads": 2}),
    (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "mlp_bias": True,
        },
    ),
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4}),
    ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    (
        "Qwen3Moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 4},
    ),
    ("GptOss", {**GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.3}),
    ("Qwen3Next", QWEN3_NEXT),
    (
        "Qwen3Next",
        {
            **{name: value for name, value in QWEN3_NEXT.items() if name != "layer_types"},
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    (
        "DeepseekV3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, **TURNS}},
    ),
    (
        "DeepseekV3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale_all_dim": 0.4}, "rope_interleave": False},
    ),
    (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True},
    ),
]


@pytest.mark.parametrize(("kind", "fields"), FUNCTIONS, ids=str)
def test_a_model_is_the_same_function(kind, fields, tmp_path, in_float64):
    assert_same_function(*stored(kind, tmp_path, **fields))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "silu", "relu"])
def test_activations_are_the_same_function(name, tmp_path):
    assert_same_logits(*stored("GPT2", tmp_path, activation_function=name, n_layer=1), T)


@pytest.mark.parametrize("window", [4, None])
def test_mistral_is_a_llama_with_a_window(window, tmp_path, in_float64):
    theirs, ours = stored("Mistral", tmp_path, sliding_window=window)
    assert ours.config.window == window
    assert_same_logits(theirs, ours, T)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 50.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {**LLAMA3, "rope_theta": 50.0, "original_max_position_embeddings": 8},
    "yarn": YARN,
    "yarn as long as the model": {"rope_type": "yarn", "factor": 2.0},
    "yarn without a factor": {**YARN, "factor": None},
    "yarn of DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "rope_theta": 50.0, **TURNS},
    "yarn with one scale": {**YARN, "mscale": 0.7},
    "yarn not rounded": {**YARN, "truncate": False, "attention_factor": 1.25, "rope_theta": 50.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_are_the_same_function(name, tmp_path, in_float64):
    theirs, ours = stored("Llama", tmp_path, rope_parameters=dict(ROPES[name]), num_hidden_layers=1)
    assert_same_logits(theirs, ours, CONTEXT)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 8.0],
}


@pytest.mark.parametrize(
    ("t", "amplitude"), [(8, {}), (9, {}), (10, {"attention_factor": 1.5}), (8, {"factor": 7.0})]
)
def test_a_longrope_changes_beyond_its_original_context(t, amplitude, tmp_path, in_float64):
    rope = {**LONGROPE, **amplitude, "partial_rotary_factor": 0.75}
    fields = {
        "rope_parameters": rope,
        "original_max_position_embeddings": 8,
        "num_hidden_layers": 1,
    }
    theirs, ours = stored(
        "Phi3", tmp_path, **fields, hidden_size=48
    )  # transformers takes 48 / 6 for the head width
    assert_same_logits(theirs, ours, t)
    ours.save_pretrained(tmp_path / "ours")
    assert from_pretrained(tmp_path / "ours").config == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert_same_logits(again, ours, t)


@pytest.mark.parametrize("t", [CONTEXT, CONTEXT + 1, 2 * CONTEXT])
def test_a_dynamic_rope_reaches_beyond_its_original_context(t, tmp_path, in_float64):
    theirs, ours = stored(
        "Llama", tmp_path, rope_parameters=dict(ROPES["dynamic"]), num_hidden_layers=1
    )
    assert ours.config.context_length == 2.5 * CONTEXT
    assert_same_logits(theirs, ours, t)


def as_version_4(config):
    """Return a config as transformers 4 wrote it."""
    rope = dict(config.pop("rope_parameters"))
    theta, name = rope.pop("rope_theta"), rope.pop("rope_type")
    old = {
        "rope_theta": theta,
        "rope_scaling": {"type": name, **rope} if name != "default" else None,
    }
    return config | old | {"torch_dtype": config.pop("dtype")}


@pytest.mark.parametrize("name", ROPES)
def test_a_config_of_transformers_4_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    config, file = read_config(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(as_version_4(json.loads(file.read_text()))))
    assert read_config(tmp_path) == config
    assert config.rope.base == ROPES[name].get("rope_theta", 10000.0)


@pytest.mark.parametrize("name", ROPES)
def test_what_we_write_transformers_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_config(tmp_path)
    (tmp_path / "config.json").write_text(loader.write_config(Llama.family, ours, "float64"))
    assert read_config(tmp_path) == ours
    after = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_configs_equal(after, before, left_out={"rope_parameters"})
    frequencies = [their_frequencies(config) for config in (after, before)]
    np.testing.assert_array_equal(*frequencies)


def their_frequencies(config):
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    return np.append(rotary.inv_freq.numpy(), rotary.attention_scaling)


def assert_configs_equal(after, before, left_out=frozenset()):
    left_out = left_out | {"transformers_version", "_name_or_path", "architectures"}
    left_out = left_out | {
        "partial_rotary_factor"
    }  # for transformers 4, beside that in rope_parameters
    left, right = (
        {k: v for k, v in c.to_dict().items() if k not in left_out} for c in (after, before)
    )
    assert left == right


KINDS = {  # with no field at its default
    "GPT2": {
        "tie_word_embeddings": False,
        "n_inner": 10,
        "resid_pdrop": 0.2,
        "attn_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "activation_function": "gelu",
        "layer_norm_epsilon": 0.01,
    },
    "Llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.3,
        "rms_norm_eps": 0.01,
    },
    "Mistral": {"sliding_window": 5, "tie_word_embeddings": True, "hidden_act": "gelu"},
    "Qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "attention_dropout": 0.3,
        "tie_word_embeddings": True,
    },
    "Qwen3": {
        **WINDOW,
        "layer_types": [SLIDING, FULL],
        "max_window_layers": 0,
        "attention_bias": True,
    },
    "Phi3": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
        "sliding_window": 5,
        "attention_dropout": 0.3,
        "tie_word_embeddings": True,
    },
    "Gemma": {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 0.01,
        "attention_dropout": 0.3,
    },
    "Gemma2": {
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "layer_types": [FULL, SLIDING],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 7.0,
        "hidden_activation": "silu",
    },
    "Gemma3Text": {**GEMMA3, "attention_bias": True},
    "Olmo2": {"attention_bias": True, "rms_norm_eps": 0.01, "tie_word_embeddings": True},
    "DiffLlama": {"attention_bias": True, "rms_norm_eps": 0.01, "tie_word_embeddings": True},
    "SmolLM3": {
        "no_rope_layers": [0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [FULL, SLIDING],
        "mlp_bias": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "Mixtral": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 4,
        "rms_norm_eps": 0.01,
    },
    "Qwen3Moe": {
        **QWEN3_MOE,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "attention_bias": True,
        **WINDOW,
    },
    "GptOss": {**GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.3, "layer_types": [FULL, SLIDING]},
    "Qwen3Next": {
        **QWEN3_NEXT,
        "attention_bias": True,
        "norm_topk_prob": False,
        "linear_conv_kernel_dim": 3,
    },
    "DeepseekV3": {
        **DEEPSEEK,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
    },
}


def bits(model):
    return {
        name: (value.dtype, value.contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in model.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit(kind, dtype, tmp_path):
    theirs = build(kind, dtype, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours", max_shard_size=1000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values())
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs"
    )  # which makes float32 of gpt-oss' norms
    assert bits(again.state_dict()) == bits(reference.state_dict())
    assert_configs_equal(again.config, reference.config)


def test_a_head_that_is_tied_stays_so(tmp_path):
    _, ours = stored("GPT2", tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.transformer.wte.weight


def parameters(model):
    return {
        name: np.asarray(param[...]).tobytes() for name, param in convert.parameters(model).items()
    }


def old_gpt2(weights):
    """Make it like the first uploads: no head, no prefix, and entries that are not parameters."""
    weights = {
        name.removeprefix("transformer."): value
        for name, value in weights.items()
        if name != "lm_head.weight"
    }
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
    return weights | {
        "h.0.attn.bias": mask,
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.1.attn.bias": mask.clone(),
    }


def old_llama(weights):
    """Without the prefix, and with the frequencies."""
    return {name.removeprefix("model."): value for name, value in weights.items()} | {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)
    }


def inside(weights):
    """As a larger module, or one that was compiled, stores them."""
    return {f"_orig_mod.{name}": value for name, value in weights.items()}


def with_head(weights):
    """With the head, though it is tied."""
    return weights | {
        "lm_head.weight": next(v for k, v in weights.items() if k.endswith("wte.weight")).clone()
    }


@pytest.mark.parametrize(
    ("kind", "change"),
    [("GPT2", old_gpt2), ("GPT2", with_head), ("Llama", old_llama), ("Llama", inside)],
)
def test_other_names_for_the_same_weights(kind, change, tmp_path):
    _, ours = stored(
        kind, tmp_path, **({"tie_word_embeddings": True} if change is old_llama else {})
    )
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    assert parameters(from_pretrained(tmp_path)) == parameters(ours)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_of_pytorch_is_read(shards, tmp_path):
    theirs, ours = stored("GPT2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(theirs.state_dict())
    files = (
        ["pytorch_model.bin"]
        if shards == 1
        else [f"pytorch_model-{i + 1}.bin" for i in range(shards)]
    )
    for i, file in enumerate(files):
        torch.save(
            {name: theirs.state_dict()[name] for name in names[i :: len(files)]}, tmp_path / file
        )
    if shards > 1:
        index = {"weight_map": {name: files[i % len(files)] for i, name in enumerate(names)}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert parameters(GPT2.from_pretrained(tmp_path)) == parameters(ours)


def test_a_checkpoint_of_more_than_weights(tmp_path):
    theirs, _ = stored("GPT2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**theirs.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(convert.ConversionError, match=r"unexpected epoch \(\)"):
        GPT2.from_pretrained(tmp_path)


def test_shards_of_transformers_are_read(tmp_path):
    theirs, ours = stored("Llama", tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="2KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert parameters(Llama.from_pretrained(tmp_path / "many")) == parameters(ours)


def test_a_parameter_is_cast_as_asked(tmp_path):
    theirs, _ = stored("Llama", tmp_path)
    ours = Llama.from_pretrained(tmp_path, param_dtype=jnp.bfloat16)
    expected = {name: value.to(torch.bfloat16) for name, value in theirs.state_dict().items()}
    cast = convert.state_dict(ours, ours.family.layout)
    assert {array.dtype.name for array in cast.values()} == {"bfloat16"}
    assert {n: a.tobytes() for n, a in cast.items()} == {
        n: b for n, (_, b) in bits(expected).items()
    }


def test_dropout_is_drawn_as_in_the_config(tmp_path):
    _, ours = stored("GPT2", tmp_path, resid_pdrop=0.25, attn_pdrop=0.25, embd_pdrop=0.25)
    assert ours.config.dropout == 0.25
    other = GPT2.from_pretrained(tmp_path, dropout=0.5)
    assert other.config == replace(ours.config, dropout=0.5)
    assert jax.tree.leaves(nnx.state(other, nnx.RngState))


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3", "Qwen3Next"])
def test_experts_that_are_fused_in_the_file_are_read_too(kind, tmp_path):
    theirs = build(kind, **KINDS[kind])
    for original in (True, False):  # as on the Hub, and as transformers 5 holds them
        theirs.save_pretrained(tmp_path / str(original), save_original_format=original)
    one, other = (from_pretrained(tmp_path / str(original)) for original in (True, False))
    names = [
        set(load_file(tmp_path / str(original) / "model.safetensors")) for original in (True, False)
    ]
    assert not any("gate_up_proj" in name for name in names[0])
    assert any("gate_up_proj" in name for name in names[1])
    assert parameters(one) == parameters(other)


def test_experts_that_are_missing_are_listed(tmp_path):
    build("Mixtral", **KINDS["Mixtral"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.block_sparse_moe.experts"
    gone = ["0.w1.weight", "4.w2.weight"]
    for name in gone:
        del weights[f"{prefix}.{name}"]
    weights[f"{prefix}.3.w3.weight"] = torch.zeros(2, 2)
    weights[f"{prefix}.5.w3.weight"] = torch.zeros(10, 12)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(convert.ConversionError) as caught:
        from_pretrained(tmp_path)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    starts = [f"missing {prefix}.{name}" for name in gone]
    starts += [
        f"mis-shaped {prefix}.3.w3.weight: expected (10, 12), got (2, 2)",
        f"unexpected {prefix}.5.w3.weight",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_stacked_layers_of_experts_are_read_alike(tmp_path):
    build("Mixtral", **KINDS["Mixtral"]).save_pretrained(tmp_path)
    assert parameters(from_pretrained(tmp_path, scan_layers=True)) == parameters(
        from_pretrained(tmp_path)
    )


def test_every_decoder_is_in_the_table_and_is_exported_on_both_sides():
    decoders = [cls for cls in FAMILIES if issubclass(cls, LanguageModel)]
    named = {getattr(transformers, f"{kind}Config").model_type for kind in KINDS}
    assert named >= {kind for cls in decoders for kind in cls.family.read}
    for cls in FAMILIES:
        assert getattr(flax_attn.models, cls.__name__) is cls
        assert hasattr(torch_ref.models, cls.__name__)
