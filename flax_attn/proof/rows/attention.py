"""The rows of attention."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flax_attn.proof.rows.row import DOCUMENTS, OPEN, divided, fitted, head_norms, layer, of_rows
from flax_attn.proof.variant import Sizes, Variant

_HEAD = {"d_in": 4, "d_out": 6, "context_length": 9, "dropout": 0.3}
_DIFFERENTIAL: dict[str, Any] = {"module": "DifferentialAttention"}
_WIDE_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 6}
_CROSS: dict[str, Any] = {**OPEN, "kdim": 5, "vdim": 3}
_PACKED = np.array(
    [[0, 1, 2, 0, 1], [0, 2, 3, 7, 9], [70, 73, 0, 1, 4]]
)  # with gaps: these are positions, not indices


def _multi_head(
    sizes: Sizes,
    name: str,
    *widths: int,
    call: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    parts: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    capacity: int | None = None,
    chunks: tuple[int | tuple[int, ...], ...] | None = None,
    module: str = "MultiHeadAttention",
    **arguments: Any,
) -> Variant:
    """Return a row of attention.

    `widths` are those of query, key and value; `parts` are arguments built from the package.
    """
    arguments = {
        "d_in": 6,
        "d_out": 8,
        "context_length": 9,
        "dropout": 0.3,
        "num_heads": 4,
        **arguments,
    }
    arguments = divided(sizes, arguments)
    if chunks is None:
        chunks = sizes.chunks if arguments.get("causal", True) else ()
    tokens = (sizes.t, sizes.s, sizes.s)
    return Variant(
        f"multi_head_{name}",
        module,
        lambda p: getattr(p, module)(**arguments, **parts(p)),
        tuple((sizes.b, *shape) for shape in zip(tokens, widths or (6,), strict=False)),
        call,
        chunks=chunks,
        capacity=capacity,
        dropout=True,
    )


def _delta(
    sizes: Sizes,
    name: str,
    module: str = "GatedDeltaNet",
    call: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    chunks: tuple[int | tuple[int, ...], ...] | None = None,
    **arguments: Any,
) -> Variant:
    """Return a row of a recurrent attention."""
    arguments = {"d_in": 6, "d_out": 7, "num_heads": 4, "head_dim": 3, **arguments}
    arguments |= {
        name: sizes.times(2) * arguments[name]
        for name in ("num_heads", "num_key_heads")
        if name in arguments
    }
    inputs, chunks = ((sizes.b, sizes.t, 6),), sizes.chunks if chunks is None else chunks
    return Variant(
        name, module, lambda p: getattr(p, module)(**arguments), inputs, call, chunks=chunks
    )


def _latent(
    sizes: Sizes,
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
        parts |= (
            {}
            if q_lora_rank is None
            else {"q_norm": p.RMSNorm(q_lora_rank, 1e-3), "q_lora_rank": q_lora_rank}
        )
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


def _seen(b: Any, n: Any, i: Any, j: Any) -> Any:
    """A mask that depends on every index; the first tokens of some rows and heads see nothing."""
    return (
        (j <= i) & ((i // 3 == j // 3) | ((i + 2 * j + b + 3 * n) % 4 == 0)) & ((i + b + n) % 5 > 0)
    )


def _rescored(p: Any, heads: int) -> Callable:
    """A function of scores that depends on every index; its table is exact in every dtype."""

    def rescored(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        table = p.alibi(heads, [16], np.arange(33))
        found = table[n, 0, 16 + j - i] - table[(n + b) % heads, 0, 15 - i]
        return score * abs(score) + (
            found.astype(score.dtype) if hasattr(found, "astype") else found.to(score.dtype)
        )

    return rescored


def rows(sizes: Sizes) -> tuple[Variant, ...]:
    """Return the rows."""
    t, heads = sizes.t, 4 * sizes.times(4)
    dense = np.random.default_rng(0).random((heads, t, t)) < 0.6
    return (
        layer(sizes, "simplified", "SimplifiedSelfAttention"),
        layer(sizes, "self_attention", "SelfAttention", d_in=4, d_out=6),
        layer(
            sizes, "self_attention_d_key", "SelfAttention", d_in=4, d_out=6, qkv_bias=True, d_key=2
        ),
        layer(sizes, "causal", "CausalAttention", **_HEAD),
        layer(sizes, "causal_d_key", "CausalAttention", **_HEAD, qkv_bias=True, d_key=2),
        layer(
            sizes,
            "multi_head_wrapper",
            "MultiHeadAttentionWrapper",
            **_HEAD,
            num_heads=2,
            qkv_bias=True,
        ),
        _multi_head(sizes, "causal"),
        _multi_head(
            sizes, "square", 8, d_in=8, qkv_bias=True
        ),  # what torch's own layer and GPT-2's can represent
        _multi_head(sizes, "gqa", num_kv_heads=2, qkv_bias=True),
        _multi_head(sizes, "mqa", num_kv_heads=1, out_bias=False),
        _multi_head(sizes, "bidirectional", **OPEN),
        _multi_head(sizes, "cross", 6, 5, 3, **_CROSS, qkv_bias=True),
        _multi_head(
            sizes,
            "cross_causal",
            *(6, 5, 3),
            call=lambda p: {"mask": p.Mask.causal(offset=2)},
            **_CROSS,
        ),
        _multi_head(
            sizes,
            "padding",  # the first row of the batch attends to nothing
            call=lambda p: {
                "mask": p.Mask.lengths(
                    query=np.array(of_rows(sizes, t, 3, 4)), key=np.array(of_rows(sizes, 0, 3, t))
                )
            },
        ),
        _multi_head(
            sizes,
            "packed_window",
            call=lambda p: {
                "mask": p.Mask.segments(np.where(np.arange(t) < 3, 7, 0)) & p.Mask.sliding_window(2)
            },
            causal=False,
            chunks=sizes.chunks,
        ),
        _multi_head(
            sizes,
            "prefix_dense",
            call=lambda p: {"mask": p.Mask.prefix(2) & p.Mask.dense(dense)},
            causal=False,
            chunks=sizes.chunks,
        ),
        _multi_head(
            sizes,
            "rope",
            parts=lambda p: {"rope": p.RoPE()},
            num_heads=2,
            num_kv_heads=1,
            qkv_bias=True,
        ),
        _multi_head(
            sizes,
            "rope_yarn_packed",
            call=lambda p: {
                "positions": fitted(sizes, _PACKED),
                "mask": p.Mask.segments(fitted(sizes, DOCUMENTS)),
            },
            parts=lambda p: {
                "rope": p.RoPE(500.0, width=8, interleaved=True, scaling=p.YaRNScaling(4.0, 40))
            },
            d_out=24,
            num_heads=2,
        ),
        _multi_head(
            sizes,
            "rope_longrope",  # the first row of the batch is short, the others are long
            call=lambda p: {"positions": fitted(sizes, _PACKED)},
            parts=lambda p: {
                "rope": p.RoPE(50.0, scaling=p.LongRoPEScaling(4.0, 5, (1.0, 1.5), (2.0, 8.0)))
            },
            num_heads=2,
            chunks=(),
        ),
        _multi_head(
            sizes,
            "alibi",  # of 4 or 8 heads: slopes that are exact in every dtype
            call=lambda p: {"bias": lambda query, key: p.alibi(heads, query, key)},
            parts=lambda p: {"scores": p.Scores(scale=0.8)},
        ),
        _multi_head(
            sizes,
            "t5",  # with a table that is exact in every dtype
            call=lambda p: {
                "bias": lambda query, key: p.t5_bias(
                    p.alibi(heads, [0], np.arange(8))[:, 0].T, query, key, max_distance=8
                )
            },
            parts=lambda p: {"scores": p.Scores(scale=1.0)},
            **OPEN,
        ),
        _multi_head(
            sizes,
            "soft_cap_sinks",
            call=lambda p: {"bias": lambda query, key: p.alibi(heads, query, key)},
            parts=lambda p: {"scores": p.Scores(soft_cap=1.5, sinks=True)},
            num_kv_heads=2,
        ),
        _multi_head(
            sizes,
            "function_mask",
            call=lambda p: {"mask": p.Mask.where(_seen)},
            causal=False,
            chunks=sizes.chunks,
        ),
        _multi_head(
            sizes,
            "function_score",
            parts=lambda p: {
                "scores": p.Scores(soft_cap=1.5, sinks=True, function=_rescored(p, heads))
            },
            num_kv_heads=2,
        ),
        _multi_head(
            sizes,
            "function_window",
            call=lambda p: {"mask": p.Mask.where(_seen)},
            parts=lambda p: {"scores": p.Scores(function=_rescored(p, heads))},
            window=3,
            capacity=4,
        ),
        _multi_head(
            sizes, "qk_norm", parts=lambda p: {"rope": p.RoPE(), **head_norms(p, 6)}, **_WIDE_HEADS
        ),
        _multi_head(
            sizes,
            "qk_norm_over_heads",
            parts=lambda p: {"rope": p.RoPE(), **head_norms(p, 6 * heads, 12)},
            **_WIDE_HEADS,
        ),
        _multi_head(sizes, "gated_features", num_kv_heads=2, qkv_bias=True, output_gate="features"),
        _multi_head(
            sizes,
            "gated_heads",
            parts=lambda p: {"rope": p.RoPE()},
            head_dim=6,
            output_gate="heads",
        ),
        _multi_head(
            sizes, "partial_rope", parts=lambda p: {"rope": p.RoPE(500.0, width=4)}, **_WIDE_HEADS
        ),
        _multi_head(
            sizes,
            "differential",
            parts=lambda p: {"rope": p.RoPE()},
            **_DIFFERENTIAL,
            lambda_init=0.4,
        ),
        _multi_head(
            sizes,
            "differential_gqa",
            **_DIFFERENTIAL,
            **_WIDE_HEADS,
            window=3,
            capacity=3,
            qkv_bias=True,
        ),
        _multi_head(sizes, "window", num_kv_heads=2, window=2, capacity=2),
        _multi_head(
            sizes,
            "ragged",
            num_kv_heads=2,
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            capacity=8,
        ),
        _delta(sizes, "gated_delta_net", num_key_heads=2, value_dim=5),
        _delta(
            sizes,
            "gated_delta_net_packed",
            call=lambda p: {"mask": p.Mask.segments(fitted(sizes, DOCUMENTS))},
            kernel_size=3,
        ),
        _delta(
            sizes,
            "gated_delta_net_ragged",
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            num_key_heads=1,
        ),
        _delta(sizes, "kimi_delta_attention", "KimiDeltaAttention", value_dim=5),
        _delta(
            sizes,
            "kimi_delta_attention_packed",
            "KimiDeltaAttention",
            call=lambda p: {"mask": p.Mask.segments(fitted(sizes, DOCUMENTS)) & p.Mask.causal()},
            num_heads=2,
        ),
        _latent(sizes, "deepseek", q_lora_rank=7),
        _latent(sizes, "absorbed", form="absorbed", scores={"soft_cap": 1.5, "sinks": True}),
        _latent(
            sizes,
            "plain",
            form="plain",
            rope={},
            qkv_bias=True,
            out_bias=True,
            scores={"scale": 0.4},
        ),
        _latent(sizes, "window", window=2, capacity=3),
        _latent(
            sizes,
            "ragged",
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            capacity=8,
        ),
    )
