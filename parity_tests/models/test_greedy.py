"""Two hundred greedy tokens: those that transformers' own generate makes of the same folder."""

import numpy as np
import pytest
import torch
import transformers

from flax_attn.models import from_pretrained, generate

NEW, VOCAB = 200, 97
LENGTHS = (3, 20, 9)  # of the prompts of a batch
DECODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODELS = {
    "GPT2": {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 256},
    "Llama": DECODER,
    "Qwen2": {**DECODER, "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    "Qwen3": {**DECODER, "head_dim": 6},
}


def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def store(name, folder):
    config = getattr(transformers, f"{name}Config")(**MODELS[name], vocab_size=VOCAB, bos_token_id=0, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    random = np.random.default_rng(3)
    for parameter in model.parameters():
        # Norms and biases stay near where they begin: with one large bias for all positions, one word repeats for ever.
        parameter.data += torch.from_numpy(random.normal(0, 0.05 if parameter.ndim == 1 else 1.0, parameter.shape))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    theirs, ours = store(name, tmp_path), from_pretrained(tmp_path)
    found = generate(ours, prompts(), NEW)
    for prompt, tokens in zip(prompts(), found, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        reference = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        assert len(set(reference)) > 20  # not stuck on a few words
        assert tokens == reference
