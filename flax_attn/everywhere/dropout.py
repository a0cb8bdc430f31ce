"""Dropout as other libraries have it, and what is said of it."""

import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.shapes import Index

_OTHER_WEIGHTS = (
    "dropout of attention under flax_attn.everywhere has the rate and the distribution of the"
    " original's and draws from the layer's own key or stream, but drops other weights for the same"
    " key. To repeat a run from before to the bit, compute it under everywhere(False)"
)
_SAID: set[str] = set()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedDropout(KeyedDropout):
    """Dropout that drops the same weights in all rows of the batch and all heads."""

    def indices(self, *parts: Index) -> tuple[Index, ...]:
        b, n, t, s = parts
        return jnp.zeros_like(b), jnp.zeros_like(n), t, s


def say_what_differs() -> None:
    """Warn, once in a program, that dropout drops other weights than the original does."""
    if _OTHER_WEIGHTS not in _SAID:
        _SAID.add(_OTHER_WEIGHTS)
        warnings.warn(_OTHER_WEIGHTS, stacklevel=2)
