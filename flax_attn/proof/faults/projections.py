"""Faults around the attention formula: projections, heads, norms of heads, and positions."""

from dataclasses import replace

import torch
from einops import rearrange
from torch import nn

from flax_attn.proof.faults.fault import (
    NO_HEAD_NORMS,
    Copy,
    Modify,
    Patch,
    Wrap,
    fault,
    patched,
    swapped,
    zeros,
)
from torch_ref import MultiHeadAttention, RMSNorm, RoPE, Scores
from torch_ref.functional import reference, relative
from torch_ref.modules import head_attention, multi_head

# The rows that are patched.
CAUSAL = "multi_head_causal"
SQUARE = "multi_head_square"
GROUPED = "multi_head_gqa"
QWEN2 = "block_qwen2"


def joined_heads_patch(join):
    """Return the patch that joins the heads by another function."""

    def rearranged(original, x, pattern, **axes):
        return join(x) if pattern.endswith("(n h)") else original(x, pattern, **axes)

    return Wrap(head_attention, "rearrange", rearranged)


def split_across_tokens(original, x, pattern, **axes):
    """Split the width into heads by a reshape to `(b, n, t, h)`."""
    if not pattern.endswith("n h"):
        return original(x, pattern, **axes)
    return rearrange(x.reshape(x.shape[0], axes["n"], x.shape[1], -1), "b n t h -> b t n h")


def reversed_heads(parameter):
    """The parameter of a projection to 2 heads, which change places."""
    return nn.Parameter(parameter.data.unflatten(0, (2, -1)).flip(0).flatten(0, 1))


# Biases, kernels, and how heads are split, shared and joined.
PROJECTIONS = (
    fault("no_output_bias", "The bias of the output projection is missing.", CAUSAL,
          Modify("out_proj", "bias", zeros)),
    fault("no_value_bias", "The bias of the values is missing.", SQUARE,
          Modify("W_value", "bias", zeros)),
    fault("no_input_biases",
          "Queries, keys and values have no bias, as in Llama and unlike Qwen2.", QWEN2,
          *(Modify(f"att.{layer}", "bias", zeros) for layer in ("W_query", "W_key", "W_value"))),
    fault("bias_of_the_output",
          "The output has a bias too, as Llama's with attention_bias and unlike Qwen2's.", QWEN2,
          Patch("att.out_proj", "bias", nn.Parameter(torch.linspace(-1, 1, 6)))),
    fault("swapped_biases", "The biases of queries and keys are swapped.", SQUARE,
          *swapped("W_query.bias", "W_key.bias")),
    fault("swapped_projections", "The projections of keys and values are swapped.", SQUARE,
          *swapped("W_key", "W_value")),
    fault("exchanged_query_and_key", "The projections of queries and keys are exchanged.", SQUARE,
          *swapped("W_query", "W_key")),
    fault("tied_projections", "Queries and keys share one projection.", SQUARE,
          Copy("", "W_key", "W_query")),
    fault("transposed_kernel", "A square kernel is transposed.", SQUARE,
          Modify("W_value", "weight", lambda weight: nn.Parameter(weight.data.T.contiguous()))),
    fault("reversed_heads", "The heads are joined in reverse order.", CAUSAL,
          joined_heads_patch(lambda heads: heads.flip(-2).flatten(-2))),
    fault("heads_side_by_side", "The heads are joined feature by feature.", CAUSAL,
          joined_heads_patch(lambda heads: rearrange(heads, "... t n h -> ... t (h n)"))),
    fault("heads_split_across_tokens", "Heads are split by a reshape, without a transpose.", CAUSAL,
          Wrap(multi_head, "rearrange", split_across_tokens)),
    fault("tiled_heads", "Key/value heads are tiled, not repeated.", GROUPED,
          Wrap(reference, "rearrange", lambda rearrange, x, pattern, **axes: rearrange(
              x, pattern.replace("(k g)", "(g k)"), **axes))),
    fault("reversed_key_value_heads", "Key/value heads are in reverse order.", GROUPED,
          *(Modify(layer, name, reversed_heads)
            for layer in ("W_key", "W_value") for name in ("weight", "bias"))),
)  # fmt: skip


def norms_after_rope(project, module, *inputs):
    """Project and rotate without the norms of the heads, then apply them."""
    with patched(module, NO_HEAD_NORMS):
        query, key, value = project(module, *inputs)
    return module.q_norm(query), module.k_norm(key), value


def norm_over_heads(norm, x):
    """`RMSNorm` with the mean taken over all heads."""
    return x * (x.square().mean(dim=(-2, -1), keepdim=True) + norm.eps).rsqrt() * norm.scale


# Norms of queries and keys.
HEAD_NORMS = (
    fault("no_head_norm", "The norm of queries and keys is missing.", "multi_head_qk_norm",
          *NO_HEAD_NORMS),
    fault("swapped_head_norms", "The norms of queries and keys are swapped.", "multi_head_qk_norm",
          *swapped("q_norm", "k_norm")),
    fault("head_norm_after_rope",
          "The norm of queries and keys comes after RoPE.", "multi_head_qk_norm",
          Wrap(MultiHeadAttention, "_project", norms_after_rope)),
    fault("norm_over_all_heads",
          "The norm of queries and keys is over all heads together, not each.",
          "multi_head_qk_norm",
          Patch(RMSNorm, "forward", norm_over_heads)),
    fault("another_head_epsilon",
          "The epsilon of the norm of queries and keys is 1e-6.", "multi_head_qk_norm",
          Patch("q_norm", "eps", 1e-6), Patch("k_norm", "eps", 1e-6)),
    fault("scale_of_another_width",
          "Scores are scaled by d_out / num_heads, not by head_dim.", "multi_head_qk_norm",
          Patch("", "scores", Scores(scale=2**-0.5))),
)  # fmt: skip

# 2 query heads and 1 key/value head of width 4.
ROPE = "multi_head_rope"
YARN = "multi_head_rope_yarn_packed"


def one_too_far(rotate, rope, x, where):
    """Rotate queries that follow cached tokens by one position too many."""
    # Of this row, only queries have two heads.
    queries = x.shape[-2] == 2
    return rotate(rope, x, where + 1 if queries and where.min() > 0 else where)


def float32_angles(cos_sin, rope, width, positions, dtype):
    """The cosines and sines of angles in float32, in the dtype that is asked for."""
    return [part.to(dtype) for part in cos_sin(rope, width, positions, torch.float32)]


# RoPE, ALiBi and the relative positions of T5.
POSITIONS = (
    fault("rope_base", "RoPE has the base 500000, not 10000.", ROPE,
          Patch("", "rope", RoPE(500_000.0))),
    fault("rope_order", "RoPE pairs neighbouring features, not the halves.", ROPE,
          Patch("", "rope", RoPE(interleaved=True))),
    fault("rope_width", "RoPE rotates half of the features, not all.", ROPE,
          Patch("", "rope", RoPE(width=2))),
    fault("rope_sign", "RoPE rotates in the other direction.", ROPE,
          Wrap(RoPE, "__call__", lambda rotate, rope, x, where: rotate(rope, x, -where))),
    fault("rope_past_its_table",
          "All tokens past the end of a table of angles are rotated as its last row.", ROPE,
          Wrap(RoPE, "__call__",
               lambda rotate, rope, x, where: rotate(rope, x, where.clamp(max=2)))),
    fault("rope_in_float32", "The angles of RoPE are always in float32.", ROPE,
          Wrap(RoPE, "_cos_sin", float32_angles)),
    fault("rope_of_queries_alone", "RoPE does not rotate the keys.", ROPE,
          Wrap(RoPE, "__call__",
               lambda rotate, rope, x, where: x if x.shape[-2] == 1 else rotate(rope, x, where))),
    fault("rope_of_values_too", "RoPE rotates the values as well.", ROPE,
          Wrap(head_attention, "attend",
               lambda attend, query, key, value, *arguments, **options: attend(
                   query, key, RoPE()(value), *arguments, **options))),
    fault("ignored_positions", "RoPE ignores the positions of the call.", YARN,
          Wrap(RoPE, "__call__", lambda rotate, rope, x, where: rotate(rope, x))),
    fault("rope_one_step_too_far", "With a cache, RoPE rotates queries one step too far.", ROPE,
          Wrap(RoPE, "__call__", one_too_far), check="cache = full"),
    fault("no_rope_scaling", "The scaling of RoPE is missing.", YARN,
          Modify("", "rope", lambda rope: replace(rope, scaling=None))),
    fault("no_yarn_temperature", "YaRN's factor on what is rotated is missing.", YARN,
          Modify("", "rope",
                 lambda rope: replace(rope, scaling=replace(rope.scaling, attention_factor=1.0)))),
    fault("reversed_alibi_slopes", "ALiBi's slopes are in reverse order.", "multi_head_alibi",
          Wrap(relative, "alibi_slopes", lambda slopes, num_heads: slopes(num_heads)[::-1].copy())),
    fault("alibi_sign", "ALiBi favours distant keys.", "multi_head_alibi",
          Wrap(relative, "alibi_slopes", lambda slopes, num_heads: -slopes(num_heads))),
    fault("scaled_scores_in_t5", "T5's scores are scaled.", "multi_head_t5",
          Patch("", "scores", Scores())),
    fault("t5_direction", "T5's buckets go by query minus key position.", "multi_head_t5",
          Wrap(relative, "t5_buckets",
               lambda buckets, query, key, **options: buckets(-query, -key, **options))),
    fault("t5_max_distance",
          "T5's last bucket begins at 128, not at max_distance.", "multi_head_t5",
          Wrap(relative, "t5_buckets",
               lambda buckets, *where, **options: buckets(
                   *where, **{**options, "max_distance": 128}))),
)  # fmt: skip

FAULTS = (*PROJECTIONS, *HEAD_NORMS, *POSITIONS)
