"""Without token_type_ids, FlaxElectraModel uses those of the second sentence, not the first."""

import numpy as np
import torch
from _twins import difference, twins

SIZES = {"embedding_size": 24, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
flax, twin = twins(
    "ElectraModel", {"vocab_size": 37, "intermediate_size": 40, "initializer_range": 0.3, **SIZES}
)
ids = np.arange(5, 16)[None]
with torch.no_grad():
    theirs = twin(torch.tensor(ids)).last_hidden_state
print("token_type_ids left out:", difference(flax(ids).last_hidden_state, theirs))
zeros = np.zeros_like(ids)
print(
    "zeros passed:           ",
    difference(flax(ids, token_type_ids=zeros).last_hidden_state, theirs),
)
