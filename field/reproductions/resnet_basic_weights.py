"""FlaxResNetModel cannot load a ResNet of basic layers: its parameter names differ."""

import numpy as np
import torch
from _twins import difference, twins

SIZES = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2]}
pixels = np.random.default_rng(0).normal(size=(2, 3, 32, 24)).astype(np.float32)
for kind in ("bottleneck", "basic"):
    flax, twin = twins("ResNetModel", SIZES | {"layer_type": kind})
    with torch.no_grad():
        theirs = twin(torch.tensor(pixels)).last_hidden_state
    print(f"layer_type={kind}:", difference(flax(pixels).last_hidden_state, theirs))
