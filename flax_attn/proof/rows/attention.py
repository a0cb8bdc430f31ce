"""The rows of attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from flax_attn.proof.rows.row import DOCUMENTS, OPEN, divided, fitted, head_norms, layer, of_rows
from flax_attn.proof.variant import TableSizes, Variant

_HEAD = {"d_in": 4, "d_out": 6, "context_length": 9, "dropout": 0.3}
_DIFFERENTIAL: dict[str, Any] = {"module": "DifferentialAttention"}
_WIDE_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 6}
_CROSS: dict[str, Any] = {**OPEN, "kdim": 5, "vdim": 3}
# With gaps: these are positions, not indices.
_PACKED = np.array([[0, 1, 2, 0, 1], [0, 2, 3, 7, 9], [70, 73, 0, 1, 4]])


def _multi_head(
    sizes: TableSizes,
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


def _seen(b: Any, n: Any, i: Any, j: Any) -> Any:
    """A mask that depends on every index; the first tokens of some rows and heads see nothing."""
    near = i // 3 == j // 3
    scattered = (i + 2 * j + b + 3 * n) % 4 == 0
    seeing = (i + b + n) % 5 > 0
    return (j <= i) & (near | scattered) & seeing


def _rescored(p: Any, heads: int) -> Callable:
    """A function of scores that depends on every index; its table is exact in every dtype."""

    def rescored(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        table = p.alibi(heads, [16], np.arange(33))
        found = table[n, 0, 16 + j - i] - table[(n + b) % heads, 0, 15 - i]
        # Arrays of JAX and tensors of PyTorch are cast by methods of different names.
        cast = found.astype if hasattr(found, "astype") else found.to
        return score * abs(score) + cast(score.dtype)

    return rescored


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    one_input = partial(layer, sizes)
    multi_head = partial(_multi_head, sizes)
    t, heads = sizes.t, 4 * sizes.times(4)
    # A mask that keeps no structure.
    dense = np.random.default_rng(0).random((heads, t, t)) < 0.6
    return (
        # The attentions of one head, and several of them side by side.
        one_input("simplified", "SimplifiedSelfAttention"),
        one_input("self_attention", "SelfAttention", d_in=4, d_out=6),
        one_input("self_attention_d_key", "SelfAttention", d_in=4, d_out=6, qkv_bias=True, d_key=2),
        one_input("causal", "CausalAttention", **_HEAD),
        one_input("causal_d_key", "CausalAttention", **_HEAD, qkv_bias=True, d_key=2),
        one_input(
            "multi_head_wrapper", "MultiHeadAttentionWrapper", **_HEAD, num_heads=2, qkv_bias=True
        ),
        # Projections, and how heads share keys and values.
        multi_head("causal"),
        # What torch's own layer and GPT-2's can represent.
        multi_head("square", 8, d_in=8, qkv_bias=True),
        multi_head("gqa", num_kv_heads=2, qkv_bias=True),
        multi_head("mqa", num_kv_heads=1, out_bias=False),
        multi_head("bidirectional", **OPEN),
        multi_head("cross", 6, 5, 3, **_CROSS, qkv_bias=True),
        multi_head(
            "cross_causal", *(6, 5, 3), call=lambda p: {"mask": p.Mask.causal(offset=2)}, **_CROSS
        ),
        # Masks of the call.
        # The first row of the batch attends to nothing.
        multi_head(
            "padding",
            call=lambda p: {
                "mask": p.Mask.lengths(
                    query=np.array(of_rows(sizes, t, 3, 4)), key=np.array(of_rows(sizes, 0, 3, t))
                )
            },
        ),
        multi_head(
            "packed_window",
            call=lambda p: {
                "mask": p.Mask.segments(np.where(np.arange(t) < 3, 7, 0)) & p.Mask.sliding_window(2)
            },
            causal=False,
            chunks=sizes.chunks,
        ),
        multi_head(
            "prefix_dense",
            call=lambda p: {"mask": p.Mask.prefix(2) & p.Mask.dense(dense)},
            causal=False,
            chunks=sizes.chunks,
        ),
        # Positions: rotations, and biases by distance.
        multi_head(
            "rope", parts=lambda p: {"rope": p.RoPE()}, num_heads=2, num_kv_heads=1, qkv_bias=True
        ),
        multi_head(
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
        # The first row of the batch is short, the others are long.
        multi_head(
            "rope_longrope",
            call=lambda p: {"positions": fitted(sizes, _PACKED)},
            parts=lambda p: {
                "rope": p.RoPE(50.0, scaling=p.LongRoPEScaling(4.0, 5, (1.0, 1.5), (2.0, 8.0)))
            },
            num_heads=2,
            chunks=(),
        ),
        # Of 4 or 8 heads: the slopes are exact in every dtype.
        multi_head(
            "alibi",
            call=lambda p: {"bias": lambda query, key: p.alibi(heads, query, key)},
            parts=lambda p: {"scores": p.Scores(scale=0.8)},
        ),
        # With a table that is exact in every dtype.
        multi_head(
            "t5",
            call=lambda p: {
                "bias": lambda query, key: p.t5_bias(
                    p.alibi(heads, [0], np.arange(8))[:, 0].T, query, key, max_distance=8
                )
            },
            parts=lambda p: {"scores": p.Scores(scale=1.0)},
            **OPEN,
        ),
        # What is done with scores.
        multi_head(
            "soft_cap_sinks",
            call=lambda p: {"bias": lambda query, key: p.alibi(heads, query, key)},
            parts=lambda p: {"scores": p.Scores(soft_cap=1.5, sinks=True)},
            num_kv_heads=2,
        ),
        # Functions of the user as masks and scores.
        multi_head(
            "function_mask",
            call=lambda p: {"mask": p.Mask.where(_seen)},
            causal=False,
            chunks=sizes.chunks,
        ),
        multi_head(
            "function_score",
            parts=lambda p: {
                "scores": p.Scores(soft_cap=1.5, sinks=True, function=_rescored(p, heads))
            },
            num_kv_heads=2,
        ),
        multi_head(
            "function_window",
            call=lambda p: {"mask": p.Mask.where(_seen)},
            parts=lambda p: {"scores": p.Scores(function=_rescored(p, heads))},
            window=3,
            capacity=4,
        ),
        # Norms, gates and differences of heads.
        multi_head(
            "qk_norm", parts=lambda p: {"rope": p.RoPE(), **head_norms(p, 6)}, **_WIDE_HEADS
        ),
        multi_head(
            "qk_norm_over_heads",
            parts=lambda p: {"rope": p.RoPE(), **head_norms(p, 6 * heads, 12)},
            **_WIDE_HEADS,
        ),
        multi_head("gated_features", num_kv_heads=2, qkv_bias=True, output_gate="features"),
        multi_head(
            "gated_heads", parts=lambda p: {"rope": p.RoPE()}, head_dim=6, output_gate="heads"
        ),
        multi_head("partial_rope", parts=lambda p: {"rope": p.RoPE(500.0, width=4)}, **_WIDE_HEADS),
        multi_head(
            "differential", parts=lambda p: {"rope": p.RoPE()}, **_DIFFERENTIAL, lambda_init=0.4
        ),
        multi_head(
            "differential_gqa", **_DIFFERENTIAL, **_WIDE_HEADS, window=3, capacity=3, qkv_bias=True
        ),
        # Caches: ring buffers, and rows of different lengths.
        multi_head("window", num_kv_heads=2, window=2, capacity=2),
        multi_head(
            "ragged",
            num_kv_heads=2,
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            capacity=8,
        ),
    )
