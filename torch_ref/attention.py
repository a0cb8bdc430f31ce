"""One attention call under one contract: checked once, then computed by a backend."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import numpy as np
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_spec.attention_checks import (
    check_argument,
    check_bias,
    check_inputs,
    check_scale,
    check_sinks,
    check_soft_cap,
)
from attn_spec.checks import check_choice, check_type
from attn_spec.other_libraries import ASKS_NOTHING, OF_FUNCTIONS, names_remedies
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import KeyedDropout
from torch_ref.functional.masks import Mask, as_mask
from torch_ref.functional.nonfinite import without_nonfinite_sinks
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.reference import reference_attention
from torch_ref.functional.score_function import ScoreFunction
from torch_ref.functional.shapes import Key, Query, Value
from torch_ref.functional.tags import checkpoint_name

BACKENDS = ("reference",)


def check_backend(backend: str) -> None:
    """Raise unless `backend` is `"auto"` or the name of one."""
    check_choice("backend", backend, ("auto", *BACKENDS))


class AttentionOptions(TypedDict, total=False):
    """The options of `dot_product_attention`, as keyword arguments of what passes them on."""

    scale: float | None
    soft_cap: float | None
    score: Callable | ScoreFunction | None
    sinks: Float[Tensor, " n"] | None
    dropout: KeyedDropout | None
    backend: str


@names_remedies(OF_FUNCTIONS, ASKS_NOTHING)
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Float[Tensor, " n"] | None = None,
    dropout: KeyedDropout | None = None,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot-product attention.

        weights = dropout(softmax(mask(score(soft_cap(scale * query @ key^T + bias))), sinks))
        output  = weights @ value

    Query head `i` reads key/value head `i // (n / k)`: multi-head for k = n, grouped-query for k <
    n, multi-query for k = 1. The softmax and all sums are in float32 for lower dtypes, and in the
    dtype of the inputs otherwise.

    Args:
        query: `(b, t, n, h)` or `(t, n, h)`.
        key: `(b, s, k, h)` or `(s, k, h)`, k dividing n.
        value: `(b, s, k, v)` or `(s, k, v)`.
        bias: numbers added to the scaled scores; broadcasts to `(b, n, t, s)`. `-inf` hides.
        mask: a `Mask`, or a boolean array that broadcasts to `(b, n, t, s)`, True = attend. One of
            known 0 and 1 is taken, too.
        is_causal: whether the mask is also causal, as by `mask & Mask.causal()`.
        scale: factor on the scores, a finite number or an array of shape `()`; None is `1 /
            sqrt(h)`.
        soft_cap: bound of the scores, `soft_cap * tanh(scores / soft_cap)`; a number known before
            tracing.
        score: function that changes the scores, `score(score, b, n, i, j)`, written for scalars, or
            a `ScoreFunction`.
        sinks: `(n,)`, a logit per head that takes part in the softmax and attends to nothing.
        dropout: dropout of the weights; the same key drops the same weights in every backend and in
            `flax_attn`.
        backend: `"auto"` or `"reference"`, which are the same here.

    Returns:
        `(b, t, n, v)`, without `b` for unbatched inputs; `attend` also returns the weights. A row
        that may see nothing gives zeros with zero gradient. A number in query, key or value that is
        not finite only makes the rows NaN that may see it.

    Raises:
        ValueError: if an argument is no tensor or number, if shapes, dtypes, mask or bias do not
            fit one another, if a causal mask has no offset although t != s, or if the backend is
            unknown.
        TypeError: for an argument that it does not have; those of other libraries are named with
            what to pass instead.

    Example:
        >>> import torch
        >>> x = torch.ones((2, 5, 4, 8))
        >>> dot_product_attention(x, x, x, mask=Mask.causal()).shape
        torch.Size([2, 5, 4, 8])

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    # All but `return_weights`, which `attend` alone takes.
    options: AttentionOptions = {
        "scale": scale,
        "soft_cap": soft_cap,
        "score": score,
        "sinks": sinks,
        "dropout": dropout,
        "backend": backend,
    }
    return attend(query, key, value, bias, mask, is_causal=is_causal, **options).output


@names_remedies(OF_FUNCTIONS, ASKS_NOTHING)
def attend(
    query: Query,
    key: Key,
    value: Value,
    bias: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Float[Tensor, " n"] | None = None,
    dropout: KeyedDropout | None = None,
    backend: str = "auto",
    return_weights: bool = False,
) -> Outputs[Cache]:
    """Attention as `dot_product_attention`, with its weights if `return_weights`.

    The other arguments and errors are those of `dot_product_attention`. The weights `(b, n, t, s)`
    are those that were applied to the values, after dropout. The output is the same with and
    without them, bit for bit.

    Example:
        >>> import torch
        >>> x = torch.ones((2, 5, 4, 8))
        >>> attended = attend(x, x, x, mask=Mask.causal(), return_weights=True)
        >>> attended.output.shape, attended.weights.shape
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 5, 5]))
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_argument(name, x, Tensor, f"Pass torch.as_tensor({name})")
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    dtypes = tuple(_dtype(x) for x in (query, key, value))
    # All checks come before anything is computed.
    check_inputs(*shapes, dtypes)
    check_type("is_causal", is_causal, bool, "True or False")
    check_soft_cap(soft_cap)
    check_backend(backend)
    check_type("dropout", dropout, KeyedDropout | None, "dropout=KeyedDropout(0.1, key)")
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    # Named, so that a tool can observe them, or put others in their place.
    query = checkpoint_name(query, "query")
    key = checkpoint_name(key, "key")
    value = checkpoint_name(value, "value")
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if bias is not None:
        check_argument("bias", bias, Tensor, "Pass torch.as_tensor(bias)")
        check_bias(tuple(bias.shape), _dtype(bias), shape)
        # Aligned at the last axis, as arrays broadcast.
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if sinks is not None:
        sinks = _as_sinks(sinks, query.shape[2])
        # A sink that is not finite makes NaN of its own head, and of no other.
        query, sinks = without_nonfinite_sinks(query, sinks)
    mask = as_mask(mask)
    if is_causal:
        mask = mask & Mask.causal()
    if score is not None and not isinstance(score, ScoreFunction):
        score = ScoreFunction(score)
    output, weights = reference_attention(
        query,
        key,
        value,
        bias,
        mask.resolve(*shape),
        scale=query.shape[-1] ** -0.5 if scale is None else _as_scale(scale),
        soft_cap=soft_cap,
        score=score,
        sinks=sinks,
        dropout=dropout,
    )
    output = checkpoint_name(output, "context")
    # One sequence was a batch of one.
    if unbatched:
        output, weights = output[0], weights[0]
    # Computed in any case, so that the output does not depend on who asks for them.
    return Outputs(output, weights if return_weights else None)


def single_head_attention(
    query: Float[Tensor, "*b t h"],
    key: Float[Tensor, "*b s h"],
    value: Float[Tensor, "*b s v"],
    *,
    mask: Mask | Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """`dot_product_attention` of one head, without a head axis.

    Shapes:
        query `(b, t, h)`, key `(b, s, h)`, value `(b, s, v)`, or all without b; mask `(b, t, s)` or
        broadcasting to it.
        Returns `(b, t, v)`.

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> single_head_attention(x, x, x, scale=1.0)
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """
    return attend_one_head(query, key, value, mask=mask, **options).output


def attend_one_head(
    query: Float[Tensor, "*b t h"],
    key: Float[Tensor, "*b s h"],
    value: Float[Tensor, "*b s v"],
    *,
    mask: Mask | Tensor | None = None,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Outputs[Cache]:
    """`attend` of one head, without a head axis; the weights are `(b, t, s)`.

    Example:
        >>> import torch
        >>> x = torch.ones((2, 5, 8))
        >>> attend_one_head(x, x, x, return_weights=True).weights.shape
        torch.Size([2, 5, 5])
    """
    query, key, value = (rearrange(x, "... t h -> ... t 1 h") for x in (query, key, value))
    mask = as_mask(mask, heads=False)
    found = attend(query, key, value, mask=mask, return_weights=return_weights, **options)
    output, weights = rearrange(found.output, "... t 1 v -> ... t v"), found.weights
    if weights is not None:
        weights = rearrange(weights, "... 1 t s -> ... t s")
    return Outputs(output, weights)


def _as_scale(scale: Any) -> float | Tensor:
    scale = _number(scale)
    is_array = isinstance(scale, Tensor | np.ndarray)
    shape = tuple(scale.shape) if is_array else None
    dtype = _dtype(scale) if is_array else ""
    check_scale(scale, shape, dtype)
    # A tensor of one number may be learned: to read it would cut off its gradient.
    return scale if isinstance(scale, Tensor) else float(scale)


def _number(scale: Any) -> Any:
    # An array of NumPy that holds one number stands for that number.
    is_number = isinstance(scale, np.ndarray) and not scale.ndim
    return scale.item() if is_number else scale


def _as_sinks(sinks: Tensor, heads: int) -> Tensor:
    check_argument("sinks", sinks, Tensor, "Pass torch.as_tensor(sinks)")
    check_sinks(heads, tuple(sinks.shape), _dtype(sinks))
    return sinks


def _dtype(x: Tensor | np.ndarray) -> str:
    return str(x.dtype).removeprefix("torch.")
