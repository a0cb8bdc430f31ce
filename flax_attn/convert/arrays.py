"""Weights from one layout to another as plain arrays by name: no module needed."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from flax_attn.convert.entry import Entry
from flax_attn.convert.layouts import LayoutLike, as_layout
from flax_attn.convert.planning import no_axes, plan
from flax_attn.convert.problems import problems
from flax_attn.convert.rules import Axes, ConversionError

# As JAX knows them: to NumPy itself bfloat16 is not floating.
_REAL = (jnp.floating, jnp.integer)


def to_layout(
    weights: Mapping[str, Any], layout: LayoutLike, *, axes: Axes = no_axes, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return parameters as the entries of a layout: its rules, read forwards.

    Args:
        weights: arrays by name, our side of the rules: numpy, JAX or PyTorch, flat or nested.
        layout: a name from `LAYOUTS`, a `Layout` or a sequence of `Rule`s.
        axes: the sizes of einops axes within a prefix that the shapes do not give, such as `{"h":
            64}` at `"att."`.
        prefix: prefix of every name.

    Returns:
        Fresh numpy arrays by name, each in its own dtype.

    Raises:
        ConversionError: if the layout has no place for a parameter, or one entry for two.

    Example:
        >>> arrays = to_layout({"kernel": np.ones((3, 2))}, "torch")
        >>> {name: array.shape for name, array in arrays.items()}
        {'weight': (2, 3)}
    """
    arrays = {name: as_numbers(name, value) for name, value in flatten(weights).items()}
    entries = plan(_shapes(arrays), as_layout(layout), axes)
    stored = _stored(sorted(entries, key=lambda entry: entry.theirs), arrays)
    return {prefix + name: array for name, array in stored.items()}


def _stored(entries: list[Entry], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    for entry in entries:
        found |= entry.pieces(entry.join(arrays))
    return found


def from_layout(
    weights: Mapping[str, Any],
    layout: LayoutLike,
    like: Mapping[str, Any],
    *,
    axes: Axes = no_axes,
    prefix: str = "",
    what: str = "these parameters",
) -> dict[str, np.ndarray]:
    """Return the entries of a layout as parameters: its rules, read backwards.

    Args:
        weights: arrays by name, their side of the rules: numpy, JAX or PyTorch, flat or nested.
        layout: a name from `LAYOUTS`, a `Layout` or a sequence of `Rule`s.
        like: the parameters wanted, by name, flat or nested: anything that has a shape.
        axes: the sizes of einops axes within a prefix that the shapes do not give, such as `{"h":
            64}` at `"att."`.
        prefix: prefix of the entries in `weights`, such as `"transformer.h.0.attn."`; other entries
            are left alone.
        what: name of the parameters in error messages.

    Returns:
        Fresh numpy arrays by the names of `like`, each in the dtype of its entry.

    Raises:
        ConversionError: with a line for every missing, unexpected and mis-shaped entry.

    Example:
        >>> shapes = {"kernel": np.empty((3, 2))}
        >>> arrays = from_layout({"weight": np.ones((2, 3))}, "torch", shapes)
        >>> {name: array.shape for name, array in arrays.items()}
        {'kernel': (3, 2)}
    """
    table = as_layout(layout)
    shapes = _shapes(flatten(like))
    entries = plan(shapes, table, axes)
    theirs = _under(prefix, flatten(weights))
    # All problems are found before anything is converted.
    wrong = problems(entries, _shapes(theirs), table, prefix)
    if wrong:
        heading = f"these weights do not fit {what} in the layout {layout_name(layout)}:"
        lines = [heading, *wrong]
        raise ConversionError("\n  ".join(lines))
    ours = {}
    for entry in entries:
        stored = {name: as_numbers(name, theirs[name]) for name in entry.names}
        ours |= entry.split(entry.joined(stored))
    return ours


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of any framework as numpy, also bfloat16, which torch does not convert."""
    # A torch tensor, told without importing torch.
    if hasattr(array, "detach"):
        array = array.detach().cpu().resolve_conj().resolve_neg()
        if str(array.dtype) == "torch.bfloat16":
            return array.float().numpy().astype(ml_dtypes.bfloat16)
        return array.numpy()
    return np.asarray(array)


def as_numbers(name: str, value: Any) -> np.ndarray:
    """Return a weight as a numpy array, of real numbers."""
    array = _as_array(name, value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in _REAL):
        raise ConversionError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        return to_numpy(value)
    # Of a tensor without memory, of ragged lists, and of dtypes that NumPy does not know.
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConversionError(f"{name} is not an array that numpy can hold: {error}") from error


def layout_name(layout: LayoutLike) -> str:
    """Return what errors call a layout."""
    return repr(layout) if isinstance(layout, str) else "given"


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a flat or nested state dict by their dotted names."""
    if not isinstance(tree, Mapping):
        raise ConversionError(f"weights are arrays by name; got {type(tree)}. Pass a state dict")
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        inner = flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
        _check_new(inner, flat)
        flat |= inner
    return flat


def _check_new(names: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    # A name with dots may also be a path through nested mappings.
    twice = known.keys() & names.keys()
    if twice:
        raise ConversionError(
            f"these weights hold {', '.join(sorted(twice))} twice, once flat and once nested"
        )


def as_shape(name: str, value: Any) -> tuple[int, ...]:
    """Return the shape of a weight."""
    try:
        return tuple(np.shape(value))
    except ValueError as error:
        raise ConversionError(f"{name} is not an array: {error}") from error


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: as_shape(name, value) for name, value in weights.items()}


def _under(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    # Other entries are those of other parts of a model.
    names = [name for name in weights if name.startswith(prefix)]
    if prefix and not names:
        first = ", ".join(list(weights)[:3])
        raise ConversionError(f"no entry starts with the prefix {prefix!r}; the first are {first}")
    return {name.removeprefix(prefix): weights[name] for name in names}
