"""Text from a language model: the prompts in one call, then a token at a time, with a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ref.functional.checks import check_positive, check_prompt
from torch_ref.functional.dropout import key_data
from torch_ref.models.language_model import LanguageModel
from torch_ref.models.sampling import Sampling, sample

Prompts = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor


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
    callback: Callable[[int, int], Any] | None = None,
) -> list[int] | list[list[int]]:
    """Return the tokens that follow a prompt, or each prompt of a batch.

    The model runs in eval mode, whatever mode it is in.

    Args:
        model: a `GPT2`, a `Llama` or a `LanguageModel` of your own.
        tokens: a prompt `(t,)`, or a batch of them: `(b, t)`, or lists that may differ in length.
        max_new_tokens: how many tokens are made at most.
        temperature: 0 takes the likeliest token, 1 draws from the model's distribution.
        top_k: how many of the likeliest tokens may be drawn; None is all.
        top_p: how much probability those that may be drawn hold at least; None is all.
        stop_tokens: a row ends with the first of these, which is its last token.
        key: two words, for a temperature above 0: the same key gives the same tokens.
        capacity: of the cache, in tokens; None is what prompts and new tokens need.
        callback: called with the row and the token as soon as one is there, row by row.

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
    sampling, window = Sampling(temperature, top_k, top_p), model.window
    check_positive(max_new_tokens=max_new_tokens)
    prompts, single = as_prompts(tokens)
    for i, prompt in enumerate(prompts):
        ends = (int(prompt.min()), int(prompt.max())) if len(prompt) else None
        sizes = model.config.vocab_size, model.config.context_length, max_new_tokens, None if window else capacity
        check_prompt(i, len(prompt), ends, *sizes)
    words, training = _key_words(key, temperature), model.training

    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(prompt) for prompt in prompts], batch_first=True)
    model.eval()
    cache = model.init_cache(len(prompts), capacity or window or int(lengths.max()) + max_new_tokens)
    hidden, cache = model.hidden(padded, lengths=lengths, cache=cache)
    hidden, rows = hidden[torch.arange(len(prompts)), lengths - 1], [[] for _ in prompts]
    for step in range(max_new_tokens):
        token = sample(model.logits(hidden), sampling, words, step)
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


def as_prompts(tokens: Prompts) -> tuple[list[np.ndarray], bool]:
    """Return prompts as arrays of ids, and whether there was but one, without a batch axis.

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


def _key_words(key: Tensor | None, temperature: float) -> Tensor:
    if key is not None:
        return key_data(key)
    if temperature > 0:
        raise ValueError(f"temperature={temperature} draws tokens, which needs a key. Pass key=torch.tensor([7, 42])")
    return torch.tensor([0, 0])
