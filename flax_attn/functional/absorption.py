"""Latent attention in the space of the latents: their matrices are multiplied into queries and results instead."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Absorption:
    """What all heads would multiply latents by, applied to what meets the latents.

        q (K latent) = (K^T q) latent            sum_s w_s (V latent_s) = V (sum_s w_s latent_s)

    Args:
        kernel: from a latent to the keys and values of all heads, `(r, n, h + v)`.
        key_dim: width h of those keys.
        dtype: of the products; None is that of the tokens and the kernel together.
        precision: of the products.

    Example:
        >>> absorption = Absorption(jnp.ones((3, 4, 2 + 5)), key_dim=2, dtype=None, precision=None)
        >>> absorption.query(jnp.ones((2, 6, 4, 2 + 1))).shape, absorption.values(jnp.ones((2, 6, 4, 3))).shape
        ((2, 6, 4, 4), (2, 6, 4, 5))
    """

    kernel: Float[Array, "r n hv"]
    key_dim: int
    dtype: Dtype | None
    precision: PrecisionLike

    def query(self, query: Float[Array, "*b t n h"]) -> Float[Array, "*b t n r"]:
        """Return queries of latents; the features behind the first `key_dim`, which are rotated, stay."""
        plain, rotated = query[..., : self.key_dim], query[..., self.key_dim :]
        of_latent = self._product("...tnh,rnh->...tnr", plain, self.kernel[..., : self.key_dim])
        return jnp.concatenate([of_latent, rotated.astype(of_latent.dtype)], axis=-1)

    def values(self, latents: Float[Array, "*b t n r"]) -> Float[Array, "*b t n v"]:
        """Return the values of latents that every head has summed up."""
        return self._product("...tnr,rnv->...tnv", latents, self.kernel[..., self.key_dim :])

    def _product(self, form: str, x: Array, matrices: Array) -> Array:
        dtype = jnp.result_type(x, matrices) if self.dtype is None else self.dtype
        return jnp.einsum(form, x.astype(dtype), matrices.astype(dtype), precision=self.precision)
