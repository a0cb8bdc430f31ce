"""Text from a language model: the prompts in one call, then a token at a time, with a cache."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from attn_spec.checks import check_positive
from attn_spec.generation_checks import check_no_start, check_prompts, check_stop_tokens
from attn_spec.longrope import LongRoPEScaling
from attn_spec.prompts import Prompts, StopTokens, as_prompts, as_start, as_stop_tokens
from attn_spec.sampling import Sampling
from torch_ref.functional.dropout import key_data
from torch_ref.functional.outputs import Outputs
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.models.language_model import LanguageModel, ModelCache
from torch_ref.models.sampling import sample

Callback = Callable[[int, int], object]


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: StopTokens
    key: Tensor | None
    capacity: int | None
    callback: Callback | None
    start: Sequence[int] | None


@overload
def generate(
    model: LanguageModel | EncoderDecoder,
    tokens: Sequence[int],
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[int]: ...


@overload
def generate(
    model: LanguageModel | EncoderDecoder,
    tokens: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[list[int]]: ...


@overload
def generate(
    model: LanguageModel | EncoderDecoder,
    tokens: np.ndarray | Tensor,
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[int] | list[list[int]]: ...


@torch.no_grad()
def generate(
    model: LanguageModel | EncoderDecoder,
    tokens: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: StopTokens = (),
    key: Tensor | None = None,
    capacity: int | None = None,
    callback: Callback | None = None,
    start: Sequence[int] | None = None,
) -> list[int] | list[list[int]]:
    """Return the tokens that follow a prompt, or each prompt of a batch.

    An encoder-decoder answers the prompt. The model runs in eval mode, whatever mode it is in.
    Where a row becomes a long input of LongRoPE all tokens are read again, as transformers does it
    for Phi-3.

    Args:
        model: model of any family, or a `LanguageModel` or an `EncoderDecoder` of your own.
        tokens: a prompt `(t,)`, or a batch of them: `(b, t)`, or lists that may differ in length.
            Of an encoder-decoder they go into the encoder; one that takes features is given them,
            `(b, ...)` or without b, all of one length.
        max_new_tokens: largest number of new tokens.
        temperature: divisor of the logits; 0 takes the most likely token, 1 draws from the model's
            distribution.
        top_k: number of most likely tokens that may be drawn; None is all.
        top_p: smallest total probability of the tokens that may be drawn; None is all.
        stop_tokens: tokens that end a row; a list, a set or an array.
        key: two integers, for a temperature above 0: the same key gives the same tokens.
        capacity: capacity of the cache of layers without a window, in tokens; None is what prompts
            and new tokens need.
        callback: function called with the row and the token for each new token, row by row.
        start: tokens that the decoder of an encoder-decoder begins with; None is the start token of
            its config.

    Raises:
        ValueError: if a prompt is empty, longer than the model's context or holds ids outside the
            vocabulary, if prompt and new tokens together do not fit the context or the capacity, if
            a number is out of range, if `temperature` is above 0 and there is no key, or if a model
            without an encoder is given a `start`.

    Example:
        >>> from torch_ref.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(8, 2, 1, context_length=16, vocab_size=11))
        >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    sampling = Sampling(temperature, top_k, top_p)
    seed = _seed(key, sampling)
    check_positive(max_new_tokens=max_new_tokens)
    if capacity is not None:
        check_positive(capacity=capacity)
    stops = as_stop_tokens(stop_tokens)
    check_stop_tokens(stops, model.config.vocab_size)
    training = model.training
    model.eval()
    try:
        if isinstance(model, EncoderDecoder):
            begun = _begin_answer(model, tokens, start, max_new_tokens, capacity)
        else:
            check_no_start(start)
            begun = _begin(model, tokens, max_new_tokens, capacity)
        rows = _steps(
            model, begun, max_new_tokens, stops, callback, lambda x, i: sample(x, sampling, seed, i)
        )
    finally:
        model.train(training)
    return rows[0] if begun.single else rows


class _Begun(NamedTuple):
    """The state before the first token: vectors, cache, step, and whether there is no batch."""

    hidden: Tensor
    cache: Any
    run: Callable
    single: bool


def _steps(
    model: LanguageModel | EncoderDecoder,
    begun: _Begun,
    max_new_tokens: int,
    stops: frozenset[int],
    callback: Callback | None,
    choose: Callable[[Tensor, int], Tensor],
) -> list[list[int]]:
    """Return the tokens of each row, up to the first that stops it."""
    hidden, cache = begun.hidden, begun.cache
    rows = [[] for _ in hidden]
    for step in range(max_new_tokens):
        token = choose(model.logits(hidden), step)
        tokens = token.tolist()
        for i, row in enumerate(rows):
            # A row that has stopped is computed on, and what it makes is dropped.
            if row and row[-1] in stops:
                continue
            row.append(tokens[i])
            if callback:
                callback(i, tokens[i])
        # The last token is not computed on: nothing follows it.
        if step + 1 == max_new_tokens or all(row[-1] in stops for row in rows):
            break
        decoded = begun.run(token[:, None], cache=cache)
        hidden = decoded.output[:, 0]
        cache = decoded.cache
    return rows


def _begin(
    model: LanguageModel, tokens: Prompts, max_new_tokens: int, capacity: int | None
) -> _Begun:
    prompts, single = as_prompts(tokens)
    config = model.config
    limit = config.context_length
    # Where all layers have a window, their caches are rings, which no sequence fills.
    full = any(block.att.window is None for block in model.trf_blocks)
    asked = capacity if full else None
    check_prompts(prompts, config.vocab_size, limit, max_new_tokens, asked)
    capacity = capacity or max(map(len, prompts)) + max_new_tokens
    # Some rotations change with the length: then all tokens are read again.
    rereads = _rereads(model, prompts, max_new_tokens)
    made = []

    def run(token: Tensor, cache: ModelCache | None) -> Outputs[ModelCache]:
        made.append(token)
        if len(made) not in rereads:
            return model.decode(token, cache=cache)
        # Read anew: rotations depend on the length of the sequence, those of cached keys as well.
        new = torch.cat(made, dim=1).cpu().numpy()
        rows = [np.append(*pair) for pair in zip(prompts, new, strict=True)]
        return _read(model, rows, capacity)

    # The prompts at once; then one token a step.
    read = _read(model, prompts, capacity)
    return _Begun(read.output[:, 0], read.cache, run, single)


def _read(model: LanguageModel, prompts: list[np.ndarray], capacity: int) -> Outputs[ModelCache]:
    """Return the vector of the last token of each prompt, `(b, 1, d)`, and the cache of all."""
    padded, lengths = _pad(prompts)
    empty = _empty_cache(model, len(prompts), capacity)
    decoded = model.decode(padded, lengths=lengths, cache=empty)
    last = decoded.output[torch.arange(len(prompts)), lengths - 1]
    return replace(decoded, output=last[:, None])


def _rereads(model: LanguageModel, prompts: list[np.ndarray], max_new_tokens: int) -> list[int]:
    """Return after how many new tokens a row becomes a long input of LongRoPE.

    All keys are then computed again.
    """
    ropes = {block.att.rope for block in model.trf_blocks if block.att.rope is not None}
    scalings = [rope.scaling for rope in ropes if isinstance(rope.scaling, LongRoPEScaling)]
    counts = {scaling.tokens_left(len(prompt)) for scaling in scalings for prompt in prompts}
    return sorted(count for count in counts if 0 < count < max_new_tokens)


def _begin_answer(
    model: EncoderDecoder,
    inputs: Prompts,
    start: Sequence[int] | None,
    max_new_tokens: int,
    capacity: int | None,
) -> _Begun:
    config = model.config
    # The decoder begins with a token of the config where none is given.
    begin = as_start([config.start_token] if start is None else start)
    limit = config.context_length or sys.maxsize
    check_prompts([begin], config.vocab_size, limit, max_new_tokens, capacity)
    # Features, as of sound, are all real: lengths are those of tokens.
    lengths = None
    if _is_floating(inputs):
        padded = torch.as_tensor(inputs)
        single = padded.ndim == 2
        if single:
            padded = padded[None]
    else:
        prompts, single = as_prompts(inputs)
        # An encoder has no cache that a long input could fill.
        check_prompts(prompts, config.vocab_size, sys.maxsize, 0, None)
        padded, lengths = _pad(prompts)
    b = len(padded)
    encoded = model.encode(padded, lengths=lengths)
    kept = model.keep(encoded, lengths)
    run = partial(model.decode, kept=kept)
    empty = model.init_cache(b, capacity or len(begin) + max_new_tokens)
    begins = torch.as_tensor(begin).expand(b, -1)
    decoded = run(begins, cache=empty)
    return _Begun(decoded.output[:, -1], decoded.cache, run, single)


def _is_floating(inputs: Any) -> bool:
    # Lists hold tokens.
    if not isinstance(inputs, np.ndarray | Tensor):
        return False
    return torch.as_tensor(inputs).is_floating_point()


def _pad(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(prompt) for prompt in prompts], batch_first=True
    )
    return padded, torch.tensor([len(prompt) for prompt in prompts])


def _empty_cache(model: LanguageModel, b: int, capacity: int) -> ModelCache:
    """Return a cache for each layer, of `capacity` tokens or of the window if it has one."""
    return tuple(block.init_cache(b, block.att.window or capacity) for block in model.trf_blocks)


def _seed(key: Tensor | None, sampling: Sampling) -> Tensor:
    if key is not None:
        return key_data(key)
    if not sampling.greedy:
        raise ValueError(
            f"temperature={sampling.temperature} draws tokens, which needs a key. Pass"
            " key=torch.tensor([7, 42])"
        )
    return torch.tensor([0, 0])
