"""One step of training a language model."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from attn_spec.checks import check_type
from attn_spec.generation_checks import check_language_model, check_token_ids
from flax_attn.functional.padding import check_known_lengths
from flax_attn.functional.shapes import ArrayLike
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.loss import next_token_loss


def train_step(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    tokens: Integer[Array | np.ndarray, "*b t"],
    *,
    lengths: ArrayLike | int | None = None,
    segments: ArrayLike | None = None,
    dropout_key: Array | np.ndarray | None = None,
) -> Float[Array, ""]:
    """Update the model by one step of its optimizer, and return the loss before it.

    The arguments are those of `next_token_loss`. Compiled once for each shape, as `compiled_step`.
    The buffers of the old parameters and of the old optimizer state are donated: arrays that were
    taken out of the model before cannot be read any more.

    Raises:
        ValueError: if the optimizer is one of optax outside of an `nnx.Optimizer`, or where
            `next_token_loss` does.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from flax_attn import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.2, momentum=0.9), wrt=nnx.Param)
        >>> tokens = jnp.array([[1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10]])
        >>> losses = [float(train_step(model, optimizer, tokens)) for _ in range(20)]
        >>> round(losses[0], 1), losses[-1] < 1.5
        (2.4, True)
    """
    check_language_model(model, LanguageModel)
    remedy = "optimizer=nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)"
    check_type("optimizer", optimizer, nnx.Optimizer, remedy)
    check_token_ids("tokens", tokens)
    # Here, since inside of jit a length is not known, and could not be refused.
    *batch, t = tokens.shape
    b = batch[0] if batch else 1
    check_known_lengths(lengths, b, t)
    return compiled_step(
        model,
        optimizer,
        cast(Array, _array(tokens)),
        # A list would be traced number by number.
        lengths=None if lengths is None else _array(lengths),
        segments=segments,
        dropout_key=dropout_key,
    )


def _array(x: ArrayLike | int) -> Array | np.ndarray:
    return x if isinstance(x, Array) else np.asarray(x)


@partial(nnx.jit, static_argnames="loss", donate_argnames=("model", "optimizer"))
def compiled_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    tokens: Integer[Array, "*b t"],
    loss: Callable[..., Float[Array, ""]] = next_token_loss,
    **options: Any,
) -> Float[Array, ""]:
    """Return the result of `train_step` for traced lengths; those beyond t count as t.

    Args:
        model: model that is updated.
        optimizer: optimizer of its parameters.
        tokens: token ids.
        loss: function of the model, the tokens and the options that returns the loss.
        options: further arguments of the loss.
    """

    def loss_of(model: nnx.Module) -> Float[Array, ""]:
        return loss(model, tokens, **options)

    # Of the parameters alone: streams and counts are state, and have no gradient.
    value, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return value
