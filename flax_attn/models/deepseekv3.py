"""DeepSeek-V3."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from attn_spec.frequencies import YaRNScaling
from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.positions import RoPE
from flax_attn.functional.scores import Scores
from flax_attn.models.decoder import Decoder, DecoderConfig
from flax_attn.models.hugging_face.decoder import read_decoder, write_decoder
from flax_attn.models.hugging_face.experts import fused, one_by_one
from flax_attn.models.hugging_face.family import Family, linears, norms
from flax_attn.models.hugging_face.fields import Fields
from flax_attn.modules.experts import Experts
from flax_attn.modules.feed_forward import GatedFeedForward
from flax_attn.modules.latent_attention import MultiHeadLatentAttention
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.norm import RMSNorm
from flax_attn.modules.router import Router


@dataclass(frozen=True)
class DeepseekV3Config(DecoderConfig):
    """The sizes of a DeepSeek-V3: those of a `DecoderConfig`, its latent attention and mixtures.

    Args:
        kv_lora_rank: width of the latent of keys and values.
        q_lora_rank: width of the latent of queries; None is no latent.
        qk_nope_head_dim: width of the part of a head that is not rotated.
        qk_rope_head_dim: width of the part of a head that is rotated.
        v_head_dim: width of a value.
        attention_bias: whether the projections down to latents, and that to the output, have a
            bias.
        num_experts: number of experts in each mixture, without the shared ones.
        top_k: number of experts for each token.
        d_expert: width inside an expert; `d_hidden` is that of the layers without a mixture.
        num_shared: width of the shared expert, in multiples of `d_expert`.
        groups: number of groups of experts.
        top_groups: number of groups that a token's experts are chosen from.
        renormalize: whether the weights of a token's experts are divided by their sum.
        routed_scale: factor on the weights of a token's experts.
        num_dense_layers: number of first layers without a mixture.

    Example:
        >>> config = DeepseekV3Config(7168, 18432, num_heads=128, num_layers=61)
        >>> config.num_experts, config.kv_lora_rank
        (256, 512)
    """

    context_length: int = 4096
    vocab_size: int = 129280
    rope: RoPE = field(default_factory=lambda: RoPE(interleaved=True))
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_bias: bool = False
    num_experts: int = 256
    top_k: int = 8
    d_expert: int = 2048
    num_shared: int = 1
    groups: int = 8
    top_groups: int = 4
    renormalize: bool = True
    routed_scale: float = 2.5
    num_dense_layers: int = 3

    @property
    def scale(self) -> float:
        """The factor on the scores.

        It is `1 / sqrt(h)`, times the square of `1 + mscale_all_dim ln(factor) / 10` of YaRN.
        """
        yarn, scale = self.rope.scaling, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if not isinstance(yarn, YaRNScaling):
            return scale
        return scale * (1 + yarn.mscale_all_dim * math.log(yarn.factor) / 10) ** 2


_SAME = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FIELDS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "d_expert": "moe_intermediate_size",
    "num_shared": "n_shared_experts",
    "groups": "n_group",
    "top_groups": "topk_group",
    "num_dense_layers": "first_k_dense_replace",
    **{name: name for name in _SAME},
}
_COUNTS = ("num_experts", "num_shared", "num_dense_layers")


def _read(fields: Fields, dropout: float | None) -> DeepseekV3Config:
    fields = fields.under_one_name(num_local_experts="n_routed_experts")
    heads = fields.heads("num_attention_heads")
    fields.only(
        num_key_value_heads=heads, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1
    )
    arguments: dict[str, Any] = read_decoder(fields, dropout)
    rope = replace(
        _with_mscale(fields, arguments["rope"]), interleaved=fields.flag("rope_interleave", True)
    )
    arguments |= {"rope": rope, "head_dim": None, "num_kv_heads": None}
    for ours, theirs in _FIELDS.items():
        read = fields.count if ours in _COUNTS else fields.integer
        arguments[ours] = read(theirs, getattr(DeepseekV3Config, ours))
    return DeepseekV3Config(
        **arguments,
        q_lora_rank=fields.optional_integer("q_lora_rank", 1536),
        attention_bias=fields.flag("attention_bias", False),
        renormalize=fields.flag("norm_topk_prob", True),
        routed_scale=float(fields.factor("routed_scaling_factor", 2.5)),
    )


def _with_mscale(fields: Fields, rope: RoPE) -> RoPE:
    """Return the positions with the `mscale_all_dim` of the file, used also without `mscale`."""
    given = (
        fields.optional_object("rope_scaling") or fields.optional_object("rope_parameters") or {}
    )
    yarn, mscale = rope.scaling, given.get("mscale_all_dim")
    if not isinstance(yarn, YaRNScaling) or not mscale or yarn.mscale_all_dim:
        return rope
    return replace(
        rope, scaling=replace(yarn, attention_factor=yarn.amplitude(), mscale_all_dim=mscale)
    )


def _write(config: DeepseekV3Config) -> dict[str, Any]:
    if config.window is not None:
        raise ValueError(
            f"DeepseekV3 has no window in transformers; got {config.window}. Save with convert.save"
        )
    plain = replace(
        config, head_dim=config.qk_rope_head_dim, rope=replace(config.rope, interleaved=False)
    )
    written = write_decoder(
        "DeepseekV3",
        plain,
        model_type="deepseek_v3",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        rope_interleave=config.rope.interleaved,
        q_lora_rank=config.q_lora_rank,
        attention_bias=config.attention_bias,
        norm_topk_prob=config.renormalize,
        routed_scaling_factor=config.routed_scale,
    )
    yarn = config.rope.scaling
    if isinstance(yarn, YaRNScaling) and yarn.mscale_all_dim:
        for name in ("rope_scaling", "rope_parameters"):
            written[name]["mscale_all_dim"] = yarn.mscale_all_dim
    return written


def _without_61(layout: Layout) -> Layout:
    """Ignore the layer that predicts more than the next token, as transformers does."""
    return replace(layout, ignored=rf"{layout.ignored}|(.*\.)?layers\.61\..*")


_BLOCK = "trf_blocks.{i}"
_LAYER = "model.layers.{i}"
_OTHERS = (
    *linears(
        {
            f"{_BLOCK}.att.W_query_down": f"{_LAYER}.self_attn.q_a_proj",
            f"{_BLOCK}.att.W_query_up": f"{_LAYER}.self_attn.q_b_proj",
            f"{_BLOCK}.att.W_latent": f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
            f"{_BLOCK}.att.W_key_value": f"{_LAYER}.self_attn.kv_b_proj",
            f"{_BLOCK}.ff.shared.W_gate": f"{_LAYER}.mlp.shared_experts.gate_proj",
            f"{_BLOCK}.ff.shared.W_up": f"{_LAYER}.mlp.shared_experts.up_proj",
            f"{_BLOCK}.ff.shared.W_down": f"{_LAYER}.mlp.shared_experts.down_proj",
        }
    ),
    *norms(
        {
            f"{_BLOCK}.att.q_norm": f"{_LAYER}.self_attn.q_a_layernorm",
            f"{_BLOCK}.att.kv_norm": f"{_LAYER}.self_attn.kv_a_layernorm",
        }
    ),
    Rule((f"{_BLOCK}.ff.router.selection_bias",), f"{_LAYER}.mlp.gate.e_score_correction_bias"),
)


class DeepseekV3(Decoder[DeepseekV3Config]):
    """DeepSeek-V3: latent attention, and mixtures of experts in groups beside a shared one.

    The arguments are those of `LanguageModel`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DeepseekV3Config(
        ...     8, 12, num_heads=4, num_layers=2, context_length=16, vocab_size=11,
        ...     num_experts=8, top_k=2, d_expert=6, kv_lora_rank=5, q_lora_rank=7,
        ...     qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3)
        >>> DeepseekV3(config, rngs=nnx.Rngs(0))(jnp.ones((3, 5), int)).shape
        (3, 5, 11)

    References:
        DeepSeek-AI 2024 (arXiv:2412.19437).
    """

    family = Family(
        {"deepseek_v3": _read},
        _write,
        _without_61(one_by_one(f"{_LAYER}.mlp", others=_OTHERS)),
        (_without_61(fused(f"{_LAYER}.mlp", *_OTHERS)),),
    )

    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> MultiHeadLatentAttention:
        """Return the latent attention; `options` are arguments of `MultiHeadLatentAttention`."""
        config = self.config
        return MultiHeadLatentAttention(
            config.d_model,
            config.d_model,
            config.context_length,
            config.dropout,
            config.num_heads,
            config.attention_bias,
            kv_lora_rank=config.kv_lora_rank,
            q_lora_rank=config.q_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            out_bias=config.attention_bias,
            window=self.window(layer),
            rope=self.rope(layer),
            scores=Scores(scale=config.scale),
            **options,
        )

    def head_norms(self, **numerics: Any) -> dict[str, Any]:
        """Return the norms of the latents; their epsilon is fixed, as in DeepSeek-V3."""
        ranks = {"q_norm": self.config.q_lora_rank, "kv_norm": self.config.kv_lora_rank}
        return {
            name: RMSNorm(rank, 1e-6, **numerics)
            for name, rank in ranks.items()
            if rank is not None
        }

    def feed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer: int, **options: Any
    ) -> GatedFeedForward | MixtureOfExperts:
        """Return the mixture of a layer, or its SwiGLU layer where it has none."""
        config = self.config
        if layer < config.num_dense_layers:
            return super().feed_forward(layer, **options)
        router = Router(
            config.d_model,
            config.num_experts,
            config.top_k,
            "sigmoid",
            renormalize=config.renormalize,
            scale=config.routed_scale,
            selection_bias=True,
            groups=config.groups,
            top_groups=config.top_groups,
            **options,
        )
        experts = Experts(
            config.num_experts, config.d_model, config.d_expert, config.activation, **options
        )
        shared = GatedFeedForward(
            config.d_model, config.num_shared * config.d_expert, config.activation, **options
        )
        return MixtureOfExperts(router, experts, shared)
