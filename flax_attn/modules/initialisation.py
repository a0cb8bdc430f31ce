"""How parameters are drawn: linear layers as `torch.nn.Linear` draws its own.

The keys are those of the stream `params` of an `nnx.Rngs`, one after another; the numbers are those
that `jax.random.uniform` and `jax.random.normal` draw from them. They are the same whether a module
is built eagerly, where no program is compiled for a shape, or under a transform such as `jax.jit`.

Only in flax_attn: `torch.nn.Linear` draws its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.checks import check_dtype, refuse_dtype
from flax_attn.modules.random_numbers import (
    beside,
    can_draw,
    constants_are_arrays,
    draw,
    fold_in,
    is_threefry,
    may_read,
)

# Gives an array, or an `_Undrawn` while a model is made that draws its parameters itself.
Initializer = Callable[[Array, tuple[int, ...], Dtype], Any]
_draws_later: ContextVar[bool] = ContextVar("_draws_later", default=False)
_needs_no_values: ContextVar[bool] = ContextVar("_needs_no_values", default=False)


@dataclass(frozen=True)
class _Undrawn:
    """Placeholder for the value of a parameter that a model is about to draw itself.

    Args:
        draw: function that returns the value that the layer itself would draw.
        shape: shape of the value.
        dtype: dtype of the value.
    """

    draw: Callable[[], Array]
    shape: tuple[int, ...]
    dtype: np.dtype


@contextmanager
def without_values() -> Iterator[None]:
    """Let parameters made in this context be zeros, where only their shapes are asked for.

    To trace a random function takes ten times as long.
    """
    token = _needs_no_values.set(True)
    try:
        yield
    finally:
        _needs_no_values.reset(token)


@contextmanager
def drawn_once(model: nnx.Module) -> Iterator[None]:
    """Let a model built in this context draw the parameters of its layers.

    Parameters that the model has not drawn at the end are drawn by their layers. The layers take
    their keys in any case.

    Example:
        >>> from flax_attn import Linear
        >>> model = nnx.Module()
        >>> with drawn_once(model):
        ...     model.layer = Linear(2, 3, rngs=nnx.Rngs(0))
        ...     type(model.layer.kernel.get_value()).__name__
        '_Undrawn'
        >>> bool((model.layer.kernel[...] == Linear(2, 3, rngs=nnx.Rngs(0)).kernel[...]).all())
        True
    """
    # A context variable, so that other threads build their models as always.
    token = _draws_later.set(True)
    try:
        yield
    finally:
        _draws_later.reset(token)
    for _, param in nnx.iter_graph(model):
        value = param.get_value() if isinstance(param, nnx.Param) else None
        if isinstance(value, _Undrawn):
            drawn = value.draw()
            param.set_value(drawn)


def redrawn(init: Initializer) -> Initializer:
    """Return an initializer whose parameters a model may draw itself; see `drawn_once`."""

    def later(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Any:
        if not _draws_later.get():
            return init(key, shape, dtype)
        # As JAX would make it: float64 is float32 unless it is enabled.
        own = jax.dtypes.canonicalize_dtype(dtype)
        return _Undrawn(partial(init, key, shape, dtype), shape, own)

    return later


def check_rngs(rngs: nnx.Rngs | None) -> nnx.Rngs:
    """Return the streams that parameters are drawn from; raise if they are missing."""
    # Checked before a layer makes anything: Flax's own error names no remedy.
    if not isinstance(rngs, nnx.Rngs) or not ("params" in rngs or "default" in rngs):
        raise ValueError(
            "rngs is missing: the parameters are drawn from its stream 'params'; got"
            f" {type(rngs).__name__}. Pass rngs=nnx.Rngs(0)"
        )
    return rngs


def check_dtypes(**dtypes: Dtype | None) -> None:
    """Raise unless the value of each keyword is a supported dtype or None."""
    for name, dtype in dtypes.items():
        if type(dtype).__module__ == "torch":
            refuse_dtype(name, dtype, "JAX", "jax.numpy", "jnp.float32")
        try:
            known = dtype if dtype is None else jnp.dtype(dtype)
        except TypeError:  # which numpy raises for what is no dtype
            known = f"{dtype!r}"
        if known is not None:
            check_dtype(name, known, remedy=f"Pass {name}=jnp.bfloat16, or another of them")


def next_key(stream: nnx.RngStream) -> Array:
    """Return `stream()`, the next key of a stream, without compiling a program.

    Example:
        >>> one, other = nnx.Rngs(0), nnx.Rngs(0)
        >>> bool(next_key(one.params) == other.params()), int(one.default.count[...])
        (True, 1)
    """
    key = stream.key[...]
    count = stream.count[...]
    # A subclass, or a stream with an axis of vmapped layers, may draw in another way.
    known = type(stream) is nnx.RngStream and may_read(key) and may_read(count)
    if not (known and is_threefry(key)):
        return stream()
    number = int(count)
    following = np.array((number + 1) % 2**32, np.uint32)
    stream.count[...] = beside(count, following)
    return fold_in(key, number)


def drawn_key(stream: nnx.RngStream, rate: float) -> Array:
    """Return `stream()`, the next key of the dropout of a layer.

    Raises:
        TraceContextError: if a transform of JAX, such as `jax.jit`, captured the layer.

    Example:
        >>> drawn_key(nnx.Rngs(0).dropout, 0.5).dtype
        key<fry>
    """
    try:
        return stream()
    except TraceContextError as error:
        raise TraceContextError(
            f"dropout={rate} in train mode counts the keys that it draws, and a transform of JAX"
            " cannot change a module that it captured. Pass the module through the transform:"
            " nnx.jit(lambda layer, x: layer(x))(layer, x), or nnx.split before and nnx.merge"
            " inside; or pass dropout_key=, or call .eval() for no dropout"
        ) from error


def fork(stream: nnx.RngStream) -> nnx.RngStream:
    """Return `stream.fork()`, a stream that begins with the next key of another.

    Example:
        >>> int(fork(nnx.Rngs(0).dropout).count[...])
        0
    """
    # The tag stays: filters of Flax find streams by it.
    return type(stream)(next_key(stream), tag=stream.tag)


def for_flax(rngs: nnx.Rngs) -> _ParameterKeys:
    """Return the `rngs` of a Flax layer, which takes its keys by `rngs.params()`.

    Example:
        >>> one, other = nnx.Rngs(0), nnx.Rngs(0)
        >>> bool(for_flax(one).params() == other.params()), int(one.default.count[...])
        (True, 1)
    """
    return _ParameterKeys(rngs)


class _ParameterKeys:
    """The keys of a stream of parameters, as Flax asks for them."""

    def __init__(self, rngs: nnx.Rngs):
        self._stream = rngs.params

    def params(self) -> Array:
        """Return the next key."""
        return next_key(self._stream)


def uniform(d_in: int) -> Initializer:
    """Return an initializer that is uniform in +-1 / sqrt(d_in), for a layer of `d_in` inputs."""
    return _scaled(d_in**-0.5, normal=False)


def normal(std: float = 1.0) -> Initializer:
    """Return a normal initializer with mean 0 and standard deviation `std`."""
    return _scaled(std, normal=True)


def _scaled(scale: float, normal: bool) -> Initializer:
    def init(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
        if _needs_no_values.get():
            return jnp.zeros(shape, dtype)
        size = int(np.prod(shape))
        if can_draw(key, size, dtype):
            return draw(key, shape, dtype, scale, normal)
        if normal:
            # Under a transform or on a mesh, where the program is compiled in any case.
            return scale * jax.random.normal(key, shape, dtype)
        # Exact before it is scaled: what compilers fuse does not change the result.
        return scale * jax.random.uniform(key, shape, dtype, -1.0, 1.0)

    return init


def filled(shape: int | tuple[int, ...], value: int | float, dtype: Dtype) -> Array:
    """Return `jnp.full(shape, value, dtype)`, without compiling it.

    Example:
        >>> filled(3, 1, jnp.float32)
        Array([1., 1., 1.], dtype=float32)
    """
    if not constants_are_arrays(dtype):
        return jnp.full(shape, value, dtype)
    return jax.device_put(np.full(shape, value, jnp.dtype(dtype)))
