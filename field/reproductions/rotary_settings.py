"""rope_theta and rope_scaling have no effect in the Flax Llama, Mistral and Gemma models."""

import numpy as np
import torch
from _twins import difference, twins

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 12,
}
SIZES |= {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
ids = np.arange(5, 16)[None]
for name in ("LlamaModel", "MistralModel", "GemmaModel"):
    window = {"sliding_window": 32} if name == "MistralModel" else {}
    for changed in ({}, {"rope_theta": 500.0}, LINEAR):
        flax, twin = twins(name, SIZES | window | changed)
        with torch.no_grad():
            theirs = twin(torch.tensor(ids)).last_hidden_state
        print(
            name, changed or "as it is by default", difference(flax(ids).last_hidden_state, theirs)
        )
