"""The rows of latent attention, which caches what keys and values are made of."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from flax_attn.proof.rows.row import of_rows
from flax_attn.proof.variant import TableSizes, Variant


def _latent(
    sizes: TableSizes,
    name: str,
    *,
    q_lora_rank: int | None = None,
    rope: Mapping[str, Any] = {"interleaved": True},
    scores: Mapping[str, Any] = {},
    capacity: int | None = None,
    chunks: tuple[int | tuple[int, ...], ...] | None = None,
    **arguments: Any,
) -> Variant:
    """Return a row of latent attention; `rope` and `scores` are arguments of these."""
    widths = {
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 2,
        **arguments,
    }

    def make(p: Any) -> Any:
        parts = {
            "rope": p.RoPE(**rope),
            "scores": p.Scores(**scores),
            "kv_norm": p.RMSNorm(5, 1e-3),
        }
        if q_lora_rank is not None:
            parts["q_norm"] = p.RMSNorm(q_lora_rank, 1e-3)
            parts["q_lora_rank"] = q_lora_rank
        return p.MultiHeadLatentAttention(6, 8, 9, 0.3, 4 * sizes.times(4), **widths, **parts)

    return Variant(
        f"latent_{name}",
        "MultiHeadLatentAttention",
        make,
        ((sizes.b, sizes.t, 6),),
        chunks=sizes.chunks if chunks is None else chunks,
        capacity=capacity,
        dropout=True,
    )


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    latent = partial(_latent, sizes)
    t = sizes.t
    return (
        latent("deepseek", q_lora_rank=7),
        latent("absorbed", form="absorbed", scores={"soft_cap": 1.5, "sinks": True}),
        latent("plain", form="plain", rope={}, qkv_bias=True, out_bias=True, scores={"scale": 0.4}),
        latent("window", window=2, capacity=3),
        latent(
            "ragged",
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            capacity=8,
        ),
    )
