"""`jax.nn.dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax_attn.everywhere.core import attend
from flax_attn.everywhere.target import LeftAlone, Place, Target
from flax_attn.functional.masks import Mask


def dot_product_attention(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    """Return what `jax.nn.dot_product_attention` returns."""
    if rest:
        raise LeftAlone(f"not written yet: {sorted(rest)}")
    hidden = Mask.causal(0) if is_causal else Mask()
    hidden = hidden if mask is None else hidden & Mask.dense(mask)
    return attend(query, key, value, bias, hidden, asked="causal" if is_causal else "").output


TARGET = Target(
    name="jax.nn",
    package="jax",
    versions=">=0.10.2,<0.13",
    places=(
        Place("jax._src.nn.functions", "dot_product_attention", dot_product_attention, "jax.nn"),
    ),
)
