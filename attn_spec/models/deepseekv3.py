"""DeepSeek-V3."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from attn_spec.frequencies import YaRNScaling
from attn_spec.hugging_face.fields import Fields
from attn_spec.models.decoder import DecoderConfig, read_decoder, write_decoder
from attn_spec.rope import RotaryPositions
from attn_spec.scores import Scores

# Widths that have one name here and in transformers.
_SAME = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


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
    rope: RotaryPositions = field(default_factory=lambda: RotaryPositions(interleaved=True))
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

    @property
    def latent_attention(self) -> dict[str, Any]:
        """The arguments of the `MultiHeadLatentAttention` of a layer, but its window and RoPE."""
        widths = {name: getattr(self, name) for name in (*_SAME, "q_lora_rank")}
        return {
            "d_in": self.d_model,
            "d_out": self.d_model,
            "context_length": self.context_length,
            "dropout": self.dropout,
            "num_heads": self.num_heads,
            "qkv_bias": self.attention_bias,
            "out_bias": self.attention_bias,
            "scores": Scores(scale=self.scale),
            **widths,
        }

    @property
    def latent_ranks(self) -> dict[str, int]:
        """The width of each norm of a latent."""
        if self.q_lora_rank is None:
            return {"kv_norm": self.kv_lora_rank}
        return {"q_norm": self.q_lora_rank, "kv_norm": self.kv_lora_rank}

    @property
    def router(self) -> dict[str, Any]:
        """The arguments of the `Router` of a mixture."""
        return {
            "d_model": self.d_model,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "scores": "sigmoid",
            "renormalize": self.renormalize,
            "scale": self.routed_scale,
            "selection_bias": True,
            "groups": self.groups,
            "top_groups": self.top_groups,
        }


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
# Numbers that may be 0: a model without experts, shared ones or dense layers.
_COUNTS = ("num_experts", "num_shared", "num_dense_layers")


def read(fields: Fields, dropout: float | None) -> DeepseekV3Config:
    """Return the config that the fields of a `config.json` describe."""
    fields = fields.under_one_name(num_local_experts="n_routed_experts")
    heads = fields.heads("num_attention_heads")
    fields.only(
        num_key_value_heads=heads, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1
    )
    arguments: dict[str, Any] = read_decoder(fields, dropout)
    rope = replace(
        _with_mscale(fields, arguments["rope"]), interleaved=fields.flag("rope_interleave", True)
    )
    # Latent attention has widths of its own, and a key for each head.
    arguments |= {"rope": rope, "head_dim": None, "num_kv_heads": None}
    for ours, theirs in _FIELDS.items():
        number = fields.count if ours in _COUNTS else fields.integer
        arguments[ours] = number(theirs, getattr(DeepseekV3Config, ours))
    return DeepseekV3Config(
        **arguments,
        q_lora_rank=fields.optional_integer("q_lora_rank", 1536),
        attention_bias=fields.flag("attention_bias", False),
        renormalize=fields.flag("norm_topk_prob", True),
        routed_scale=float(fields.factor("routed_scaling_factor", 2.5)),
    )


def _with_mscale(fields: Fields, rope: RotaryPositions) -> RotaryPositions:
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


def write(config: DeepseekV3Config) -> dict[str, Any]:
    """Return the fields of `config.json` that describe a config."""
    if config.window is not None:
        raise ValueError(
            f"DeepseekV3 has no window in transformers; got {config.window}. Save with convert.save"
        )
    # transformers keeps the width of what is rotated as head_dim, and the order of pairs apart.
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
