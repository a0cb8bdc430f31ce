"""Checks of tokens that models are given, and of prompts."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from attn_spec.checks import kind_of, shape_of


def check_ids(dtype: str) -> None:
    """Raise unless ids are integers."""
    if not dtype.startswith(("int", "uint")):
        raise ValueError(f"ids must be integers; got dtype {dtype}. Cast them before the call")


def check_token_ids(name: str, tokens: Any) -> None:
    """Raise unless an array holds the ids of tokens, integers `(t,)` or `(b, t)`."""
    shape = shape_of(name, tokens)
    # torch writes its own name before that of a dtype.
    dtype = str(tokens.dtype).removeprefix("torch.")
    rule = f"{name} must be integers (t,) or (b, t); got dtype {dtype}, shape {shape}"
    if not dtype.startswith(("int", "uint")):
        raise ValueError(f"{rule}. Pass the ids that the tokenizer of the model returns")
    if len(shape) not in (1, 2):
        raise ValueError(f"{rule}. Reshape more batch axes into one")


def check_language_model(model: object, kind: type) -> None:
    """Raise unless a model is one whose loss of the next tokens is known."""
    if not isinstance(model, kind):
        raise ValueError(
            f"next_token_loss and train_step take a LanguageModel; got {kind_of(model)}."
            " Derive your model from LanguageModel, or write its loss and step: Use it in your"
            " model, in the documentation, has both"
        )


def check_no_start(start: object) -> None:
    """Raise unless a model without an encoder is given no tokens to start from."""
    if start is not None:
        raise ValueError(
            f"start is what the decoder of an encoder-decoder begins with; got start={start} for a"
            " model without an encoder. Put these tokens in front of the prompt"
        )


def check_stop_tokens(tokens: Collection[int], vocab_size: int) -> None:
    """Raise unless all tokens that end a row are of a vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"stop_tokens lie in the vocabulary, 0 to {vocab_size - 1}; got {token}, which the"
                " model never makes. Pass the end token of the tokenizer of this model"
            )


def check_prompts(
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    context_length: int,
    max_new_tokens: int,
    capacity: int | None,
) -> None:
    """Raise unless prompts are of a vocabulary, and fit a model and its cache."""
    for i, prompt in enumerate(prompts):
        _check_tokens(i, prompt, vocab_size)
        _check_length(i, len(prompt), context_length, max_new_tokens, capacity)


def _check_tokens(i: int, prompt: np.ndarray, vocab_size: int) -> None:
    if not len(prompt):
        raise ValueError(
            f"a prompt holds at least one token; prompt {i} is empty. Begin with the model's start"
            " token"
        )
    # The smallest and the largest id tell of all.
    for token in (int(prompt.min()), int(prompt.max())):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token ids lie in the vocabulary, 0 to {vocab_size - 1}; got {token} in prompt"
                f" {i}. Encode text with the tokenizer of this model"
            )


def _check_length(
    i: int, length: int, context_length: int, max_new_tokens: int, capacity: int | None
) -> None:
    if length > context_length:
        raise ValueError(
            f"a prompt is at most context_length={context_length} tokens; prompt {i} has {length}."
            " Cut it"
        )
    # Both limits count the prompt and what follows it.
    for name, limit in (("context_length", context_length), ("capacity", capacity)):
        if limit is not None and length + max_new_tokens > limit:
            raise ValueError(
                f"a prompt and its new tokens together are at most {name}={limit}; prompt {i} has"
                f" {length} tokens and max_new_tokens={max_new_tokens}. Pass"
                f" max_new_tokens={max(limit - length, 0)}, or a shorter prompt"
            )
