"""equinox.nn.RotaryPositionalEmbedding reuses the table of the first theta for a second one.

It caches the table by width and dtype only.
"""

import equinox
import jax.numpy as jnp
import numpy as np


def angles(theta):
    """Return the angles of the last of five tokens, of width 6."""
    found = equinox.nn.RotaryPositionalEmbedding(6, theta)(jnp.ones((5, 6)))[-1]
    return (np.angle(np.asarray(found[:3]) + 1j * np.asarray(found[3:])) - np.pi / 4) % (2 * np.pi)


def formula(theta):
    """Return them by the formula."""
    return 4 * theta ** -(np.arange(3) / 3)


for theta in (10000.0, 500000.0):
    print(
        f"theta = {theta:g}: equinox turns by {angles(theta).round(5)}, the formula by"
        f" {formula(theta).round(5)}"
    )
