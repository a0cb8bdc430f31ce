"""Tokens that are given to `generate`: prompts, and those that end a row."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from numbers import Number
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class ArrayOfIds(Protocol):
    """An array of any framework, which NumPy takes."""

    def __array__(self, *arguments: Any, **keywords: Any) -> np.ndarray: ...

    def __iter__(self) -> Iterator[Any]: ...


Prompts = Sequence[int] | Sequence[Sequence[int]] | ArrayOfIds
StopTokens = Collection[int] | ArrayOfIds


def as_stop_tokens(tokens: StopTokens) -> frozenset[int]:
    """Return the tokens that end a row, as integers of Python.

    Raises:
        ValueError: if they are not integers in one axis.

    Example:
        >>> sorted(as_stop_tokens(np.array([7, 3])))
        [3, 7]
    """
    # NumPy reads a set as one object.
    given = list(tokens) if isinstance(tokens, Iterable) and getattr(tokens, "ndim", 1) else tokens
    ids = np.asarray(given)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"stop_tokens are integers in a list, a set or an array (n,); got {tokens!r}. "
            "Pass [token] for one, and () for none"
        )
    return frozenset(ids.tolist())


def as_start(tokens: Sequence[int]) -> np.ndarray:
    """Return the tokens that the decoder of an encoder-decoder begins with in each row.

    Raises:
        ValueError: if they are not integers, or those of several rows.

    Example:
        >>> as_start([7, 3])
        array([7, 3])
    """
    prompts, single = as_prompts(tokens)
    if not single:
        raise ValueError(
            "start is one list of tokens, with which the decoder begins in each row; got"
            f" {tokens!r}. Pass the tokens of one row"
        )
    return prompts[0].astype(np.int64)


def as_prompts(tokens: Prompts) -> tuple[list[np.ndarray], bool]:
    """Return prompts as arrays of ids, and whether there was only one, without a batch axis.

    Raises:
        ValueError: if they are not integers, or of another shape.

    Example:
        >>> as_prompts([[1, 2], [3]])
        ([array([1, 2]), array([3])], False)
    """
    # What cannot be iterated is refused below, with the words for prompts.
    alone = tokens is None or isinstance(tokens, Number) or getattr(tokens, "ndim", 1) == 0
    many = [] if alone else [np.asarray(row) for row in tokens]
    # Numbers alone are one prompt, and an empty list is one that is empty.
    single = all(row.ndim == 0 for row in many)
    prompts = [np.asarray(tokens)] if single else many
    for prompt in prompts:
        if prompt.ndim != 1 or (len(prompt) and not np.issubdtype(prompt.dtype, np.integer)):
            raise ValueError(
                "prompts are integers (t,), (b, t) or lists of them that may differ in length; got"
                f" one of shape {prompt.shape}, dtype {prompt.dtype}. Encode text with the"
                " tokenizer of the model first"
            )
    return prompts, single
