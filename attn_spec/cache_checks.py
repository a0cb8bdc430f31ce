"""Checks of caches that both packages share, with the same messages."""

from collections.abc import Mapping
from numbers import Integral

from attn_spec.checks import check_positive

Shapes = Mapping[str, tuple[int, ...]]
_REMEDY = "Pass what init_cache of this layer returns"


def check_cache_dtype(dtype: str) -> None:
    """Raise unless a cache stores floating point numbers."""
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(
            "a cache stores keys and values as they are and must be floating point; got dtype"
            f" {dtype}. Use that of the layer, such as float32, or a narrower one, such as bfloat16"
        )


def check_rows(b: object) -> None:
    """Raise if the known number of rows of a cache is no number, or below 0."""
    # Symbolic sizes of an export are integers of a class of their own.
    if isinstance(b, bool | float | str) or (isinstance(b, Integral) and int(b) < 0):
        raise ValueError(
            "b must be a number of rows, at least 0, or None for one sequence without a batch axis;"
            f" got b={b!r}. Pass x.shape[0]"
        )


def check_cache_shapes(got: Shapes, wanted: Shapes) -> None:
    """Raise unless a cache is that of a layer's heads and widths, and of the rows of its input."""
    if got != wanted:
        raise ValueError(
            "a cache is made for the heads and widths of one layer and for the rows of its input: "
            f"{_listed(wanted)}; got {_listed(got)}. {_REMEDY}"
        )


def check_new_tokens(key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """Raise unless new keys and values are of the same rows, tokens and heads."""
    if key[:-1] != value[:-1]:
        raise ValueError(
            "new keys and values are of the same rows, tokens and heads, (b, t, k, h); got"
            f" {_listed({'key': key, 'value': value})}. Pass both for the same tokens"
        )


def check_cache_window(own: int | None, window: int | None) -> None:
    """Raise if a ring buffer overwrites keys that a layer attends to.

    With `own=None` the cache keeps all keys; with `window=None` the layer sees all keys.
    """
    # A cache of all keys serves every window.
    if own is not None and (window is None or own < window):
        raise ValueError(
            f"a ring buffer keeps the keys of its own window; got one of window={own} for a layer"
            f" of window={window}, which attends to {'all' if window is None else 'more'}."
            f" {_REMEDY}"
        )


def check_caches(name: str, caches: object, layers: int) -> None:
    """Raise unless a model is given a tuple of caches, one for each layer or stack of layers."""
    # A dictionary has a length too, and is no tuple of caches.
    got = len(caches) if isinstance(caches, tuple | list) else type(caches).__name__
    if got != layers:
        raise ValueError(
            f"{name} is a tuple with one entry for each layer of this model, or for each stack of "
            f"layers, {layers} in all; got {got}. Pass what "
            f"{'keep' if name == 'kept' else 'init_cache'} of this model returns"
        )


def check_stacked_cache(shapes: Shapes, layers: int) -> None:
    """Raise unless the first axis of what is stored for a stack of layers is that of the layers."""
    if any(shape[:1] != (layers,) for shape in shapes.values()):
        raise ValueError(
            f"the first axis of a cache of stacked layers is that of the {layers} layers; got "
            f"{_listed(shapes)}. Pass what init_cache of this model returns"
        )


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def check_ring_buffer(window: int | None, capacity: int) -> None:
    """Raise unless a cache of this capacity keeps all keys of a sliding window."""
    if window is None:
        return
    check_positive(window=window)
    if window > capacity:
        raise ValueError(
            "a ring buffer must keep at least the window, all keys that a query attends to; got"
            f" window={window}, capacity={capacity}. Use a capacity of at least {window}"
        )


def check_lengths(lengths: int, t: int) -> None:
    """Raise unless `lengths` counts some of the tokens of a call."""
    if not 0 <= lengths <= t:
        raise ValueError(
            f"lengths counts the real tokens of a call of t={t} tokens; got lengths={lengths}. Use"
            f" 0 to {t}"
        )


def check_rows_of_lengths(shape: tuple[int, ...], b: int) -> None:
    """Raise unless there is one length for all rows of a batch, or one for each."""
    if shape not in ((), (1,), (b,)):
        raise ValueError(
            f"lengths must be one integer or one a row, shape ({b},); got shape {shape}. "
            "Pass how many tokens of each row are real"
        )


def check_fits(capacity: int, cached: int, new: int) -> None:
    """Raise if new tokens do not fit behind the cached ones."""
    # Beyond it a write would be clamped silently, onto the last slots.
    if cached + new > capacity:
        raise ValueError(
            f"the cache has a capacity of {capacity} tokens; got {new} new tokens, {cached} cached."
            f" Make it larger, as in KVCache.zeros(b, {cached + new}, ...), or a ring buffer with"
            " window="
        )


def check_capacity(capacity: int, context_length: int | None) -> None:
    """Raise unless a cache keeps no more tokens than the module takes."""
    if context_length is not None and capacity > context_length:
        raise ValueError(
            f"capacity must not exceed context_length; got capacity={capacity},"
            f" context_length={context_length}. Make the cache smaller or construct the module with"
            " a larger context_length"
        )
