"""The rows of real sizes: 2,048 tokens and more, widths of models, a vocabulary of 50,257.

A sum over tokens in a low precision shows here: of a few tokens it is as exact as any.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from flax_attn.proof.variant import Variant

_TOKENS = (4, 512)
_WIDTH = 512
_VOCAB = 50257
_CHECKS = ("forward", "gradients", "float32", "bfloat16")
# Of layers without wide products: these take PyTorch ten to twenty times as long in float16.
_WITH_FLOAT16 = (*_CHECKS, "float16")
_Parts = Callable[[Any], Mapping[str, Any]]


def _none(p: Any) -> Mapping[str, Any]:
    return {}


def _variant(
    name: str,
    module: str,
    make: Callable[[Any], Any],
    *inputs: tuple[int, ...],
    vocab_size: int | None = None,
    function: Callable[[Any], Callable] | None = None,
    checks: tuple[str, ...] = _CHECKS,
) -> Variant:
    return Variant(
        f"real_{name}",
        module,
        make,
        inputs,
        vocab_size=vocab_size,
        function=function or _called,
        checks=checks,
    )


def _called(package: Any) -> Callable:
    """Return the call of a module itself, which computes no weights beside."""
    return lambda module, *inputs, **options: module(*inputs, **options)


def _row(
    name: str,
    module: str,
    *arguments: Any,
    tokens: tuple[int, int] = _TOKENS,
    width: int = _WIDTH,
    parts: _Parts = _none,
    function: Callable[[Any], Callable] | None = None,
    checks: tuple[str, ...] = _CHECKS,
    **options: Any,
) -> Variant:
    """Return the row of a module of one input; `parts` are arguments built from the package."""

    def make(p: Any) -> Any:
        return getattr(p, module)(*arguments, **options, **parts(p))

    return _variant(name, module, make, (*tokens, width), function=function, checks=checks)


def _embedding(name: str, size: int, width: int) -> Variant:
    def make(p: Any) -> Any:
        return p.Embedding(size, width)

    return _variant(
        f"embedding_{name}", "Embedding", make, _TOKENS, vocab_size=size, checks=_WITH_FLOAT16
    )


def _attention(name: str, parts: _Parts = _none, **options: Any) -> Variant:
    sizes = _WIDTH, _WIDTH, _TOKENS[1], 0.0, 8
    return _row(f"multi_head_{name}", "MultiHeadAttention", *sizes, parts=parts, **options)


def _scores(p: Any) -> Mapping[str, Any]:
    return {"scores": p.Scores(soft_cap=15.0, sinks=True), "rope": p.RoPE()}


def _latent(p: Any) -> Mapping[str, Any]:
    return {"rope": p.RoPE(interleaved=True), "kv_norm": p.RMSNorm(96)}


def _mixture(form: str) -> Variant:
    # In PyTorch every token has a copy of the matrices of its experts.
    def make(p: Any) -> Any:
        experts = p.Experts(8, 64, 96, p.ClampedSwiGLU(7.0), bias=True, form=form)
        return p.MixtureOfExperts(p.Router(64, 8, 2, bias=True), experts)

    return _variant(f"moe_{form}", "MixtureOfExperts", make, (*_TOKENS, 64))


def _balance(package: Any) -> Callable:
    def loss(router: Any, x: Any) -> Any:
        return package.load_balancing_loss([router(x)])

    return loss


def _next_token_loss(package: Any) -> Callable:
    return import_module(f"{package.__name__}.models.loss").next_token_loss


def _model(
    name: str,
    module: str,
    config: Callable[[Any], Any],
    *inputs: tuple[int, ...],
    **options: Any,
) -> Variant:
    def make(p: Any) -> Any:
        return getattr(p, module)(config(p))

    return _variant(name, module, make, *inputs, **options)


def _block(p: Any) -> Any:
    attention = p.MultiHeadAttention(768, 768, 1024, 0.0, 12, True)
    return p.TransformerBlock(attention, p.FeedForward(768), p.LayerNorm(768), p.LayerNorm(768))


def rows() -> tuple[Variant, ...]:
    """Return the rows."""
    images: dict[str, Any] = {"image_size": (96, 168), "patch_size": (6, 6), "channels": 3}
    half: dict[str, Any] = {"checks": _WITH_FLOAT16}
    text: dict[str, Any] = {"context_length": _TOKENS[1]}
    return (
        # Layers that add or multiply a parameter to every token.
        _row("linear", "Linear", _WIDTH, 384, **half),
        _row("feed_forward", "FeedForward", _WIDTH),
        _row("swiglu", "GatedFeedForward", _WIDTH, 1376, bias=True),
        _row("layer_norm", "LayerNorm", _WIDTH, **half),
        _row("rms_norm", "RMSNorm", _WIDTH, **half),
        _row("layer_scale", "LayerScale", _WIDTH, **half),
        _embedding("vocabulary", _VOCAB, 96),
        _embedding("repeated", 5, _WIDTH),
        # Attention.
        _attention("causal", qkv_bias=True),
        _attention("sinks", _scores, num_kv_heads=2, window=128),
        _row(
            "differential",
            "DifferentialAttention",
            _WIDTH,
            _WIDTH,
            _TOKENS[1],
            0.0,
            8,
            qkv_bias=True,
        ),
        _row(
            "latent",
            "MultiHeadLatentAttention",
            *(_WIDTH, _WIDTH, _TOKENS[1], 0.0, 8),
            parts=_latent,
            kv_lora_rank=96,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=64,
        ),
        # States of 4,096 steps.
        _row("gated_delta_net", "GatedDeltaNet", 96, 128, 4, 32, tokens=(1, 4096), width=96),
        _row("kimi", "KimiDeltaAttention", 96, 128, 4, 32, tokens=(1, 4096), width=96),
        # Experts, and what balances their load.
        _mixture("sorted"),
        _mixture("dense"),
        _row("load_balancing", "Router", _WIDTH, 16, 2, function=_balance, **half),
        # Blocks and models.
        _variant("block_gpt2", "TransformerBlock", _block, (2, 1024, 768)),
        _model(
            "next_token_loss",
            "GPT2",
            lambda p: p.GPT2Config(64, 2, 1, vocab_size=_VOCAB, **text),
            _TOKENS,
            vocab_size=_VOCAB,
            function=_next_token_loss,
        ),
        _model(
            "gemma2",
            "Gemma2",
            lambda p: p.Gemma2Config(
                *(256, 512, 4, 2, 2), **text, vocab_size=512, score_cap=50.0, logit_cap=30.0
            ),
            _TOKENS,
            vocab_size=512,
        ),
        _model(
            "bert",
            "BertMaskedLM",
            lambda p: p.BertConfig(256, 4, 2, vocab_size=512, **text),
            _TOKENS,
            vocab_size=512,
        ),
        _model(
            "t5",
            "T5",
            lambda p: p.T5Config(256, 512, 4, 64, 1, 1, vocab_size=512),
            _TOKENS,
            _TOKENS,
            vocab_size=512,
        ),
        _model("vit", "ViT", lambda p: p.ViTConfig(256, 4, 2, **images), (5, 3, 96, 168)),
    )
