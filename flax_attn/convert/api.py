"""Weights into a module and out of it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from flax_attn.convert.layouts import LAYOUTS
from flax_attn.convert.rules import ConversionError, Entry, Layout, plan, problems
from flax_attn.functional.checks import check_choice


def state_dict(module: nnx.Module, layout: str | Layout = "torch_ref", *, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the parameters of `module` as flat arrays in a layout.

    Args:
        module: any NNX module; the attention layouts want one that has attention inside.
        layout: a name from `LAYOUTS`, or a `Layout` of your own.
        prefix: put before every name, such as `"transformer.h.0.attn."`.

    Returns:
        Fresh numpy arrays by name, in the dtype of the parameters. For a nested tree, as Linen has it:
        `flax.traverse_util.unflatten_dict(weights, sep=".")`.

    Raises:
        ConversionError: if the layout cannot hold the module.

    Example:
        >>> from flax_attn import Linear
        >>> {name: array.shape for name, array in state_dict(Linear(3, 2, rngs=nnx.Rngs(0))).items()}
        {'bias': (2,), 'weight': (2, 3)}
    """
    arrays = {name: np.array(param[...]) for name, param in _params(module).items()}
    return {prefix + entry.theirs: entry.join(arrays) for entry in sorted(_entries(module, layout), key=_name)}


def load_state_dict(
    module: nnx.Module, weights: Mapping[str, Any], layout: str | Layout = "torch_ref", *, prefix: str = ""
) -> None:
    """Write the weights of a state dict into `module`, all of them or none.

    Args:
        module: the NNX module that takes the weights, each cast to the dtype of its parameter.
        weights: arrays by name: numpy, JAX or PyTorch, flat or nested. It is left as it is.
        layout: a name from `LAYOUTS`, or a `Layout` of your own.
        prefix: the module's place in the state dict, such as `"transformer.h.0.attn."`; other entries are left alone.

    Raises:
        ConversionError: with a line for every missing, unexpected and mis-shaped entry. The module is then unchanged.

    Example:
        >>> from flax_attn import Linear
        >>> layer = Linear(3, 2, rngs=nnx.Rngs(0))
        >>> load_state_dict(layer, {"weight": np.ones((2, 3)), "bias": np.zeros(2)})
        >>> layer(jnp.ones(3))
        Array([3., 3.], dtype=float32)
    """
    entries, params = _entries(module, layout), _params(module)
    theirs = _under(prefix, _flatten(weights))
    wrong = problems(entries, {name: _shape(name, value) for name, value in theirs.items()}, _layout(layout))
    if wrong:
        heading = f"these weights do not fit {type(module).__name__} in the layout {_layout_name(layout)}:"
        raise ConversionError("\n  ".join([heading, *wrong]))
    ours = {}
    for entry in entries:
        ours |= entry.split(_numbers(entry.theirs, theirs[entry.theirs]))
    # All are made before any is written, as copies: asarray may share the memory of the caller's weights.
    new = {name: jnp.array(ours[name], dtype=param.dtype) for name, param in params.items()}
    for name, param in params.items():
        param[...] = new[name]


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of any framework as numpy; bfloat16 tensors included, which torch itself does not convert."""
    if hasattr(array, "detach"):  # a torch tensor, told without importing torch
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            return array.float().numpy().astype(ml_dtypes.bfloat16)
        return array.numpy()
    return np.asarray(array)


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        array = to_numpy(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConversionError(f"{name} is not an array that numpy can hold: {error}") from error
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ConversionError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array


def _shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(np.shape(value))
    except ValueError as error:
        raise ConversionError(f"{name} is not an array: {error}") from error


def _under(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if prefix and not found:
        raise ConversionError(
            f"no entry starts with the prefix {prefix!r}; the first are {', '.join(list(weights)[:3])}"
        )
    return found


def _entries(module: nnx.Module, layout: str | Layout) -> list[Entry]:
    if not isinstance(module, nnx.Module):
        raise ConversionError(
            f"weights go into and out of NNX modules; got {type(module)}. Pass the Flax side as the module"
        )
    table = _layout(layout)
    modules = {_dotted(path): submodule for path, submodule in nnx.iter_modules(module)}
    for path, submodule in modules.items():
        reason = table.refuse(submodule) if hasattr(submodule, "W_query") else None
        if reason:
            where = f"{path} ({type(submodule).__name__})" if path else type(submodule).__name__
            raise ConversionError(f"{where} cannot be stored in the layout {_layout_name(layout)}: {reason}")

    def axes(prefix: str) -> dict[str, int]:
        head_dim = getattr(modules.get(prefix.rstrip(".")), "head_dim", None)
        return {} if head_dim is None else {"h": head_dim}

    return plan({name: param.shape for name, param in _params(module).items()}, table, axes)


def _layout(layout: str | Layout) -> Layout:
    if isinstance(layout, Layout):
        return layout
    check_choice("layout", layout, tuple(LAYOUTS))
    return LAYOUTS[layout]


def _layout_name(layout: str | Layout) -> str:
    return "given" if isinstance(layout, Layout) else repr(layout)


def _params(module: nnx.Module) -> dict[str, nnx.Param]:
    return {_dotted(path): param for path, param in nnx.iter_graph(module) if isinstance(param, nnx.Param)}


def _dotted(path) -> str:
    return ".".join(map(str, path))


def _name(entry: Entry) -> str:
    return entry.theirs


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise ConversionError(f"weights are arrays by name; got {type(tree)}. Pass a state dict")
    flat = {}
    for name, value in tree.items():
        inner = _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        if twice := flat.keys() & inner.keys():
            raise ConversionError(f"these weights hold {', '.join(sorted(twice))} twice, once flat and once nested")
        flat |= inner
    return flat
