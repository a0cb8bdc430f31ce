"""Text from a language model: the prompts in one call, then a token at a time, with a cache."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array

from attn_spec.checks import check_positive, kind_of
from attn_spec.generation_checks import check_no_start, check_prompts, check_stop_tokens
from attn_spec.longrope import LongRoPEScaling
from attn_spec.prompts import Prompts, StopTokens, as_prompts, as_start, as_stop_tokens
from attn_spec.sampling import Sampling
from flax_attn.functional.dropout import key_data
from flax_attn.models.decode_loop import answer_tokens, new_tokens_with_rereads
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.pretrained import Pretrained

_M = TypeVar("_M", bound=Pretrained)
Callback = Callable[[int, int], object]
_BUCKET = (
    64  # prompts and caches are as long as a multiple of it, so that one compilation serves many
)


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: StopTokens
    key: Array | None
    capacity: int | None
    callback: Callback | None
    start: Sequence[int] | None


@overload
def generate(
    model: Pretrained,
    tokens: Sequence[int],
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[int]: ...


@overload
def generate(
    model: Pretrained,
    tokens: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[list[int]]: ...


@overload
def generate(
    model: Pretrained,
    tokens: np.ndarray | Array,
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> list[int] | list[list[int]]: ...


def generate(
    model: Pretrained,
    tokens: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: StopTokens = (),
    key: Array | None = None,
    capacity: int | None = None,
    callback: Callback | None = None,
    start: Sequence[int] | None = None,
) -> list[int] | list[list[int]]:
    """Return the tokens that follow a prompt, or each prompt of a batch.

    An encoder-decoder answers the prompt. The model runs in eval mode, whatever mode it is in.
    Where a row becomes a long input of LongRoPE all tokens are read again, as transformers does it
    for Phi-3.

    Layers of equal shape are compiled once, for the steps six together, and again only when
    the number of prompts, their length or the length of all in multiples of 64 change. Stacked
    layers, those of a model with `scan_layers`, are copied: load a model without it to generate.

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
        key: `jax.random.key` or its key data, for a temperature above 0; the same key gives the
            same tokens.
        capacity: capacity of the cache of layers without a window, in tokens; None is what prompts
            and new tokens need.
        callback: function called with the row and the token for each new token, row by row.
        start: tokens that the decoder of an encoder-decoder begins with; None is the start token of
            its config.

    Returns:
        The new tokens, without the prompt or the start: a list for one prompt, and a list of lists
        for a batch.

    Raises:
        ValueError: if a prompt is empty, longer than the model's context or holds ids outside the
            vocabulary, if prompt and new tokens together do not fit the context or the capacity, if
            a number is out of range, if `temperature` is above 0 and there is no key, if a model
            without an encoder is given a `start`, or if the model makes no text.

    Example:
        >>> from flax_attn.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(8, 2, 1, context_length=16, vocab_size=11), rngs=nnx.Rngs(0))
        >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise ValueError(
            f"text is made by a LanguageModel or an EncoderDecoder; got {kind_of(model)}."
            " Load a model of text, or derive your own from flax_attn.models.LanguageModel"
        )
    if isinstance(tokens, Tracer):
        raise ValueError(
            "generate reads its prompts, and compiles its steps by itself; got tokens that are"
            " traced. Call it outside of jax.jit and other transforms"
        )
    sampling = Sampling(temperature, top_k, top_p)
    seed = _seed(key, sampling)
    check_positive(max_new_tokens=max_new_tokens)
    if capacity is not None:
        check_positive(capacity=capacity)
    stops = as_stop_tokens(stop_tokens)
    check_stop_tokens(stops, model.config.vocab_size)
    if isinstance(model, EncoderDecoder):
        made, b, single = _answer(model, tokens, start, max_new_tokens, capacity, sampling, seed)
    else:
        check_no_start(start)
        made, b, single = _continue(model, tokens, max_new_tokens, capacity, sampling, seed)
    rows = _collect(islice(made, max_new_tokens), b, stops, callback)
    return rows[0] if single else rows


# New tokens, the number of their rows, and whether the prompt had no batch axis.
_Made = tuple[Iterator[Array], int, bool]


def _continue(
    model: LanguageModel,
    tokens: Prompts,
    max_new_tokens: int,
    capacity: int | None,
    sampling: Sampling,
    seed: Any,
) -> _Made:
    prompts, single = as_prompts(tokens)
    config = model.config
    limit = config.context_length
    # Where all layers have a window, their caches are rings, which no sequence fills.
    full = any(block.att.window is None for block in model.trf_blocks.blocks)
    asked = capacity if full else None
    check_prompts(prompts, config.vocab_size, limit, max_new_tokens, asked)
    # Rounded up, so that prompts of many lengths share what is compiled.
    capacity = capacity or _bucket(max(map(len, prompts)) + max_new_tokens, limit)
    # Some rotations change with the length: then all tokens are read again.
    rereads = _rereads(model, prompts, max_new_tokens)
    made = new_tokens_with_rereads(
        _in_eval_mode(model),
        prompts,
        rereads,
        lambda rows: _pad(rows, limit),
        capacity,
        sampling,
        seed,
    )
    return made, len(prompts), single


def _rereads(model: LanguageModel, prompts: list[np.ndarray], max_new_tokens: int) -> list[int]:
    """Return after how many new tokens a row becomes a long input of LongRoPE.

    All keys are then computed again.
    """
    ropes = {block.att.rope for block in model.trf_blocks.blocks if block.att.rope is not None}
    scalings = [rope.scaling for rope in ropes if isinstance(rope.scaling, LongRoPEScaling)]
    counts = {scaling.tokens_left(len(prompt)) for scaling in scalings for prompt in prompts}
    return sorted(count for count in counts if 0 < count < max_new_tokens)


def _answer(
    model: EncoderDecoder,
    inputs: Prompts,
    start: Sequence[int] | None,
    max_new_tokens: int,
    capacity: int | None,
    sampling: Sampling,
    seed: Any,
) -> _Made:
    config = model.config
    # The decoder begins with a token of the config where none is given.
    begin = as_start([config.start_token] if start is None else start)
    limit = config.context_length or sys.maxsize
    check_prompts([begin], config.vocab_size, limit, max_new_tokens, capacity)
    total = _bucket(len(begin) + max_new_tokens, config.context_length)
    # Features, as of sound, are all real: lengths are those of tokens.
    lengths = None
    if _is_floating(inputs):
        padded = np.asarray(inputs)
        single = padded.ndim == 2
        if single:
            padded = padded[None]
    else:
        prompts, single = as_prompts(inputs)
        # An encoder has no cache that a long input could fill.
        check_prompts(prompts, config.vocab_size, sys.maxsize, 0, None)
        padded, lengths = _pad(prompts, None)
    b = len(padded)
    begins = np.tile(begin, (b, 1))
    capacity = capacity or total
    made = answer_tokens(_in_eval_mode(model), padded, lengths, begins, capacity, sampling, seed)
    return made, b, single


def _is_floating(inputs: Any) -> bool:
    # Lists hold tokens.
    if not isinstance(inputs, np.ndarray | Array):
        return False
    return bool(jnp.issubdtype(inputs.dtype, np.floating))


def _collect(
    made: Iterable[Array], b: int, stops: frozenset[int], callback: Callback | None
) -> list[list[int]]:
    """Return the tokens of each row, up to the first that stops it."""
    rows = [[] for _ in range(b)]
    # Tokens are read one by one only where something depends on them: else the device need not wait
    # for Python.
    steps = made if stops or callback else list(made)
    for step in steps:
        tokens = np.asarray(step).tolist()
        for i, row in enumerate(rows):
            # A row that has stopped is computed on, and what it makes is dropped.
            if row and row[-1] in stops:
                continue
            row.append(tokens[i])
            if callback:
                callback(i, tokens[i])
        if all(row[-1] in stops for row in rows):
            break
    return rows


def _seed(key: Array | None, sampling: Sampling) -> Array | np.ndarray:
    if key is not None:
        return key_data(key)
    if not sampling.greedy:
        raise ValueError(
            f"temperature={sampling.temperature} draws tokens, which needs a key. Pass"
            " key=jax.random.key(0)"
        )
    return np.zeros(2, np.uint32)


def _pad(prompts: Sequence[np.ndarray], limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = _bucket(lengths.max(), limit)
    padded = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


def _bucket(size: Any, limit: int | None = None) -> int:
    return min(-(-int(size) // _BUCKET) * _BUCKET, limit or 2**31)


def _in_eval_mode(model: _M) -> _M:
    # It shares the arrays of the model.
    model = nnx.merge(*nnx.split(model))
    model.eval()
    return model
