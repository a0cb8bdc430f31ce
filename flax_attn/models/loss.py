"""The loss of a language model: the mean cross entropy of the next tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from attn_spec.generation_checks import check_language_model, check_token_ids
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.integers import clipped
from flax_attn.functional.masks import Mask
from flax_attn.functional.padding import real_tokens
from flax_attn.functional.positions import segment_positions
from flax_attn.functional.shapes import ArrayLike
from flax_attn.models.cross_entropy import cross_entropy
from flax_attn.models.language_model import LanguageModel
from flax_attn.sharding.zigzag_inputs import arranged


def next_token_loss(
    model: LanguageModel,
    tokens: Integer[Array, "*b t"],
    *,
    lengths: ArrayLike | int | None = None,
    segments: ArrayLike | None = None,
    dropout_key: Array | None = None,
) -> Float[Array, ""]:
    """Return the mean cross entropy of each next token, given those before it.

        mean over i of -log softmax(logits_i)[token_{i + 1}]

    The logits of 512 tokens at a time are computed, and their gradients with them, so that no array
    of the size of all tokens times the vocabulary is stored. Sums are taken in at least float32.

    Under `flax_attn.sharding.context_parallel(order="zigzag")` tokens, positions and targets are
    put in zigzag order here, once for all layers: the tokens that are given are in their own
    order.

    Args:
        model: the language model; in train mode with dropout, which `model.eval()` switches off.
        tokens: token ids `(b, t)` or `(t,)`, integers of any dtype. A real token outside the
            vocabulary makes the loss NaN.
        lengths: number of real tokens of each row, `(b,)`; the rest is padding and does not count,
            whatever its ids. None is all.
        segments: ids of packed documents, `(b, t)` or `(t,)`, a run of equal ids each. A token sees
            its own document alone, positions start again in each, and the first token of a document
            is no target. None is one.
        dropout_key: key of the dropout in train mode; None draws keys from the `dropout` streams.

    Shapes:
        Returns one number; 0 where there is no target.

    Raises:
        ValueError: if there are less than two tokens, the segments are not one id a token,
            `lengths` are no integers or, where Python or NumPy know them, lie outside `0 ... t`, or
            where the model does.

    Example:
        >>> from flax_attn.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> tokens = jnp.ones((4, 5), int)
        >>> gradient = nnx.value_and_grad(lambda model: next_token_loss(model, tokens))
        >>> loss, gradients = gradient(model)
        >>> round(float(loss), 1), round(float(jnp.log(11)), 1)
        (2.4, 2.4)
    """
    check_language_model(model, LanguageModel)
    # Before the model runs: a float that is rounded down would be another token.
    check_token_ids("tokens", tokens)
    shape = tuple(tokens.shape)
    # The mean of no token is no number.
    if shape[-1] < 2:
        raise ValueError(
            "the loss is that of the tokens after the first, so there must be two; got shape"
            f" {shape}. Leave out rows of one token"
        )
    tokens = clipped(tokens, model.config.vocab_size)
    options = _packed(segments, shape)
    options |= {"lengths": lengths, "dropout_key": dropout_key}
    hidden = model.hidden(arranged(tokens), **options)
    counted = _targets(tokens, lengths, segments)
    dtype = accumulation_dtype(hidden.dtype)
    # Divided before it is summed, so that the gradient of each row is that of the mean.
    total = jnp.maximum(counted.sum(), 1)
    weights = arranged(counted.astype(dtype) / total.astype(dtype))
    targets = arranged(jnp.roll(tokens, -1, axis=-1))
    if tokens.ndim == 1:
        hidden, targets, weights = hidden[None], targets[None], weights[None]
    return cross_entropy(*_head(model), hidden, targets, weights)


def _packed(segments: ArrayLike | None, tokens: tuple[int, ...]) -> dict:
    if segments is None:
        return {}
    positions = segment_positions(segments)
    of_one_row = tokens[-1:]
    if positions.shape not in (tokens, of_one_row):
        raise ValueError(
            f"segments must have one id a token, shape {tokens} or {of_one_row}; got shape"
            f" {positions.shape}. Pack them as the tokens are"
        )
    return {"mask": Mask.segments(segments), "positions": arranged(positions)}


def _targets(
    tokens: Array, lengths: ArrayLike | int | None, segments: ArrayLike | None
) -> Bool[Array, "*b t"]:
    """Return which tokens are followed by a target."""
    *batch, t = tokens.shape
    # A sequence is a batch of one.
    b = batch[0] if batch else 1
    real = real_tokens(b, t, lengths)
    real = real.reshape(tokens.shape)
    # The last token has no next one.
    counted = jnp.roll(real, -1, axis=-1)
    counted = counted.at[..., -1].set(False)
    if segments is None:
        return counted
    # Nor has that of a document: what follows is another one.
    ids = jnp.broadcast_to(jnp.asarray(segments), tokens.shape)
    following = jnp.roll(ids, -1, axis=-1)
    return counted & (ids == following)


def _head(model: LanguageModel) -> tuple[Callable, Any]:
    """Return the output head as a function of its parameters and input, and the parameters."""
    name = "tok_emb" if model.out_head is None else "out_head"
    graph, head, rest = nnx.split(model, nnx.PathContains(name), ...)
    return lambda head, hidden: nnx.merge(graph, head, rest).logits(hidden), head
