"""equimo resizes positions with another bicubic kernel than DINOv2.

It uses jax.image's (a = -0.5); DINOv2 uses PyTorch's (a = -0.75).
"""

import jax.numpy as jnp
import numpy as np
import torch
from equimo.layers.posemb import LearnedPosEmbed

table = np.random.default_rng(0).normal(size=(9, 1)).astype(np.float32)
sizes = {"dim": 1, "embed_size": 3, "num_prefix_tokens": 0, "num_embedded_prefix_tokens": 0}
flags = {"global_pos_embed_cls": False, "global_pos_embed_reg": False, "antialias": False}
ours = LearnedPosEmbed(weight=jnp.asarray(table), **sizes, **flags).resample(new_size=(5, 5))
image = torch.tensor(table.reshape(1, 1, 3, 3))
theirs = torch.nn.functional.interpolate(image, size=(5, 5), mode="bicubic").flatten().numpy()
print("equimo :", np.asarray(ours).flatten()[:5].round(4))
print("PyTorch:", theirs[:5].round(4))
