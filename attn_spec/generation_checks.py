"""Checks of tokens that models are given, and of prompts."""


def check_ids(dtype: str) -> None:
    """Raise unless ids are integers."""
    if not dtype.startswith(("int", "uint")):
        raise ValueError(f"ids must be integers; got dtype {dtype}. Cast them before the call")


def check_no_start(start: object) -> None:
    """Raise unless a model without an encoder is given no tokens to start from."""
    if start is not None:
        raise ValueError(
            f"start is what the decoder of an encoder-decoder begins with; got start={start} for a"
            " model without an encoder. Put these tokens in front of the prompt"
        )


def check_prompt(
    i: int,
    length: int,
    ends: tuple[int, int] | None,
    vocab_size: int,
    context_length: int,
    max_new_tokens: int,
    capacity: int | None,
) -> None:
    """Raise unless prompt `i` fits a model and its cache.

    `ends` are the smallest and the largest id of the prompt; None is an empty prompt.
    """
    if ends is None:
        raise ValueError(
            f"a prompt holds at least one token; prompt {i} is empty. Begin with the model's start"
            " token"
        )
    # The smallest and the largest id tell of all.
    if ends[0] < 0 or ends[1] >= vocab_size:
        raise ValueError(
            f"token ids lie in the vocabulary, 0 to {vocab_size - 1}; got"
            f" {ends[0] if ends[0] < 0 else ends[1]} in prompt {i}. Encode text with the tokenizer"
            " of this model"
        )
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
