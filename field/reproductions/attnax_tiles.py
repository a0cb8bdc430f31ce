"""attnax's memory_efficient_attention fails on masks of make_padding_mask beyond one tile."""

import attnax
import jax
import jax.numpy as jnp

# Each has the axes batch, heads, tokens, width.
query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 3, 7, 4))
mask = attnax.make_padding_mask(jnp.array([[5, 4, 3, 2, 1, 0, 0], [5, 4, 3, 0, 0, 0, 0]]))
standard = attnax.standard_attention(query, key, value, mask=mask)
print("standard_attention, mask of shape", mask.shape, "gives", standard.shape)
for block in (8, 4):
    try:
        found = attnax.memory_efficient_attention(query, key, value, mask=mask, block_size=block)
        print(f"tiles of {block}: differs by {jnp.abs(found - standard).max():.1e}")
    except ValueError as error:
        print(f"tiles of {block}: ValueError: {error}")
