"""Text from a language model: the prompts in one call, then a token at a time, with a cache."""

from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from torch_ref.functional.checks import check_positive, check_prompt
from torch_ref.functional.dropout import key_data
from torch_ref.models.language_model import Cache, LanguageModel
from torch_ref.models.sampling import Sampling, sample

Prompts = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor
Callback = Callable[[int, int], object]


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: Sequence[int]
    key: Tensor | None
    capacity: int | None
    callback: Callback | None


@overload
def generate(
    model: LanguageModel, tokens: Sequence[int], max_new_tokens: int, **options: Unpack[GenerateOptions]
) -> list[int]: ...


@overload
def generate(
    model: LanguageModel, tokens: Sequence[Sequence[int]], max_new_tokens: int, **options: Unpack[GenerateOptions]
) -> list[list[int]]: ...


@overload
def generate(
    model: LanguageModel, tokens: np.ndarray | Tensor, max_new_tokens: int, **options: Unpack[GenerateOptions]
) -> list[int] | list[list[int]]: ...


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Tensor | None = None,
    capacity: int | None = None,
    callback: Callback | None = None,
) -> list[int] | list[list[int]]:
    """Return the tokens that follow a prompt, or each prompt of a batch.

    The model runs in eval mode, whatever mode it is in.

    Args:
        model: of any family, or a `LanguageModel` of your own.
        tokens: a prompt `(t,)`, or a batch of them: `(b, t)`, or lists that may differ in length.
        max_new_tokens: how many tokens are made at most.
        temperature: 0 takes the most likely token, 1 draws from the model's distribution.
        top_k: how many of the most likely tokens may be drawn; None is all.
        top_p: the probability that the tokens that may be drawn have together at least; None is all.
        stop_tokens: a row ends with the first of these that it makes.
        key: two integers, for a temperature above 0: the same key gives the same tokens.
        capacity: of the cache of layers without a window, in tokens; None is what prompts and new tokens need.
        callback: called with the row and the token for each new token, row by row.

    Returns:
        The new tokens, without the prompt: a list for one prompt, and a list of lists for a batch.

    Raises:
        ValueError: if a prompt is empty, longer than the model's context or holds ids outside the vocabulary, if
            prompt and new tokens together do not fit the context or the capacity, if a number is out of range, or if
            `temperature` is above 0 and there is no key.

    Example:
        >>> from torch_ref.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(8, 2, 1, context_length=16, vocab_size=11))
        >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_positive(max_new_tokens=max_new_tokens)
    prompts, single = as_prompts(tokens)
    _check_prompts(model, prompts, max_new_tokens, capacity)
    seed, training = _seed(key, temperature), model.training
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(prompt) for prompt in prompts], batch_first=True)
    model.eval()
    cache = _empty_cache(model, len(prompts), capacity or int(lengths.max()) + max_new_tokens)
    hidden, cache = model.hidden(padded, lengths=lengths, cache=cache)
    hidden, rows = hidden[torch.arange(len(prompts)), lengths - 1], [[] for _ in prompts]
    for step in range(max_new_tokens):
        token = sample(model.logits(hidden), sampling, seed, step)
        for b, row in enumerate(rows):
            if not (row and row[-1] in stop_tokens):
                row.append(int(token[b]))
                if callback:
                    callback(b, row[-1])
        if step + 1 == max_new_tokens or all(row[-1] in stop_tokens for row in rows):
            break
        hidden, cache = model.hidden(token[:, None], cache=cache)
        hidden = hidden[:, 0]
    model.train(training)
    return rows[0] if single else rows


def _check_prompts(model: LanguageModel, prompts: list[np.ndarray], max_new_tokens: int, capacity: int | None) -> None:
    full = any(block.att.window is None for block in model.trf_blocks)
    for i, prompt in enumerate(prompts):
        ends = (int(prompt.min()), int(prompt.max())) if len(prompt) else None
        sizes = model.config.vocab_size, model.config.context_length, max_new_tokens, capacity if full else None
        check_prompt(i, len(prompt), ends, *sizes)


def _empty_cache(model: LanguageModel, b: int, capacity: int) -> Cache:
    """Return a cache with `capacity` tokens for each layer without a window, and with the window for the others."""
    return tuple(block.init_cache(b, block.att.window or capacity) for block in model.trf_blocks)


def as_prompts(tokens: Prompts) -> tuple[list[np.ndarray], bool]:
    """Return prompts as arrays of ids, and whether there was only one, without a batch axis.

    Raises:
        ValueError: if they are not integers, or of another shape.

    Example:
        >>> as_prompts([[1, 2], [3]])
        ([array([1, 2]), array([3])], False)
    """
    many = [np.asarray(row) for row in tokens]
    single = all(row.ndim == 0 for row in many)
    prompts = [np.asarray(tokens)] if single else many
    for prompt in prompts:
        if prompt.ndim != 1 or (len(prompt) and not np.issubdtype(prompt.dtype, np.integer)):
            raise ValueError(
                "prompts are integers (t,), (b, t) or lists of them that may differ in length; got one of shape "
                f"{prompt.shape}, dtype {prompt.dtype}. Encode text with the tokenizer of the model first"
            )
    return prompts, single


def _seed(key: Tensor | None, temperature: float) -> Tensor:
    if key is not None:
        return key_data(key)
    if temperature > 0:
        raise ValueError(f"temperature={temperature} draws tokens, which needs a key. Pass key=torch.tensor([7, 42])")
    return torch.tensor([0, 0])
