"""A model as small programs of a few layers: those of equal layers compile once.

Only in flax_attn: PyTorch compiles nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from attn_spec.sampling import Sampling
from flax_attn.functional.explicit_sharding import split_as
from flax_attn.models.blocks import Blocks
from flax_attn.models.encoder_decoder import EncoderDecoder
from flax_attn.models.language_model import LanguageModel
from flax_attn.models.sampling import sample

# Layers that are one program in a step: each program that starts costs time in which nothing is
# read, and each layer of a program costs time to compile.
_TOGETHER = 6


class _Form(NamedTuple):
    """How a module is built from its arrays."""

    graph: Any
    tree: Any

    def module(self, arrays: Sequence[Array]) -> Any:
        """Return the module with these arrays."""
        state = self.tree.unflatten(arrays)
        return nnx.merge(self.graph, state)


class _Part(NamedTuple):
    """A module taken apart: its form, and its arrays."""

    form: _Form
    # A flat list: JAX reads it at each call, and the state of a module much more slowly.
    arrays: list[Array]


def new_tokens(
    model: LanguageModel,
    tokens: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
    sampling: Sampling,
    key: Array | np.ndarray,
    first: int = 0,
) -> Iterator[Array]:
    """Yield the tokens `(b,)` that follow prompts, without an end.

    Args:
        model: model in eval mode.
        tokens: prompts `(b, t)`, padded.
        lengths: number of real tokens of each prompt, `(b,)`.
        capacity: capacity of the caches of layers without a window.
        sampling: how a token is drawn.
        key: random key, two uint32.
        first: number of tokens of each prompt that were drawn before with the same key.
    """
    ends, layers = _take_apart(model)
    embed = _compiled(_embed, ends.form)
    choose = _compiled(_choose, ends.form, sampling)
    x = embed(ends.arrays, tokens, lengths)
    caches = []
    for layer in layers:
        prefill = _compiled(_prefill, layer.form, capacity)
        x, cache = prefill(layer.arrays, x, lengths)
        caches.append(cache)
    caches = _grouped(caches)
    steps = [_step_of(group) for group in _grouped(layers)]
    x = _last(x, lengths)
    # What was drawn before is part of these prompts.
    prompt_lengths = lengths - np.int32(first)
    for made in count(first):
        number = np.int32(made)
        token, x = choose(ends.arrays, x, prompt_lengths, number, key)
        # Yielded before the next is computed: who needs no more stops here.
        yield token
        for i, step in enumerate(steps):
            x, caches[i] = step(x, caches[i])


def new_tokens_with_rereads(
    model: LanguageModel,
    prompts: Sequence[np.ndarray],
    rereads: Sequence[int],
    pad: Callable[[Sequence[np.ndarray]], tuple[np.ndarray, np.ndarray]],
    *options: Any,
) -> Iterator[Array]:
    """Yield the tokens `(b,)` that follow prompts, reading all tokens again at some steps.

    Args:
        model: model in eval mode.
        prompts: prompts `(t,)`, one for each row.
        rereads: numbers of new tokens after which all tokens are read again, in order.
        pad: function from rows to one array and their lengths.
        options: capacity, sampling and key, as in `new_tokens`.
    """
    rows = list(prompts)
    made = 0
    for end in (*rereads, None):
        stream = new_tokens(model, *pad(rows), *options, first=made)
        # After the last reading there is no end.
        size = None if end is None else end - made
        tokens = []
        for token in islice(stream, size):
            tokens.append(token)
            yield token
        new = np.stack(tokens, axis=1)
        rows = [np.append(*pair) for pair in zip(rows, new, strict=True)]
        made += len(tokens)


def answer_tokens(
    model: EncoderDecoder,
    inputs: np.ndarray,
    lengths: np.ndarray | None,
    start: np.ndarray,
    capacity: int,
    sampling: Sampling,
    key: Array | np.ndarray,
) -> Iterator[Array]:
    """Yield the tokens `(b,)` that a decoder makes of what is encoded, without an end.

    Args:
        model: model in eval mode.
        inputs: inputs of the encoder, `(b, ...)`, padded.
        lengths: number of real tokens of each row, `(b,)`; None is all.
        start: tokens that the decoder begins with, `(b, t)`.
        capacity: capacity of the caches.
        sampling: how a token is drawn.
        key: random key, two uint32.
    """
    form, arrays = _part(model)
    begin = _compiled(_begin, form, capacity)
    # What was encoded is read in every step, and is not donated.
    step = _compiled(_answer, form, sampling, donated=(1, 3))
    x, kept, cache = begin(arrays, inputs, lengths, start)
    for made in count():
        number = np.int32(made)
        token, x, cache = step(arrays, x, kept, cache, number, key)
        yield token


def _take_apart(model: LanguageModel) -> tuple[_Part, list[_Part]]:
    """Return what comes before and after the layers, and the layers."""
    # It shares the arrays of the model.
    ends = nnx.merge(*nnx.split(model))
    ends.trf_blocks = Blocks()
    layers = [_part(layer) for layer in model.trf_blocks.unstacked()]
    return _part(ends), layers


def _part(module: nnx.Module) -> _Part:
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return _Part(_Form(graph, tree), arrays)


# The form of a module is slow to compare: so each has a function of its own, instead of being an
# argument.
@lru_cache(maxsize=1024)
def _compiled(
    function: Callable,
    form: _Form | tuple[_Form, ...],
    *options: Any,
    donated: tuple[int, ...] = (),
) -> Callable:
    """Return a function of the arrays of modules, whose forms and options are fixed."""
    return jax.jit(partial(function, form, *options), donate_argnums=donated)


def _grouped(layers: Sequence[Any]) -> list[Any]:
    starts = range(0, len(layers), _TOGETHER)
    return [layers[start : start + _TOGETHER] for start in starts]


def _step_of(layers: Sequence[_Part]) -> Callable:
    """Return the step of layers as a function of their input and their caches."""
    forms = tuple(layer.form for layer in layers)
    step = _compiled(_step, forms, donated=(1, 2))
    arrays = [layer.arrays for layer in layers]
    return partial(step, arrays)


def _embed(form: _Form, arrays: Any, tokens: Array, lengths: Array) -> Array:
    order = jnp.arange(tokens.shape[1], dtype=lengths.dtype)
    order = jnp.broadcast_to(order, tokens.shape)
    # Positions of padding could lie beyond the table.
    positions = jnp.where(order < lengths[:, None], order, 0)
    return form.module(arrays).embed(tokens, positions, None)


def _prefill(form: _Form, capacity: int, arrays: Any, x: Array, lengths: Array) -> Any:
    block = form.module(arrays)
    cache = block.init_cache(len(x), block.att.window or capacity)
    # A static length of 0 says that the cache is empty, so that the prompt attends to itself alone.
    empty = cache.replace(length=0)
    attended = block.attend(x, lengths=lengths, cache=empty)
    return attended.output, attended.cache


def _step(forms: Sequence[_Form], arrays: Any, x: Array, caches: Any) -> Any:
    """Return the output of layers that follow one another, and their new caches."""
    new = []
    for form, own, cache in zip(forms, arrays, caches, strict=True):
        attended = form.module(own).attend(x, cache=cache)
        x = attended.output
        new.append(attended.cache)
    return x, new


def _choose(
    form: _Form, sampling: Sampling, arrays: Any, x: Array, lengths: Array, made: Array, key: Array
) -> Any:
    model = form.module(arrays)
    token = _draw(model, model.final_norm(x), sampling, key, made)
    # The prompt and what was made before.
    positions = (lengths + made)[:, None]
    return token, model.embed(token[:, None], positions, None)


def _begin(
    form: _Form, capacity: int, arrays: Any, inputs: Array, lengths: Array | None, start: Array
) -> Any:
    model = form.module(arrays)
    encoded = model.encode(inputs, lengths=lengths)
    kept = model.keep(encoded, lengths)
    b, t = start.shape
    empty = model.init_cache(b, capacity)
    decoded = model.decode(start, kept, cache=empty)
    last = _last(decoded.output, jnp.full(b, t))
    return last, kept, decoded.cache


def _answer(
    form: _Form,
    sampling: Sampling,
    arrays: Any,
    x: Array,
    kept: Any,
    cache: Any,
    made: Any,
    key: Any,
) -> Any:
    model = form.module(arrays)
    token = _draw(model, x, sampling, key, made)
    decoded = model.decode(token[:, None], kept, cache=cache)
    return token, decoded.output, decoded.cache


def _draw(model: Any, hidden: Array, sampling: Sampling, key: Array, made: Array) -> Array:
    # Of each row there is one vector, that of its last token.
    logits = model.logits(hidden)[:, 0]
    return sample(logits, sampling, key, made)


@jax.jit
def _last(x: Array, lengths: Array) -> Array:
    rows = jnp.arange(len(x))
    # Under a mesh a lookup must say how its result is split.
    last = x.at[rows, lengths - 1].get(out_sharding=split_as(x, 0, 2))
    return last[:, None]
