"""torch.nn.Embedding(padding_idx=...) gives the padding row no gradient; flax.linen.Embed does."""

import jax
import numpy as np
import torch
from _twins import twins

SIZES = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
flax, twin = twins(
    "RobertaModel",
    {"intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 1, **SIZES},
)
ids = np.array([[5, 6, 7, 8, 1, 1]])
cotangent = np.random.default_rng(0).normal(size=(1, 6, 24)).astype(np.float32)
(twin(torch.tensor(ids)).last_hidden_state * torch.tensor(cotangent)).sum().backward()
found = jax.grad(lambda params: (flax(ids, params=params).last_hidden_state * cotangent).sum())(
    flax.params
)
for table in ("word_embeddings", "position_embeddings"):
    ours = np.abs(np.asarray(found["embeddings"][table]["embedding"]))
    theirs = getattr(twin.embeddings, table).weight.grad.abs()
    for row in (1, 2 if table == "position_embeddings" else 5):
        print(
            f"{table}, row {row}: largest gradient in Flax {ours[row].max():.4f}, in PyTorch"
            f" {theirs[row].max():.4f}"
        )
