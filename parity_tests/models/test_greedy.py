"""Two hundred greedy tokens, those that transformers' own greedy decoding makes of the same folder.

Ours are made in steps with a cache, of prompts of different length. Theirs follow from one pass
over prompt and tokens: if each token has the largest logit behind those before it, greedy decoding
has made it. In steps, some families take half a minute there.
"""

import numpy as np
import pytest
import torch
import transformers

from flax_attn.models import from_pretrained, generate

NEW, VOCAB = 200, 97
# Of the prompts of a batch.
LENGTHS = (3, 20, 9)
DECODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WINDOWED = ["sliding_attention", "full_attention"]
MODELS = {
    "GPT2": {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 256},
    "Llama": DECODER,
    "Qwen2": {**DECODER, "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    "Qwen3": {**DECODER, "head_dim": 6},
    "Phi3": {
        **DECODER,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "pad_token_id": 0,
    },
    "Gemma": {**DECODER, "head_dim": 6},
    "Gemma2": {**DECODER, "head_dim": 6, "sliding_window": 30, "query_pre_attn_scalar": 6},
    "Gemma3Text": {
        **DECODER,
        "head_dim": 6,
        "sliding_window": 30,
        "layer_types": WINDOWED,
        "query_pre_attn_scalar": 1,
    },
    "Olmo2": DECODER,
    "DiffLlama": DECODER,
    "SmolLM3": {**DECODER, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "Mixtral": {**DECODER, "num_local_experts": 4, "sliding_window": 30},
    "Qwen3Moe": {
        **DECODER,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "Qwen3Next": {
        **DECODER,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 12,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "DeepseekV3": {
        **DECODER,
        "num_key_value_heads": 6,
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "GptOss": {
        **DECODER,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 6,
        "sliding_window": 30,
    },
}

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
PHI3 = {
    **DECODER,
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": 24,
    "pad_token_id": 0,
}


def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def new(name, fields):
    config = getattr(transformers, f"{name}Config")
    own = config(**fields, vocab_size=VOCAB, bos_token_id=0, eos_token_id=None)
    build = transformers.AutoModelForCausalLM.from_config
    return build(own, experts_implementation="eager").double().eval()


def redraw(model):
    random = np.random.default_rng(8)
    for parameter in model.parameters():
        # Norms and biases stay near where they begin: with one large bias for all positions, one
        # word repeats for ever.
        deviation = 0.05 if parameter.ndim == 1 else 1.0
        parameter.data += torch.from_numpy(random.normal(0, deviation, parameter.shape))


def store(name, folder, fields):
    torch.manual_seed(0)
    model = new(name, fields)
    redraw(model)
    model.save_pretrained(folder)
    return model


def largest(model, prompt, tokens):
    """Return the tokens of the largest logits behind a prompt and each of its tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    theirs = store(name, tmp_path, MODELS[name])
    found = generate(from_pretrained(tmp_path), prompts(), NEW)
    for prompt, tokens in zip(prompts(), found, strict=True):
        assert len(tokens) == NEW
        # It is not stuck on a few words, which would follow from too little.
        assert len(set(tokens)) > 20
        assert largest(theirs, prompt, tokens) == tokens


def generated(model, prompt):
    """Return the 30 tokens that transformers makes of a prompt."""
    given = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(given), "max_new_tokens": 30}
    whole = model.generate(given, **options, do_sample=False)
    return whole[0, len(prompt) :].tolist()


def test_tokens_across_the_length_where_longrope_changes_are_those_that_transformers_generates(
    tmp_path,
):
    theirs = store("Phi3", tmp_path, PHI3)
    # Each row comes to 24 tokens at another step.
    found = generate(from_pretrained(tmp_path), prompts(), 30)
    assert found == [generated(theirs, prompt) for prompt in prompts()]
