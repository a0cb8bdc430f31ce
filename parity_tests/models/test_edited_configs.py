"""Folders of transformers with an edited `config.json`: the same function, or refused by name."""

import random
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, modeling_rope_utils

from flax_attn.models import from_pretrained
from flax_attn.parity import tolerance
from parity_tests.models.folders import edit, fields_of

VOCAB, TOKENS = 13, np.random.default_rng(1).integers(0, 13, (3, 11))
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {"n_embd": 6, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": VOCAB}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
    "vocab_size": VOCAB,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
OWN = {
    "GPT2": GPT2,
    "Llama": SIZES,
    "Mistral": SIZES,
    "Qwen2": SIZES,
    "Qwen3": SIZES,
    "Phi3": SIZES,
    "Gemma": SIZES,
    "Gemma2": SIZES,
    "Gemma3Text": SIZES,
    "Olmo2": SIZES,
    "DiffLlama": SIZES,
    "SmolLM3": SIZES,
    "Mixtral": {**SIZES, "num_local_experts": 5},
    "Qwen3Moe": {**SIZES, **MOE},
    "GptOss": {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
}
# Of transformers' own work: how it computes, what it returns and what it draws.
SKIPPED = {"architectures", "dtype", "model_type", "transformers_version", "use_cache"}
# Of each family: all edits would take minutes.
EDITS_EACH = 8
ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0, "attention_factor": 0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "default", "rope_theta": 77.0},
    {},
)
# These edits were once another function here.
FOUND = [
    ("Llama", {"is_causal": None}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("GPT2", {"num_attention_heads": 3}),
    ("Qwen3Moe", {"num_experts": 4, "num_local_experts": 5}),
    ("GptOss", {"rope_parameters": None}),
]


@pytest.fixture
def in_float64(request, float64_modules):
    """Let transformers compute all in float64."""
    kind = request.node.callspec.params["kind"].removesuffix("Text")
    cls = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.set_default_dtype(torch.float64)
    with float64_modules(modeling_rope_utils, sys.modules[cls.__module__]):
        yield
    torch.set_default_dtype(torch.float32)


def drawn(kind):
    """Return a model of transformers, every parameter random."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**OWN[kind], **NO_IDS)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def stored(kind, folder):
    """Write a model of transformers, and return the fields of its config."""
    drawn(kind).save_pretrained(folder)
    return fields_of(folder)


def others(value):
    """Return other values of the kind that a field has."""
    if isinstance(value, bool) or value is None:
        return [None, True, False]
    if isinstance(value, (int, float)):
        return [None, 0, 2 * value, value + 0.7]
    if isinstance(value, dict):
        return [None, *ROPES]
    if isinstance(value, list):
        return [None, [], value[::-1]]
    return [None, "relu", "gelu", "gelu_pytorch_tanh"]


def sample(kind, fields):
    """Return some edits of the fields, the same in every run."""
    edits = []
    for name in sorted(fields.keys() - SKIPPED):
        edits += [(name, value) for value in others(fields[name])]
    return random.Random(kind).sample(edits, EDITS_EACH)


def their_logits(folder):
    """Return the logits of transformers; None where it does not compute any."""
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    options = {**forms, "dtype": torch.float64}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        with torch.no_grad():
            return model(torch.from_numpy(TOKENS)).logits.numpy()
    # Of many kinds, such as its validation of fields.
    except Exception:
        return None


def difference(folder):
    """Return how far the logits are from those of transformers; None where either refuses."""
    try:
        model = from_pretrained(folder, param_dtype=jnp.float64)
    except ValueError:
        return None
    theirs = their_logits(folder)
    if theirs is None:
        return None
    ours = {"logits": np.asarray(model(jnp.asarray(TOKENS)))}
    return tolerance.relative(ours, {"logits": theirs})["logits"]


def errors_of(edits, fields, folder):
    """Return how far each edit is from transformers, for those that neither refuses."""
    errors = {}
    for name, value in edits:
        edit(folder, **fields | {name: value})
        errors[name, str(value)] = difference(folder)
    return {name: error for name, error in errors.items() if error is not None}


@pytest.mark.parametrize("kind", OWN)
def test_edits_of_a_family(kind, tmp_path, in_float64):
    fields = stored(kind, tmp_path)
    errors = errors_of(sample(kind, fields), fields, tmp_path)
    # Not every edit is refused.
    assert errors
    assert max(errors.values()) <= tolerance.FORWARD, errors


@pytest.mark.parametrize(("kind", "change"), FOUND, ids=str)
def test_edits_that_were_another_function(kind, change, tmp_path, in_float64):
    stored(kind, tmp_path)
    edit(tmp_path, **change)
    error = difference(tmp_path)
    assert error is None or error <= tolerance.FORWARD
