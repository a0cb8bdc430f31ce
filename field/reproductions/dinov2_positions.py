"""FlaxDinov2Model resizes positions with another bicubic kernel and scale than Dinov2Model."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _twins import difference, twins

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "mlp_ratio": 2,
    "patch_size": 4,
}
flax, twin = twins("Dinov2Model", {"image_size": 12, "initializer_range": 0.3, **SIZES})
for height, width in ((12, 12), (20, 12)):
    pixels = np.random.default_rng(0).normal(size=(1, 3, height, width)).astype(np.float32)
    with torch.no_grad():
        theirs = twin(torch.tensor(pixels)).last_hidden_state
    print(f"image of {height} x {width}:", difference(flax(pixels).last_hidden_state, theirs))

# The two causes apart, on a table of 3 x 3 positions that becomes 5 x 3.
table = np.random.default_rng(0).normal(size=(1, 1, 3, 3)).astype(np.float32)
resized = torch.nn.functional.interpolate(
    torch.tensor(table), size=(5, 3), mode="bicubic", align_corners=False
)


def scaled(height, width):
    """Return the table as Flax resizes it, by these factors."""
    arguments = {
        "scale": jnp.array([height / 3, width / 3]),
        "translation": jnp.zeros(2),
        "method": "bicubic",
    }
    return jax.image.scale_and_translate(
        jnp.asarray(table), (1, 1, 5, 3), (2, 3), antialias=False, **arguments
    )


print("scales with 0.1 added, as in Flax:", difference(scaled(5.1, 3.1), resized))
print("scales as they are:               ", difference(scaled(5, 3), resized))
