"""The formula itself, with all scores in memory: the reference for every backend.

    weights = dropout(softmax(mask(score(soft_cap(scale * query @ key^T + bias))), sinks))
    output  = weights @ value

References:
    Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762);
    Ainslie et al. 2023, grouped queries (arXiv:2305.13245);
    Gemma Team 2024, soft-capped logits (arXiv:2408.00118);
    Xiao et al. 2023, attention sinks (arXiv:2309.17453).
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from torch_ref.functional.dropout import KeyedDropout, drop, keep_grid
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.masks import Mask
from torch_ref.functional.nonfinite import finite_tokens, sees_nonfinite, zero_nonfinite
from torch_ref.functional.score_function import ScoreFunction
from torch_ref.functional.shapes import Bias, Key, Query, Value, Visible, Weights
from torch_ref.functional.tags import checkpoint_name


def reference_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Bias | None,
    mask: Mask,
    *,
    scale: float | Float[Tensor, ""],
    soft_cap: float | None,
    score: ScoreFunction | None = None,
    sinks: Float[Tensor, " n"] | None,
    dropout: KeyedDropout | None,
) -> tuple[Float[Tensor, "b t n v"], Weights]:
    """Return the output and the weights that were applied to the values.

    All arithmetic is in the dtype of the inputs, but at least float32. A row that may see nothing
    gives zeros with zero gradient. A number in query, key or value that is not finite reaches the
    rows that may see it, as NaN, and only these.

    Shapes:
        query `(b, t, n, h)`, key `(b, s, k, h)`, value `(b, s, k, v)` with k dividing n.
        Returns `(b, t, n, v)` and `(b, n, t, s)`, in the dtype of the query.
    """
    low = query.dtype
    dtype = accumulation_dtype(low)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    query_ok = finite_tokens(query)
    key_ok = finite_tokens(key) & finite_tokens(value)
    # 0 * NaN is NaN: no weight would keep out what is not finite.
    query, key, value = (zero_nonfinite(x.to(dtype)) for x in (query, key, value))
    visible, bias = hide(mask.materialise(*shape, device=query.device), bias)

    query = rearrange(query, "b t (k g) h -> b t k g h", k=key.shape[2])
    scores = torch.einsum("b t k g h, b s k h -> b k g t s", query, key)
    scores = rearrange(scores, "b k g t s -> b (k g) t s") * scale
    scores = checkpoint_name(scores, "scores")
    scores = capped_scores(scores, bias, soft_cap)
    if score is not None:
        # Told of a score of 0 for what is hidden, which may have overflowed.
        scores = score.apply(torch.where(visible, scores, 0))
    # Added to the scores, so that hidden keys keep a weight and a gradient of zero beside it.
    nan_rows = sees_nonfinite(visible, query_ok, key_ok)
    scores = scores + torch.where(nan_rows, torch.nan, 0).to(dtype)
    weights = masked_softmax(scores, visible, sinks)
    if dropout is not None:
        keep = keep_grid(dropout, shape, weights.device)
        dropped = drop(weights, keep, dropout.rate)
        # 0 * NaN is NaN: a row that is NaN stays so where all of its weights are dropped.
        weights = dropped + 0 * weights
    weights = checkpoint_name(weights, "weights")

    grouped = rearrange(weights, "b (k g) t s -> b k g t s", k=value.shape[2])
    output = torch.einsum("b k g t s, b s k v -> b t k g v", grouped, value)
    output = rearrange(output, "b t k g v -> b t (k g) v")
    return output.to(low), weights.to(low)


def capped_scores(scores: Weights, bias: Bias | None, soft_cap: float | None) -> Weights:
    """Return `soft_cap * tanh((scores + bias) / soft_cap)`, each step where it is given.

    Example:
        >>> capped_scores(torch.tensor([[[[50.0, -50.0]]]]), None, soft_cap=2.0)
        tensor([[[[ 2., -2.]]]])
    """
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return scores


def masked_softmax(
    scores: Weights, visible: Visible, sinks: Float[Tensor, " n"] | None = None
) -> Weights:
    """Return the softmax over what is visible; rows that see nothing are zeros.

        exp(x_j) / (exp(sink) + sum_j exp(x_j))    over the visible j
    Example:
        >>> visible = torch.tensor([[[[True, True], [False, False]]]])
        >>> masked_softmax(torch.zeros((1, 1, 2, 2)), visible)[0, 0]
        tensor([[0.5000, 0.5000],
                [0.0000, 0.0000]])
    """
    masked = torch.where(visible, scores, -torch.inf)
    masked = checkpoint_name(masked, "masked")
    # Read back, so that a value substituted for "masked" decides what is hidden.
    visible = masked != -torch.inf
    top = masked.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[None, :, None, None]
        top = torch.maximum(top, sinks)
    # The largest of a row that sees nothing is -inf, and -inf - -inf is NaN.
    top = torch.where(torch.isfinite(top), top, 0)
    # It cancels out, and so does its gradient.
    top = top.detach()
    exps = torch.exp(masked - top)
    total = exps.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    # The sum of a row that sees nothing.
    total = torch.where(total == 0, 1, total)
    # Zero where hidden and not by underflow alone: the gradient there may be infinite, and 0 * inf
    # is NaN.
    return torch.where(visible, exps / total, 0)


def hide(visible: Visible, bias: Bias | None) -> tuple[Visible, Tensor | None]:
    """Return what is visible beside a bias of -inf, and the bias without it.

    It hides like a mask: kept in the sum it would turn gradients, and empty rows, into NaN.
    """
    if bias is None:
        return visible, None
    # Beside NaN it is visible: NaN reaches the rows that see it.
    visible = visible & (bias != -torch.inf)
    return visible, torch.where(visible, bias, 0)
