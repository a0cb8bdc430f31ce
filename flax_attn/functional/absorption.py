"""Latent attention computed on the latents themselves.

The matrices that turn latents into keys and values are multiplied into queries and results.

Only in flax_attn: it saves work.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Absorption:
    """The matrices of keys and values, applied to queries and results instead of latents.

        q (K latent) = (K^T q) latent            sum_s w_s (V latent_s) = V (sum_s w_s latent_s)

    Args:
        kernel: matrices from a latent to the keys and values of all heads, `(r, n, h + v)`.
        key_dim: width h of those keys.
        dtype: dtype of the products; None is the common dtype of the tokens and the kernel.
        precision: precision of the products.

    Example:
        >>> absorption = Absorption(jnp.ones((3, 4, 2 + 5)), key_dim=2, dtype=None, precision=None)
        >>> queries = absorption.query(jnp.ones((2, 6, 4, 2 + 1)))
        >>> queries.shape, absorption.values(jnp.ones((2, 6, 4, 3))).shape
        ((2, 6, 4, 4), (2, 6, 4, 5))
    """

    kernel: Float[Array, "r n hv"]
    key_dim: int
    dtype: Dtype | None
    precision: PrecisionLike

    def query(self, query: Float[Array, "*b t n h"]) -> Float[Array, "*b t n r"]:
        """Return queries of latents; the rotated features, behind the first `key_dim`, stay."""
        plain = query[..., : self.key_dim]
        rotated = query[..., self.key_dim :]
        keys = self.kernel[..., : self.key_dim]
        absorbed = self._product("...tnh,rnh->...tnr", plain, keys)
        # Rotated features are no part of the latent, and meet those of the keys as they are.
        return jnp.concatenate([absorbed, rotated.astype(absorbed.dtype)], axis=-1)

    def values(self, latents: Float[Array, "*b t n r"]) -> Float[Array, "*b t n v"]:
        """Return the values of latents that are already summed up for each head."""
        values = self.kernel[..., self.key_dim :]
        return self._product("...tnr,rnv->...tnv", latents, values)

    def _product(self, form: str, x: Array, matrices: Array) -> Array:
        dtype = jnp.result_type(x, matrices) if self.dtype is None else self.dtype
        x = x.astype(dtype)
        matrices = matrices.astype(dtype)
        return jnp.einsum(form, x, matrices, precision=self.precision)
