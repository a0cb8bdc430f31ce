"""FlaxMistralModel sees W + 1 keys with a window of W, and only its own key without one."""

import numpy as np
import torch
from _twins import difference, twins

SIZES = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
ids = np.arange(5, 16)[None]


def seen(weights):
    """Return how many keys each query sees."""
    return [int(row.sum()) for row in np.asarray(weights)]


for window in (4, 3, None):
    flax, twin = twins(
        "MistralModel", SIZES | {"sliding_window": window, "attn_implementation": "eager"}
    )
    with torch.no_grad():
        theirs = twin(torch.tensor(ids), output_attentions=True)
    ours = flax(ids, output_attentions=True)
    print(f"sliding_window={window}:", difference(ours.last_hidden_state, theirs.last_hidden_state))
    print("  keys that each query sees, Flax:   ", seen(ours.attentions[0][0, 0] > 0))
    print("  keys that each query sees, PyTorch:", seen(theirs.attentions[0][0, 0] > 0))
