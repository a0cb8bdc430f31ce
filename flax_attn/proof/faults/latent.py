"""Faults of latent attention, and of the models that have it or experts."""

import math
from dataclasses import replace

import torch
from einops import rearrange

from flax_attn.proof.faults.fault import Modify, Patch, Wrap, fault
from torch_ref import MultiHeadLatentAttention, RoPE

# The rows that are patched.
DEEPSEEK, MODEL, GPT_OSS = "latent_deepseek", "deepseekv3", "gptoss"


def norm_before_split(att, x, positions):
    """Take the mean square of the latent and the rotated part together."""
    both = att.W_latent(x)
    together = both * torch.rsqrt(both.square().mean(dim=-1, keepdim=True) + att.kv_norm.eps)
    latent = together[..., : att.kv_lora_rank] * att.kv_norm.scale
    rotated = att.rope(both[..., None, att.kv_lora_rank :], positions)
    return torch.cat([latent[..., None, :], rotated], dim=-1)


def key_unrotated(att, x, positions):
    """Cache the shared part of the keys without its rotation."""
    both = att.W_latent(x)
    latent, rotated = att.kv_norm(both[..., : att.kv_lora_rank]), both[..., att.kv_lora_rank :]
    return torch.cat([latent, rotated], dim=-1)[..., None, :]


def rotated_first(att, x, positions):
    """Rotate the first features of queries."""
    joined = att.W_query_up(att.q_norm(att.W_query_down(x)))
    q = rearrange(joined, "... t (n h) -> ... t n h", n=att.num_heads)
    rotated, plain = q[..., : att.qk_rope_head_dim], q[..., att.qk_rope_head_dim :]
    return torch.cat([att.rope(rotated, positions), plain], dim=-1)


def keys_first(both, width):
    """Keys of a width, then values."""
    return both[..., :width], both[..., width:]


def values_first(both, width):
    """Values, then keys of a width."""
    return both[..., -width:], both[..., :-width]


def with_rotated(keys, rotated):
    """Keys of all heads with the rotated part that they share."""
    return torch.cat([keys, rotated.expand(*keys.shape[:-1], -1)], dim=-1)


def split_heads_patch(pattern, parts):
    """Return the patch of latent attention that splits its keys and values otherwise."""

    def keys_and_values(att, latents):
        joined = att.W_key_value(latents[..., 0, : att.kv_lora_rank])
        both = rearrange(joined, pattern, n=att.num_heads)
        k, v = parts(both, att.qk_nope_head_dim)
        return with_rotated(k, latents[..., att.kv_lora_rank :]), v

    return Patch(MultiHeadLatentAttention, "_keys_and_values", keys_and_values)


def scaled_by_latent(queries, att, x, positions):
    """Scale the scores of cached keys by the width of what is cached.

    Positions have rows where there is a cache.
    """
    cached = att.kv_lora_rank + att.qk_rope_head_dim if positions.ndim == 2 else att.head_dim
    return queries(att, x, positions) * (att.head_dim / cached) ** 0.5


def mscale(scores):
    """Return the scores of a model without one of the two factors `mscale`."""
    return replace(scores, scale=scores.scale / (1 + 0.04 * math.log(4)))


# What is cached, how it is split, and what is rotated.
ATTENTION = (
    fault("norm_before_the_split", "The latent is normed together with the rotated part.", DEEPSEEK,
          Patch(MultiHeadLatentAttention, "_latents", norm_before_split)),
    fault("no_norm_of_the_latent", "The latent of keys and values is not normed.", DEEPSEEK,
          Patch("", "kv_norm", None)),
    fault("no_norm_of_queries", "The latent of queries is not normed.", DEEPSEEK,
          Patch("", "q_norm", None)),
    fault("shared_key_unrotated", "The part of the keys that heads share is not rotated.", DEEPSEEK,
          Patch(MultiHeadLatentAttention, "_latents", key_unrotated)),
    fault("first_features_rotated",
          "The first features of queries are rotated, not the last.", DEEPSEEK,
          Patch(MultiHeadLatentAttention, "_queries", rotated_first)),
    fault("halves_for_pairs", "Rotary pairs are (i, i + h / 2), not neighbours.", DEEPSEEK,
          Patch("", "rope", RoPE())),
    fault("scale_of_the_plain_part",
          "The scale counts the features that are not rotated alone.", DEEPSEEK,
          Patch("", "head_dim", 3)),
    fault("values_before_keys", "The joint projection is split into values and keys.", DEEPSEEK,
          split_heads_patch("... s (n h) -> ... s n h", values_first)),
    fault("features_before_heads",
          "The joint projection is split into features of heads in turn.", DEEPSEEK,
          split_heads_patch("... s (h n) -> ... s n h", keys_first)),
    fault("absorbed_scale",
          "With a cache, the scale is that of the width of what is cached.", DEEPSEEK,
          Wrap(MultiHeadLatentAttention, "_queries", scaled_by_latent), check="cache = full"),
)  # fmt: skip

# Scales and sinks that differ from layer to layer.
MODELS = (
    fault("mscale_once", "The scale is multiplied by mscale once, not by its square.", MODEL,
          Modify("trf_blocks.0.att", "scores", mscale)),
    fault("first_layer_scaled_alone", "The softmax of the second layer has no mscale.", MODEL,
          Modify("trf_blocks.1.att", "scores", lambda scores: replace(scores, scale=None))),
    fault("gpt_oss_without_sinks", "The attention sinks of a checkpoint are left out.", GPT_OSS,
          Patch("trf_blocks.0.att", "sinks", None)),
    fault("gpt_oss_windows_swapped",
          "The layers with windows are the full ones, and the reverse.", GPT_OSS,
          Patch("trf_blocks.0.att", "window", None), Patch("trf_blocks.1.att", "window", 3)),
)  # fmt: skip

FAULTS = (*ATTENTION, *MODELS)
