"""The rows of blocks and of their other parts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flax_attn.proof.rows.row import OPEN, divided, head_norms, layer, rms_norm
from flax_attn.proof.variant import TableSizes, Variant

_LLAMA: dict[str, Any] = {"out_bias": False, "num_kv_heads": 1, "head_dim": 4, "rope": True}


def _block(
    sizes: TableSizes,
    name: str,
    ff: Callable[[Any], Any],
    norm: Callable[[Any], Any] | None,
    *,
    post_norm: Callable[[Any], Any] | None = None,
    norm_first: bool = True,
    capacity: int | None = None,
    rope: bool = False,
    parts: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    **attention: Any,
) -> Variant:
    arguments = {
        "d_in": 6,
        "d_out": 6,
        "context_length": 9,
        "dropout": 0.3,
        "num_heads": 2,
        **attention,
    }
    arguments = divided(sizes, arguments)

    def make(p: Any) -> Any:
        att = p.MultiHeadAttention(**arguments, **parts(p), rope=p.RoPE() if rope else None)
        norms = [None if norm is None else norm(p) for _ in range(2)]
        after = {f"post_norm{i}": post_norm(p) for i in (1, 2)} if post_norm else {}
        return p.TransformerBlock(
            att, ff(p), *norms, norm_first=norm_first, drop_shortcut=p.Dropout(0.3), **after
        )

    chunks = sizes.chunks if arguments.get("causal", True) else ()
    inputs = ((sizes.b, sizes.t, 6),)
    return Variant(
        f"block_{name}",
        "TransformerBlock",
        make,
        inputs,
        chunks=chunks,
        capacity=capacity,
        dropout=True,
    )


def _mixture(
    sizes: TableSizes,
    name: str,
    router: Mapping[str, Any],
    activation: Callable[[Any], Any] = lambda p: "silu",
    shared: bool = False,
    gate: bool = False,
    **experts: Any,
) -> Variant:
    """Return a row of a mixture of 8 experts.

    `router` and `experts` are arguments of these parts.
    """

    def make(p: Any) -> Any:
        chosen = p.Router(4, 8, 3, **router)
        routed = p.Experts(8, 4, 6 * sizes.times(6), activation(p), **experts)
        own = p.GatedFeedForward(4, 10 * sizes.times(10)) if shared else None
        return p.MixtureOfExperts(chosen, routed, own, p.Linear(4, 1, False) if gate else None)

    return Variant(f"moe_{name}", "MixtureOfExperts", make, ((sizes.b, sizes.t, 4),))


def _layer_norm(p: Any) -> Any:
    return p.LayerNorm(6)


def _swiglu(sizes: TableSizes) -> Callable[[Any], Any]:
    return lambda p: p.GatedFeedForward(6, 10 * sizes.times(10))


def _feed_forward(sizes: TableSizes, activation: str) -> Callable[[Any], Any]:
    return lambda p: p.FeedForward(6, 10 * sizes.times(10), activation)


def _mixtral(sizes: TableSizes) -> Callable[[Any], Any]:
    experts = max(4, sizes.experts)
    return lambda p: p.MixtureOfExperts(
        p.Router(6, experts, 2), p.Experts(experts, 6, 5 * sizes.times(5))
    )


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    one_input = partial(layer, sizes)
    block = partial(_block, sizes)
    mixture = partial(_mixture, sizes)
    t = sizes.t
    hidden = words = 7 * sizes.times(7)
    return (
        # Blocks in the order of norms of GPT-2, BERT and Gemma 2.
        block("gpt2", _feed_forward(sizes, "gelu_tanh"), _layer_norm, qkv_bias=True),
        block("llama_norms", _feed_forward(sizes, "gelu_exact"), rms_norm, num_kv_heads=1),
        block(
            "bert",
            _feed_forward(sizes, "gelu_exact"),
            lambda p: p.LayerNorm(6, 1e-3),
            norm_first=False,
            **OPEN,
        ),
        block("post_rms", _feed_forward(sizes, "gelu_tanh"), rms_norm, norm_first=False),
        block("gemma2", _feed_forward(sizes, "gelu_tanh"), rms_norm, post_norm=rms_norm),
        block("olmo2", _swiglu(sizes), None, post_norm=rms_norm, out_bias=False),
        # Blocks of Llama and of the families that follow it.
        block("llama", _swiglu(sizes), rms_norm, **_LLAMA),
        block("qwen2", _swiglu(sizes), rms_norm, **_LLAMA, qkv_bias=True),
        block(
            "qwen_window",
            _swiglu(sizes),
            rms_norm,
            parts=lambda p: head_norms(p, 4, eps=1e-6),
            **_LLAMA,
            window=2,
            capacity=3,
        ),
        # Norms.
        one_input("layer_norm", "LayerNorm", d_model=4, eps=1e-3),
        one_input("rms_norm", "RMSNorm", d_model=4, eps=1e-3),
        one_input("rms_norm_zero_centred", "RMSNorm", d_model=4, eps=1e-3, zero_centred=True),
        # Feed-forward layers.
        one_input("feed_forward_tanh", "FeedForward", d_model=4, d_hidden=hidden),
        one_input("feed_forward_exact", "FeedForward", d_model=4, activation="gelu_exact"),
        one_input("swiglu", "GatedFeedForward", d_model=4, d_hidden=hidden),
        one_input("geglu", "GatedFeedForward", d_model=4, activation="gelu_tanh", bias=True),
        # Mixtures of experts.
        mixture("mixtral", {}),
        mixture("dense", {}, form="dense"),
        mixture("qwen2", {"renormalize": False}, shared=True, gate=True),
        mixture("gpt_oss", {"bias": True}, lambda p: p.ClampedSwiGLU(0.3), bias=True),
        mixture(
            "deepseek_v3",
            {
                "scores": "sigmoid",
                "scale": 2.5,
                "selection_bias": True,
                "groups": 4,
                "top_groups": 2,
            },
            shared=True,
        ),
        block("mixtral", _mixtral(sizes), rms_norm),
        # Tables of embeddings.
        Variant(
            "embedding",
            "Embedding",
            lambda p: p.Embedding(words, 4),
            ((sizes.b, t),),
            vocab_size=words,
        ),
        # The last two ids are outside the table, and give NaN.
        Variant(
            "embedding_outside",
            "Embedding",
            lambda p: p.Embedding(words, 4),
            ((sizes.b, t),),
            vocab_size=words + 2,
        ),
    )
