"""Attention with the arguments and the shapes of Flax's functions, in nnx and in Linen."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.everywhere.core import SharedDropout, attend, refusals
from flax_attn.everywhere.words import asked_for
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask


@dataclass(frozen=True)
class Flat:
    """Arrays of any number of batch axes as arrays of one.

    Args:
        batch: sizes of the batch axes, as they were.
    """

    batch: tuple[int, ...]

    def of(self, x: Array | None) -> Array | None:
        """Return an array whose last three axes stay; one that broadcasts may have fewer axes."""
        if x is None or (len(self.batch) < 2 and x.ndim <= 4) or x.ndim <= 3:
            return x
        leading, rest = x.shape[:-3], x.shape[-3:]
        if prod(leading) == 1:
            return x.reshape(1, *rest)
        return jnp.broadcast_to(x, (*self.batch, *rest)).reshape(-1, *rest)

    def back(self, x: Array) -> Array:
        """Return an output, or weights, with the batch axes as they were."""
        return x.reshape(*self.batch, *x.shape[-3:])


def dropout_of(
    rate: float, key: Any, *, deterministic: bool, broadcast: bool
) -> KeyedDropout | None:
    """Return dropout with the distribution of Flax's, which drops other weights for the same key.

    With `broadcast` one choice serves all rows of the batch and all heads.
    """
    if deterministic or rate == 0:
        return None
    return (SharedDropout if broadcast else KeyedDropout)(rate, key)


def flax_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    dropout: KeyedDropout | None = None,
    precision: Any = None,
    sow: Any = None,
) -> Array:
    """Return attention of arrays `[batch..., tokens, heads, width]` of one dtype.

    Args:
        query: queries.
        key: keys, whose heads divide those of the queries.
        value: values.
        bias: bias on the scores, broadcasting to `[batch..., heads, queries, keys]`.
        mask: mask that broadcasts likewise; a number that is not 0 is `True`.
        is_causal: whether query i sees the keys up to i alone.
        dropout: dropout of the weights.
        precision: precision of the products.
        sow: function that is given the weights before dropout, or None.

    Raises:
        LeftAlone: if the call is refused, before any work.
    """
    words = asked_for(
        query, key, bias=bias, mask=mask, causal=is_causal, dropout=dropout, weights=sow
    )
    with refusals():
        flat = _flat(query, key, value)
        query, key, value, bias, mask = (flat.of(x) for x in (query, key, value, bias, mask))
        hidden = Mask() if mask is None else Mask.dense(jnp.asarray(mask).astype(bool))
        if is_causal:
            hidden = hidden & Mask.causal(0)
    call = {"mask": hidden, "precision": precision}
    found = None
    if dropout is None or sow is not None:
        weighed = sow is not None
        found = attend(query, key, value, bias, asked=words, return_weights=weighed, **call)
    if sow is not None:
        sow(flat.back(found.weights))
    if dropout is not None:
        found = attend(query, key, value, bias, asked=words, dropout=dropout, **call)
    return flat.back(found.output)


def _flat(query: Array, key: Array, value: Array) -> Flat:
    shapes = [x.shape for x in (query, key, value)]
    batches = {shape[:-3] for shape in shapes}
    if min(map(len, shapes)) < 3 or len(batches) > 1:
        raise ValueError(f"query, key and value must have the same batch axes; got {shapes}")
    return Flat(batches.pop())
