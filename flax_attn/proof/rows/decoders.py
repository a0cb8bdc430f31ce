"""The rows of models that continue text."""

from collections.abc import Callable
from functools import partial
from math import lcm
from typing import Any

from flax_attn.proof.variant import TableSizes, Variant

# d_model, d_hidden, heads, layers and key/value heads.
_Widths = tuple[int, int, int, int, int]


def _model(
    sizes: TableSizes, module: str, config: Callable[[Any], Any], dropout: bool = False
) -> Variant:
    def make(p: Any) -> Any:
        return getattr(p, module)(config(p))

    return Variant(
        module.lower(),
        module,
        make,
        ((sizes.b, sizes.t),),
        vocab_size=_lengths(sizes)["vocab_size"],
        chunks=sizes.chunks,
        dropout=dropout,
    )


def _widths(sizes: TableSizes) -> _Widths:
    times = sizes.times(4)
    return 8 * times, 12 * sizes.times(12), 4 * times, 2, 2


def _lengths(sizes: TableSizes) -> dict[str, Any]:
    return {"context_length": 9, "vocab_size": 11 * sizes.times(11)}


def _experts(sizes: TableSizes) -> dict[str, Any]:
    return {"num_experts": max(4, sizes.experts), "top_k": 2, "d_expert": 5 * sizes.times(5)}


def _deepseek(sizes: TableSizes, p: Any) -> Any:
    *widths, layers, _ = _widths(sizes)
    return p.DeepseekV3Config(
        *widths,
        layers,
        **_lengths(sizes),
        **{**_experts(sizes), "num_experts": 8, "top_k": 3},
        rope=p.RoPE(
            500.0, interleaved=True, scaling=p.YaRNScaling(4.0, 40, mscale=0.7, mscale_all_dim=0.4)
        ),
        kv_lora_rank=5,
        q_lora_rank=7,
        qk_nope_head_dim=3,
        qk_rope_head_dim=4,
        v_head_dim=2,
        groups=4,
        top_groups=2,
        num_dense_layers=1,
    )


def _next(sizes: TableSizes, p: Any) -> Any:
    times = sizes.times(2)
    linear = {
        "linear_heads": 4 * times,
        "linear_key_heads": 2 * times,
        "linear_head_dim": 3,
        "linear_value_dim": 5,
    }
    return p.Qwen3NextConfig(
        *_widths(sizes),
        6,
        **_lengths(sizes),
        **_experts(sizes),
        **linear,
        full_layers=(1,),
        d_shared=9 * sizes.times(9),
    )


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    model = partial(_model, sizes)
    widths, lengths, experts = _widths(sizes), _lengths(sizes), _experts(sizes)
    turns: dict[str, Any] = {**lengths, "head_dim": 6, "window": 3, "full_layers": (1,)}
    # GPT-2 has as many key/value heads as heads.
    gpt2 = lcm(6, sizes.heads), sizes.heads, 2
    return (
        # Plain decoders, and those with a window in some layers.
        model("GPT2", lambda p: p.GPT2Config(*gpt2, **lengths, dropout=0.3), dropout=True),
        model("Llama", lambda p: p.LlamaConfig(*widths, **lengths)),
        model("Qwen2", lambda p: p.Qwen2Config(*widths, **lengths, window=3, full_layers=(0,))),
        model("Qwen3", lambda p: p.Qwen3Config(*widths, **lengths, head_dim=6)),
        model(
            "Phi3",
            lambda p: p.Phi3Config(*widths, **lengths, head_dim=6, rope=p.RoPE(50.0, width=4)),
        ),
        # Decoders with other norms, caps and scales.
        model("Gemma", lambda p: p.GemmaConfig(*widths, **lengths, head_dim=6)),
        model(
            "Gemma2",
            lambda p: p.Gemma2Config(
                *widths, **turns, query_pre_attn_scalar=5, score_cap=1.5, logit_cap=2.0
            ),
        ),
        model(
            "Gemma3",
            lambda p: p.Gemma3Config(
                *widths, **turns, query_pre_attn_scalar=5, local_rope=p.RoPE(30.0)
            ),
        ),
        model("Olmo2", lambda p: p.Olmo2Config(*widths, **lengths, head_dim=6)),
        model(
            "DiffLlama", lambda p: p.DiffLlamaConfig(*widths[:4], widths[2], **lengths, head_dim=6)
        ),
        model("SmolLM3", lambda p: p.SmolLM3Config(*widths, **turns, unrotated_layers=(0,))),
        # Mixtures of experts, recurrent layers and latent attention.
        model(
            "Mixtral",
            lambda p: p.MixtralConfig(*widths, **lengths, num_experts=experts["num_experts"]),
        ),
        model(
            "Qwen3Moe", lambda p: p.Qwen3MoeConfig(*widths, **lengths, **experts, dense_layers=(0,))
        ),
        model("Qwen3Next", partial(_next, sizes)),
        model(
            "GptOss",
            lambda p: p.GptOssConfig(
                *widths,
                **lengths,
                num_experts=experts["num_experts"],
                top_k=2,
                window=3,
                full_layers=(1,),
            ),
        ),
        model("DeepseekV3", partial(_deepseek, sizes)),
    )
