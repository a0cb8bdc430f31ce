"""Text from a language model: the prompts in one call, then a token at a time, with a cache."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypedDict, Unpack, overload

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array

from flax_attn.functional.checks import check_positive, check_prompt
from flax_attn.functional.dropout import key_data
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.programs import new_tokens
from flax_attn.models.sampling import Sampling
from flax_attn.models.stack import Stack

Prompts = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Array
Callback = Callable[[int, int], object]
_BUCKET = 64  # prompts and caches are as long as a multiple of it, so that one compilation serves many


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: Sequence[int]
    key: Array | None
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
    model: LanguageModel, tokens: np.ndarray | Array, max_new_tokens: int, **options: Unpack[GenerateOptions]
) -> list[int] | list[list[int]]: ...


def generate(
    model: LanguageModel,
    tokens: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Array | None = None,
    capacity: int | None = None,
    callback: Callback | None = None,
) -> list[int] | list[list[int]]:
    """Return the tokens that follow a prompt, or each prompt of a batch.

    The model runs in eval mode, whatever mode it is in. Layers of equal shape are compiled once, for the prompts and
    for the steps, and again only when the number of prompts, their length or the length of all in multiples of 64
    change. Stacked layers, those of a model with `scan_layers`, are copied: load a model without it to generate.

    Args:
        model: of any family, or a `LanguageModel` of your own.
        tokens: a prompt `(t,)`, or a batch of them: `(b, t)`, or lists that may differ in length.
        max_new_tokens: how many tokens are made at most.
        temperature: 0 takes the most likely token, 1 draws from the model's distribution.
        top_k: how many of the most likely tokens may be drawn; None is all.
        top_p: the probability that the tokens that may be drawn have together at least; None is all.
        stop_tokens: a row ends with the first of these that it makes.
        key: a `jax.random.key` or its key data, for a temperature above 0: the same key gives the same tokens.
        capacity: of the cache of layers without a window, in tokens; None is what prompts and new tokens need.
        callback: called with the row and the token for each new token, row by row.

    Returns:
        The new tokens, without the prompt: a list for one prompt, and a list of lists for a batch.

    Raises:
        ValueError: if a prompt is empty, longer than the model's context or holds ids outside the vocabulary, if
            prompt and new tokens together do not fit the context or the capacity, if a number is out of range, if
            `temperature` is above 0 and there is no key, or if the axes of the mesh in use are Explicit.

    Example:
        >>> from flax_attn.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(8, 2, 1, context_length=16, vocab_size=11), rngs=nnx.Rngs(0))
        >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_positive(max_new_tokens=max_new_tokens)
    _check_mesh()
    prompts, single = as_prompts(tokens)
    _check_prompts(model, prompts, max_new_tokens, capacity)
    seed = _seed(key, temperature)
    padded, lengths = _pad(prompts, model.config.context_length)
    total = _bucket(lengths.max() + max_new_tokens, model.config.context_length)
    made = new_tokens(_in_eval_mode(model), padded, lengths, capacity or total, sampling, seed)
    rows = _collect(islice(made, max_new_tokens), len(prompts), frozenset(stop_tokens), callback)
    return rows[0] if single else rows


def _collect(made: Iterable[Array], b: int, stops: frozenset[int], callback: Callback | None) -> list[list[int]]:
    """Return the tokens of each row, up to the first that stops it."""
    rows = [[] for _ in range(b)]
    # Tokens are read one by one only where something depends on them: else the device need not wait for Python.
    for tokens in made if stops or callback else list(made):
        for i, (row, token) in enumerate(zip(rows, np.asarray(tokens).tolist(), strict=True)):
            if not (row and row[-1] in stops):
                row.append(token)
                if callback:
                    callback(i, token)
        if all(row[-1] in stops for row in rows):
            break
    return rows


def _check_mesh() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "a cache is written by XLA's own division, so generate runs on Auto axes; got a mesh with axis_types="
            f"{mesh.axis_types}. Make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )


def _check_prompts(model: LanguageModel, prompts: list[np.ndarray], max_new_tokens: int, capacity: int | None) -> None:
    blocks = model.trf_blocks
    full = any(block.att.window is None for block in ([blocks.block] if isinstance(blocks, Stack) else blocks))
    for i, prompt in enumerate(prompts):
        ends = (int(prompt.min()), int(prompt.max())) if len(prompt) else None
        sizes = model.config.vocab_size, model.config.context_length, max_new_tokens, capacity if full else None
        check_prompt(i, len(prompt), ends, *sizes)


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


def _seed(key: Array | None, temperature: float) -> Array | np.ndarray:
    if key is not None:
        return key_data(key)
    if temperature > 0:
        raise ValueError(f"temperature={temperature} draws tokens, which needs a key. Pass key=jax.random.key(0)")
    return np.zeros(2, np.uint32)


def _pad(prompts: list[np.ndarray], limit: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), _bucket(lengths.max(), limit)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


def _bucket(size: Any, limit: int | None = None) -> int:
    return min(-(-int(size) // _BUCKET) * _BUCKET, limit or 2**31)


def _in_eval_mode(model: LanguageModel) -> LanguageModel:
    model = nnx.merge(*nnx.split(model))  # shares its arrays
    model.eval()
    return model
