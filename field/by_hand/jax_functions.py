"""jax.nn.dot_product_attention beside PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from field.by_hand.both import Case

ROWS = {  # the tokens and heads of queries, of keys and values, and the options of JAX
    "plain": (6, 4, 6, 4, {}),
    "causal": (6, 4, 6, 4, {"is_causal": True}),
    "causal-cross": (3, 4, 6, 4, {"is_causal": True}),
    "grouped": (6, 4, 6, 2, {}),
    "bias": (6, 4, 6, 4, {}),
    "window": (6, 4, 6, 4, {"local_window_size": (2, 1)}),
    "lengths": (6, 4, 6, 4, {}),
    "mask": (6, 4, 6, 4, {}),
}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    yield from (
        (f"jax/nn.dot_product_attention/{name}", partial(_case, name, *row))
        for name, row in ROWS.items()
    )


def _case(name, queries, heads, keys, kv_heads, options):
    random = np.random.default_rng(3)
    shapes = {"q": (3, queries, heads, 5), "k": (3, keys, kv_heads, 5), "v": (3, keys, kv_heads, 5)}
    shapes |= {"bias": (3, heads, queries, keys)} if name == "bias" else {}

    def ours(v, mask):
        hidden = {}
        if mask is not None and name == "lengths":
            hidden = {"key_value_seq_lengths": mask.sum(-1).astype(jnp.int32)}
        elif mask is not None:
            hidden = {"mask": mask[:, None, None]}
        return jax.nn.dot_product_attention(
            v["q"], v["k"], v["v"], bias=v.get("bias"), **options, **hidden
        )

    def theirs(v, mask):
        q, k, w = (v[letter].transpose(1, 2) for letter in "qkv")
        hidden = v.get("bias") if mask is None else mask[:, None, None]
        if name.startswith("causal"):
            hidden = torch.ones(queries, keys, dtype=torch.bool).tril()
        if name == "window":
            hidden = torch.ones(queries, keys, dtype=torch.bool).tril(1).triu(-2)
        return scaled_dot_product_attention(q, k, w, hidden, enable_gqa=True).transpose(1, 2)

    values = {letter: random.normal(size=shape) for letter, shape in shapes.items()}
    return Case(
        ours, theirs, values, tuple(shapes), (3, keys) if name in ("lengths", "mask") else None
    )
