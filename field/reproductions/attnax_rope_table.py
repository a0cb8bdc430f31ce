"""attnax silently rotates tokens past its table of angles by the last row of the table."""

import jax.numpy as jnp
from attnax.embeddings import rope_cos_sin_from_positions

positions = jnp.arange(7)[None]
for length in (8, 4):
    _, sin = rope_cos_sin_from_positions(positions, 2, 10000.0, length, jnp.float32)
    print(f"sines of tokens 0 to 6, a table of {length}:", sin[0, :, 0].round(3))
