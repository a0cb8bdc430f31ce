"""Calls of attention on meshes: listed ones, and ones drawn so that every pair of choices meets."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import KeyedDropout, Mask, dot_product_attention

B, T = 4, 48  # rows and tokens, which every mesh here divides
CUT = np.array(
    [0, 5, 17, 24, 31]
)  # documents that begin inside pieces, at their edge, and fill one
DOCUMENTS = np.searchsorted(CUT, np.arange(T), side="right") + np.arange(B)[:, None] * (
    np.arange(T) > 40
)
LENGTHS = np.array(
    [T, 29, 3, 0]
)  # the last row sees nothing, and late pieces of others are padding
DENSE = np.random.default_rng(3).random((1, 8, T, T)) < 0.4
MASKS = {
    "full": Mask(),
    "causal": Mask.causal(),
    "window of neighbours": Mask.sliding_window(5),
    "window beyond a piece": Mask.window(20, 0),
    "both sides": Mask.window(3, 9),
    "documents": Mask.causal() & Mask.segments(DOCUMENTS),
    "documents, open": Mask.segments(DOCUMENTS),
    "padding": Mask.causal() & Mask.lengths(query=LENGTHS, key=LENGTHS),
    "prefix": Mask.prefix(np.array([9, 30, 0, 48])),
    "dense": Mask.dense(DENSE),
}
MESHES = {"1x8": (1, 1, 8), "2x4": (1, 2, 4), "2x2x2": (2, 2, 2)}
CHOICES = {
    "mask": tuple(MASKS),
    "mesh": tuple(MESHES),
    "strategy": ("all_gather", "ulysses", "ring", "ulysses+ring"),
    "balance": ("none", "zigzag"),
    "kv_heads": (8, 2, 1),
    "extras": ("sinks", "bias", "one bias for all", "dropout", "everything"),
}


@dataclass(frozen=True)
class Case:
    """One call on one mesh."""

    mask: str
    mesh: str
    strategy: str
    balance: str
    kv_heads: int
    extras: str
    t: int = T
    n: int = 8

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in CHOICES)

    def has(self, extra: str) -> bool:
        return self.extras in (extra, "everything")

    def arrays(self) -> dict[str, Any]:
        """Return what has gradients."""
        draw = np.random.default_rng(sum(map(ord, str(self)))).normal
        h, v, k = 6, 5, self.kv_heads
        found = {"query": draw(size=(B, self.t, self.n, h)), "key": draw(size=(B, T, k, h))}
        found |= {"value": draw(size=(B, T, k, v))}
        found |= {"sinks": draw(size=(self.n,))} if self.has("sinks") else {}
        found |= {"bias": draw(size=(1, self.n, self.t, T))} if self.has("bias") else {}
        found |= {"bias": draw(size=(B, 1, 1, T))} if self.extras == "one bias for all" else {}
        return jax.tree.map(jnp.asarray, found)

    def attend(self, arrays: dict[str, Any], **options: Any) -> jax.Array:
        dropout = KeyedDropout(0.3, jnp.array([3, 14], jnp.uint32)) if self.has("dropout") else None
        cap = 1.5 if self.extras == "everything" else None
        return dot_product_attention(
            **arrays, mask=MASKS[self.mask], dropout=dropout, soft_cap=cap, **options
        )

    def both(self, arrays: dict[str, Any], **options: Any) -> dict[str, jax.Array]:
        """Return the output, and all gradients under a random cotangent."""
        output, pull = jax.vjp(lambda arrays: self.attend(arrays, **options), arrays)
        cotangent = np.random.default_rng(5).normal(size=output.shape)
        return {"output": output, **pull(jnp.asarray(cotangent))[0]}


def drawn(seed: int = 0) -> list[Case]:
    """Return cases in which every pair of choices meets.

    Each is the one of 20 draws that adds most pairs.
    """
    random = np.random.default_rng(seed)
    missing = {
        pair
        for a, b in combinations(CHOICES, 2)
        for pair in (((a, x), (b, y)) for x in CHOICES[a] for y in CHOICES[b])
    }
    cases = []
    while missing:
        tries = [
            {name: of[random.integers(len(of))] for name, of in CHOICES.items()} for _ in range(20)
        ]
        best = max(tries, key=lambda choice: len(_pairs(choice) & missing))
        missing -= _pairs(best)
        cases.append(_possible(Case(**best)))
    return list(dict.fromkeys(cases))


def _pairs(choice: dict[str, Any]) -> set:
    return set(combinations(choice.items(), 2))


def _possible(case: Case) -> Case:
    # What cannot be is refused, which has tests of its own.
    _, tensor, context = MESHES[case.mesh]
    heads, kv_heads = case.n // tensor, max(case.kv_heads // tensor, 1)
    if case.strategy == "ulysses+ring" and np.gcd.reduce([heads, kv_heads, context]) == 1 < context:
        return replace(case, strategy="ring")
    return (
        replace(case, strategy="all_gather")
        if case.strategy == "ulysses" and heads % context
        else case
    )
