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
from parity_tests.asserts import assert_near, assert_results_near
from parity_tests.models.folders import (
    fields_of,
    load_weights,
    problems,
    read_by_transformers,
    save_weights,
)
from parity_tests.models.states import by_path

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
    modeling_rope_utils,
    modeling_deepseek_v3,
    modeling_diffllama,
    modeling_gemma,
    modeling_gemma2,
    modeling_gemma3,
    modeling_gpt_oss,
    modeling_llama,
    modeling_mistral,
    modeling_mixtral,
    modeling_olmo2,
    modeling_phi3,
    modeling_qwen2,
    modeling_qwen3,
    modeling_qwen3_moe,
    modeling_qwen3_next,
    modeling_smollm3,
)
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Transformers' SDPA does not cap scores, and has no sinks.
ATTENTION = {"Gemma2": "eager", "GptOss": "eager"}


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
    config = config_of(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, **forms).to(dtype).eval()
    redraw(model, dtype)
    return model


def redraw(model, dtype):
    random = np.random.default_rng(0)
    for parameter in (*model.parameters(), *router_biases(model)):
        numbers = random.normal(0, 0.5, parameter.shape)
        parameter.data = torch.from_numpy(numbers).to(dtype)


def router_biases(model):
    """Return the biases of DeepSeek's routers, which are no parameters there."""
    named = dict(model.named_buffers())
    return [buffer for name, buffer in named.items() if name.endswith("e_score_correction_bias")]


def read_config(folder):
    return loader.read_config(Llama, Llama.family, read_fields(folder))


def stored(kind, folder, **fields):
    """Return a model of transformers, and ours read from its folder."""
    theirs = build(kind, **fields)
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder)


def their_results(model, tokens, cotangent):
    """Return the logits and the gradients."""
    logits = model(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(cotangent)).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return {"logits": logits.detach().numpy()}, gradients


@nnx.jit
def weighed_gradients(model, tokens, cotangent):
    """Return the gradients of the weighed logits, and the logits."""

    def weighed(model):
        logits = model(tokens)
        return (logits * cotangent).sum(), logits

    return nnx.grad(weighed, has_aux=True)(model)


def our_results(model, tokens, cotangent):
    """Return the logits and the gradients."""
    gradients, logits = weighed_gradients(model, jnp.asarray(tokens), jnp.asarray(cotangent))
    # Where transformers stores other arrays than it holds, gradients are those of what it holds.
    held, *_ = (*model.family.others, model.family.layout)
    arrays = convert.to_layout(by_path(gradients), held, axes=axes_of(model, held))
    return {"logits": np.asarray(logits)}, arrays


def assert_same_function(theirs, ours):
    random = np.random.default_rng(1)
    # Each logit counts by another number, so that errors do not cancel in the sum.
    given = random.integers(0, 13, (B, T)), random.normal(size=(B, T, 13))
    expected = their_results(theirs, *given)
    found = our_results(ours, *given)
    assert found[1].keys() == expected[1].keys()
    assert_results_near(found, expected)


def assert_same_logits(theirs, ours, t):
    tokens = np.random.default_rng(1).integers(0, 13, (B, t))
    logits = nnx.jit(lambda model, tokens: model(tokens))(ours, jnp.asarray(tokens))
    expected = theirs(torch.from_numpy(tokens)).logits.detach().numpy()
    assert_near({"logits": np.asarray(logits)}, {"logits": expected})


SLIDING, FULL = "sliding_attention", "full_attention"
# Shorter than the tokens of a test, so that it hides some.
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
# At indices 1 and 3 of the 4 frequencies.
TURNS = {"beta_fast": 0.2, "beta_slow": 0.05}
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
# What each family computes in more than one way: each field here changes the outputs.
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


LONG_PHI3 = {
    "original_max_position_embeddings": 8,
    "num_hidden_layers": 1,
    # Transformers takes 48 / 6 for the head width.
    "hidden_size": 48,
}


@pytest.mark.parametrize(
    ("t", "amplitude"), [(8, {}), (9, {}), (10, {"attention_factor": 1.5}), (8, {"factor": 7.0})]
)
def test_a_longrope_changes_beyond_its_original_context(t, amplitude, tmp_path, in_float64):
    rope = {**LONGROPE, **amplitude, "partial_rotary_factor": 0.75}
    theirs, ours = stored("Phi3", tmp_path, **LONG_PHI3, rope_parameters=rope)
    assert_same_logits(theirs, ours, t)
    assert_same_logits(round_trip(ours, tmp_path / "ours"), ours, t)


def round_trip(ours, folder):
    """Return the model of transformers in the folder of ours, which we read alike."""
    ours.save_pretrained(folder)
    assert from_pretrained(folder).config == ours.config
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("t", [CONTEXT, CONTEXT + 1, 2 * CONTEXT])
def test_a_dynamic_rope_reaches_beyond_its_original_context(t, tmp_path, in_float64):
    fields = {"rope_parameters": dict(ROPES["dynamic"]), "num_hidden_layers": 1}
    theirs, ours = stored("Llama", tmp_path, **fields)
    # Our config counts the tokens that the factor makes room for, theirs those before.
    assert ours.config.context_length == 2.5 * CONTEXT
    assert_same_logits(theirs, ours, t)


def as_version_4(config):
    """Return a config as transformers 4 wrote it."""
    rope = dict(config.pop("rope_parameters"))
    old = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config | old


@pytest.mark.parametrize("name", ROPES)
def test_a_config_of_transformers_4_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    old = as_version_4(fields_of(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_config(tmp_path) == config
    # Two configs that both lost the field would be equal, too.
    assert config.rope.base == ROPES[name].get("rope_theta", 10000.0)


def written_by_us(folder):
    """Write the config of a folder again, and return how transformers reads it."""
    ours = read_config(folder)
    written = loader.write_config(Llama.family, ours, "float64")
    (folder / "config.json").write_text(written)
    assert read_config(folder) == ours
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", ROPES)
def test_what_we_write_transformers_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path)
    after = written_by_us(tmp_path)
    # What rotary parameters say in other words gives the same frequencies.
    assert_configs_equal(after, before, left_out={"rope_parameters"})
    np.testing.assert_array_equal(their_frequencies(after), their_frequencies(before))


def their_frequencies(config):
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    return np.append(rotary.inv_freq.numpy(), rotary.attention_scaling)


NOT_THE_FUNCTION = {
    "transformers_version",
    "_name_or_path",
    "architectures",
    # For transformers 4, beside the one in `rope_parameters`.
    "partial_rotary_factor",
}


def assert_configs_equal(after, before, left_out=frozenset()):
    ignored = NOT_THE_FUNCTION | left_out
    assert without(after.to_dict(), ignored) == without(before.to_dict(), ignored)


def without(fields, names):
    return {name: value for name, value in fields.items() if name not in names}


# No field is at its default, so that one which is dropped makes a difference.
KINDS = {
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


def bits(weights):
    """Return the dtype and the bytes of each tensor: NumPy has no bfloat16 to compare."""
    found = {}
    for name, weight in weights.items():
        raw = weight.contiguous().view(torch.uint8)
        dtype = str(weight.dtype).removeprefix("torch.")
        found[name] = dtype, raw.numpy().tobytes()
    return found


def assert_same_bits(model, reference):
    assert bits(model.state_dict()) == bits(reference.state_dict())
    assert_configs_equal(model.config, reference.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit(kind, dtype, tmp_path):
    build(kind, dtype, **KINDS[kind]).save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    from_pretrained(tmp_path / "theirs").save_pretrained(ours, max_shard_size=1000)
    # Small enough for several files, which the index has to name.
    assert len(list(ours.glob("model-*.safetensors"))) > 1
    # Not the model that was stored: reading makes float32 of gpt-oss' norms.
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_same_bits(read_by_transformers(AutoModelForCausalLM, ours), reference)


def test_a_head_that_is_tied_stays_so(tmp_path):
    _, ours = stored("GPT2", tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    assert "lm_head.weight" not in load_weights(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    # One tensor, not two that are equal: they would part in training.
    assert again.lm_head.weight is again.transformer.wte.weight


def parameters(model):
    named = convert.parameters(model).items()
    return {name: np.asarray(parameter[...]).tobytes() for name, parameter in named}


def without_prefix(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items()}


def old_gpt2(weights):
    """Make it like the first uploads: no head, no prefix, and entries that are not parameters."""
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
    return without_prefix(without(weights, {"lm_head.weight"}), "transformer.") | {
        "h.0.attn.bias": mask,
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.1.attn.bias": mask.clone(),
    }


def old_llama(weights):
    """Without the prefix, and with the frequencies."""
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    return without_prefix(weights, "model.") | frequencies


def inside(weights):
    """As a larger module, or one that was compiled, stores them."""
    return {f"_orig_mod.{name}": value for name, value in weights.items()}


def with_head(weights):
    """With the head, though it is tied."""
    (table,) = (value for name, value in weights.items() if name.endswith("wte.weight"))
    # safetensors refuses two tensors that share memory.
    return weights | {"lm_head.weight": table.clone()}


@pytest.mark.parametrize(
    ("kind", "change"),
    [("GPT2", old_gpt2), ("GPT2", with_head), ("Llama", old_llama), ("Llama", inside)],
)
def test_other_names_for_the_same_weights(kind, change, tmp_path):
    fields = {"tie_word_embeddings": True} if change is old_llama else {}
    _, ours = stored(kind, tmp_path, **fields)
    save_weights(change(load_weights(tmp_path)), tmp_path)
    assert parameters(from_pretrained(tmp_path)) == parameters(ours)


def save_for_pytorch(weights, folder):
    torch.save(weights, folder / "pytorch_model.bin")


def save_shards_for_pytorch(weights, folder):
    """Save every second weight in a file of its own, with the index that says which."""
    names, files = sorted(weights), ("pytorch_model-1.bin", "pytorch_model-2.bin")
    for i, file in enumerate(files):
        torch.save({name: weights[name] for name in names[i::2]}, folder / file)
    places = {name: files[i % 2] for i, name in enumerate(names)}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_of_pytorch_is_read(shards, tmp_path):
    theirs, ours = stored("GPT2", tmp_path)
    # It would be read in place of the files of PyTorch.
    (tmp_path / "model.safetensors").unlink()
    save = save_for_pytorch if shards == 1 else save_shards_for_pytorch
    save(theirs.state_dict(), tmp_path)
    assert parameters(GPT2.from_pretrained(tmp_path)) == parameters(ours)


def test_a_checkpoint_of_more_than_weights(tmp_path):
    theirs, _ = stored("GPT2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_for_pytorch({**theirs.state_dict(), "epoch": 3}, tmp_path)
    # Checkpoints of training often hold such a number beside the weights.
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
    found = convert.state_dict(ours, ours.family.layout)
    assert {array.dtype.name for array in found.values()} == {"bfloat16"}
    raw = {name: ("bfloat16", array.tobytes()) for name, array in found.items()}
    assert raw == bits(theirs.to(torch.bfloat16).state_dict())


def test_dropout_is_drawn_as_in_the_config(tmp_path):
    _, ours = stored("GPT2", tmp_path, resid_pdrop=0.25, attn_pdrop=0.25, embd_pdrop=0.25)
    assert ours.config.dropout == 0.25
    other = GPT2.from_pretrained(tmp_path, dropout=0.5)
    assert other.config == replace(ours.config, dropout=0.5)
    # Without a source of random numbers it would drop nothing.
    assert jax.tree.leaves(nnx.state(other, nnx.RngState))


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3", "Qwen3Next"])
def test_experts_that_are_fused_in_the_file_are_read_too(kind, tmp_path):
    theirs = build(kind, **KINDS[kind])
    hub = stored_as(theirs, tmp_path / "hub", original=True)
    # As transformers 5 holds them.
    fused = stored_as(theirs, tmp_path / "fused", original=False)
    assert not has_fused(hub)
    assert has_fused(fused)
    assert parameters(from_pretrained(hub)) == parameters(from_pretrained(fused))


def stored_as(model, folder, original):
    model.save_pretrained(folder, save_original_format=original)
    return folder


def has_fused(folder):
    return any("gate_up_proj" in name for name in load_weights(folder))


EXPERTS = "model.layers.1.block_sparse_moe.experts"


def damage(folder):
    """Leave out two weights of experts, give one other shapes, and add a sixth expert."""
    weights = load_weights(folder)
    del weights[f"{EXPERTS}.0.w1.weight"]
    del weights[f"{EXPERTS}.4.w2.weight"]
    weights[f"{EXPERTS}.3.w3.weight"] = torch.zeros(2, 2)
    weights[f"{EXPERTS}.5.w3.weight"] = torch.zeros(10, 12)
    save_weights(weights, folder)


DAMAGE = [
    f"missing {EXPERTS}.0.w1.weight",
    f"missing {EXPERTS}.4.w2.weight",
    f"mis-shaped {EXPERTS}.3.w3.weight: expected (10, 12), got (2, 2)",
    f"unexpected {EXPERTS}.5.w3.weight",
]


def test_experts_that_are_missing_are_listed(tmp_path):
    build("Mixtral", **KINDS["Mixtral"]).save_pretrained(tmp_path)
    damage(tmp_path)
    lines = problems(tmp_path)
    assert len(lines) == len(DAMAGE)
    for line, start in zip(lines, DAMAGE, strict=True):
        assert line.startswith(start)


def test_stacked_layers_of_experts_are_read_alike(tmp_path):
    build("Mixtral", **KINDS["Mixtral"]).save_pretrained(tmp_path)
    stacked = from_pretrained(tmp_path, scan_layers=True)
    assert parameters(stacked) == parameters(from_pretrained(tmp_path))


def test_every_decoder_is_in_the_table_and_is_exported_on_both_sides():
    decoders = [cls for cls in FAMILIES if issubclass(cls, LanguageModel)]
    named = {getattr(transformers, f"{kind}Config").model_type for kind in KINDS}
    assert named >= {kind for cls in decoders for kind in cls.family.read}
    # A new family is forgotten in one of the packages otherwise.
    for cls in FAMILIES:
        assert getattr(flax_attn.models, cls.__name__) is cls
        assert hasattr(torch_ref.models, cls.__name__)
