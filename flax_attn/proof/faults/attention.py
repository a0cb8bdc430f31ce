"""Faults of the attention formula: scores, softmax, masks and dropout of the weights."""

from dataclasses import replace

import torch

from flax_attn.proof.faults.fault import Patch, Wrap, fault
from torch_ref import Scores
from torch_ref.functional import reference
from torch_ref.functional.mask_parts import Causal, Dense, Lengths, Prefix, Segments, Window
from torch_ref.functional.masks import Mask

# 4 heads of width 2.
CAUSAL = "multi_head_causal"
CAPPED = "multi_head_soft_cap_sinks"
# Of that variant.
SOFT_CAP = 1.5


def softmax_patch(
    hidden: float = -torch.inf, axis: int = -1, dtype: torch.dtype | None = None
) -> Patch:
    """Return the patch that computes weights with `torch.softmax`.

    Hidden scores get a fixed value.
    """

    def softmax(scores, visible, sinks=None):
        return torch.softmax(torch.where(visible, scores, hidden), axis, dtype).to(scores.dtype)

    return Patch(reference, "masked_softmax", softmax)


def softmax_of_exponentials(scores, visible, sinks=None):
    """The softmax without its largest score subtracted."""
    exps = torch.where(visible, scores.exp(), 0)
    return exps / exps.sum(dim=-1, keepdim=True)


def half_detached(softmax, *arguments):
    """The weights, with half of their gradient."""
    weights = softmax(*arguments)
    return (weights + weights.detach()) / 2


def capped_after_the_mask(softmax, scores, visible, sinks):
    """The softmax of scores that the soft cap raised from -inf to its lower bound."""
    return softmax(torch.where(visible, scores, -SOFT_CAP), torch.ones_like(visible), sinks)


def sinks_in_numerator(softmax, scores, visible, sinks):
    """`(exp(x_j) + exp(sink)) / (exp(sink) + sum_j exp(x_j))` over the visible j."""
    weights = softmax(scores, visible, sinks)
    # The weight of the sink.
    rest = 1 - weights.sum(dim=-1, keepdim=True)
    return torch.where(visible, weights + rest, 0)


# The scale, the softmax, the soft cap and the sinks.
SCORES = (
    fault("scale_of_the_whole_width",
          "Scores are scaled by the width of the model, not of a head.", CAUSAL,
          Patch("", "scores", Scores(scale=8**-0.5))),
    fault("no_scale", "Scores are not scaled.", CAUSAL, Patch("", "scores", Scores(scale=1.0))),
    fault("scaled_twice", "Scores are scaled twice.", CAUSAL,
          Patch("", "scores", Scores(scale=1 / 2))),
    fault("softmax_in_float32", "The softmax is always in float32.", CAUSAL,
          softmax_patch(dtype=torch.float32)),
    fault("softmax_in_bfloat16", "The softmax is in bfloat16.", CAUSAL,
          softmax_patch(dtype=torch.bfloat16)),
    fault("softmax_over_the_queries", "The softmax runs over the queries, not the keys.", CAUSAL,
          softmax_patch(axis=-2)),
    fault("hidden_scores_of_minus_10", "Hidden scores are -10, not -inf.", CAUSAL,
          softmax_patch(hidden=-10.0)),
    fault("hidden_scores_of_minus_10_000", "Hidden scores are -1e4, not -inf.", CAUSAL,
          softmax_patch(hidden=-1e4), check="huge logits"),
    fault("mean_of_the_values_for_an_empty_row",
          "A row that may see nothing gives the mean of the values.", CAUSAL,
          softmax_patch(hidden=torch.finfo(torch.float32).min), check="padded rows"),
    fault("largest_score_not_subtracted",
          "The softmax does not subtract the largest score.", CAUSAL,
          Patch(reference, "masked_softmax", softmax_of_exponentials), check="huge logits"),
    fault("half_of_a_gradient", "Half of the gradient of the weights is detached.", CAUSAL,
          Wrap(reference, "masked_softmax", half_detached), check="gradients"),
    fault("no_soft_cap", "The soft cap is missing.", CAPPED,
          Patch("", "scores", Scores(sinks=True))),
    fault("soft_cap_after_the_mask", "The soft cap comes after the mask, and undoes it.", CAPPED,
          Wrap(reference, "masked_softmax", capped_after_the_mask)),
    fault("soft_cap_before_the_bias", "The soft cap comes before the bias.", CAPPED,
          Wrap(reference, "capped_scores",
               lambda capped, scores, bias, cap: capped(scores, None, cap) + bias)),
    fault("no_sinks", "The sinks are missing in the softmax.", CAPPED, Patch("", "sinks", None)),
    fault("sinks_in_numerator", "The sinks are in the numerator of the softmax too.", CAPPED,
          Wrap(reference, "masked_softmax", sinks_in_numerator)),
)  # fmt: skip


def without_segment_0(allow, part, rows, cols):
    """Hide the tokens of segment 0."""
    return allow(part, rows, cols) & (part.query[rows.reshape(-1)] != 0)[None, None, :, None]


def any_part(mask, rows, cols):
    """The disjunction of the parts of a mask."""
    parts = [
        part.allow(rows[None, None, :, None], cols[None, None, None, :]) for part in mask.parts
    ]
    return torch.stack(torch.broadcast_tensors(*parts)).any(dim=0)


# What a token sees.
MASKS = (
    fault("one_token_ahead_is_seen", "Tokens see one token ahead.", CAUSAL,
          Patch(Causal, "allow", lambda part, rows, cols: cols <= part.position(rows) + 1)),
    fault("oneself_is_not_seen", "Tokens do not see themselves.", CAUSAL,
          Patch(Causal, "allow", lambda part, rows, cols: cols < part.position(rows))),
    fault("no_causal_mask", "The causal mask is missing.", CAUSAL, Patch("", "causal", False)),
    fault("top_left_for_an_offset", "A causal mask ignores its offset.", "multi_head_cross_causal",
          Patch(Causal, "position", lambda part, i, distance=0: i + distance)),
    fault("one_padded_key_is_seen", "One padded key is seen.", "multi_head_padding",
          Wrap(Lengths, "allow",
               lambda allow, part, *index: allow(replace(part, key=part.key + 1), *index))),
    fault("padded_queries_attend",
          "Padded queries attend, and do not give zeros.", "multi_head_padding",
          Wrap(Lengths, "allow",
               lambda allow, part, *index: allow(replace(part, query=None), *index))),
    fault("nan_passes_a_weight_of_zero",
          "NaN in the padding reaches tokens, as 0 * NaN is NaN.", CAUSAL,
          Patch(reference, "zero_nonfinite", lambda x: x), check="non-finite padding"),
    fault("window_one_too_wide",
          "A sliding window has one key too many.", "multi_head_packed_window",
          Wrap(Window, "allow",
               lambda allow, part, *index: allow(replace(part, left=part.left + 1), *index))),
    fault("no_window_is_a_window_of_one", "Without a window each token sees itself alone.", CAUSAL,
          Patch(Causal, "allow", lambda part, rows, cols: cols == part.position(rows))),
    fault("segment_0_is_padding", "Segment 0 is taken for padding.", "multi_head_packed_window",
          Wrap(Segments, "allow", without_segment_0)),
    fault("any_mask_lets_through",
          "Of two masks a key needs to pass one, not both.", "multi_head_packed_window",
          Patch(Mask, "block", any_part)),
    fault("polarity", "True in a boolean mask hides.", "multi_head_prefix_dense",
          Wrap(Dense, "allow", lambda allow, *arguments: ~allow(*arguments))),
    fault("transposed_mask",
          "A mask is indexed by key and query, not by query and key.", "multi_head_prefix_dense",
          Wrap(Dense, "allow", lambda allow, part, *index: allow(Dense(part.array.mT), *index))),
    fault("causal_prefix", "The prefix of a prefix-LM is causal.", "multi_head_prefix_dense",
          Patch(Prefix, "allow", lambda part, rows, cols: cols <= part.position(rows))),
)  # fmt: skip

# Which weights are dropped, and what is left of the others.
DROPOUT = (
    fault("kept_weights_not_rescaled", "Weights that are kept are not rescaled.", CAUSAL,
          Patch(reference, "drop", lambda weights, keep, rate: torch.where(keep, weights, 0)),
          check="dropout"),
    fault("dropout_shared_by_heads", "All heads drop the same weights.", CAUSAL,
          Wrap(reference, "keep_grid", lambda keep_grid, *arguments: keep_grid(*arguments)[:, :1]),
          check="dropout"),
    fault("dropout_shared_by_examples", "All examples of a batch drop the same weights.", CAUSAL,
          Wrap(reference, "keep_grid", lambda keep_grid, *arguments: keep_grid(*arguments)[:1]),
          check="dropout"),
    fault("rate_of_what_is_kept", "The rate is taken for the probability to keep.", CAUSAL,
          Patch("dropout", "rate", 1 - 0.3), check="dropout"),
    fault("no_dropout_of_weights", "The attention weights are not dropped.", CAUSAL,
          Patch("dropout", "rate", 0.0), check="dropout"),
)  # fmt: skip

FAULTS = (*SCORES, *MASKS, *DROPOUT)
