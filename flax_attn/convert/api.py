"""Weights into a module and out of it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.convert.arrays import from_layout, layout_name, to_layout
from flax_attn.convert.layouts import LayoutLike, as_layout
from flax_attn.convert.rules import Axes, ConversionError
from flax_attn.convert.stacked import (
    LayerSlice,
    Tensor,
    around,
    layers_of,
    numbered,
    stacked_layers,
    stacked_modules,
    whole,
)


def state_dict(
    module: nnx.Module, layout: LayoutLike = "torch_ref", *, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return the parameters and running statistics of `module` as flat arrays in a layout.

    Args:
        module: an NNX module; the attention layouts need one with attention inside.
        layout: a name from `LAYOUTS`, or a `Layout` or a sequence of `Rule`s of your own.
        prefix: prefix of every name, such as `"transformer.h.0.attn."`.

    Returns:
        Fresh numpy arrays by name, in the dtype of the parameters. For a nested tree, as in Linen,
        call `flax.traverse_util.unflatten_dict(weights, sep=".")`.

    Raises:
        ConversionError: if the layout cannot hold the module.

    Example:
        >>> from flax_attn import Linear
        >>> weights = state_dict(Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> {name: array.shape for name, array in weights.items()}
        {'bias': (2,), 'weight': (2, 3)}
    """
    axes = axes_of(module, layout)
    arrays = {name: np.asarray(tensor[...]) for name, tensor in tensors(module).items()}
    return to_layout(arrays, layout, axes=axes, prefix=prefix)


def load_state_dict(
    module: nnx.Module,
    weights: Mapping[str, Any],
    layout: LayoutLike = "torch_ref",
    *,
    prefix: str = "",
) -> None:
    """Write the weights of a state dict into `module`, all of them or none.

    Args:
        module: the NNX module that takes the weights, each cast to the dtype of its parameter.
        weights: arrays by name: numpy, JAX or PyTorch, flat or nested. It is left as it is.
        layout: a name from `LAYOUTS`, or a `Layout` or a sequence of `Rule`s of your own.
        prefix: the module's place in the state dict, such as `"transformer.h.0.attn."`; other
            entries are left alone.

    Raises:
        ConversionError: with a line for every missing, unexpected and mis-shaped entry, or for
            every parameter in which a finite number would become infinite. The module is then
            unchanged.

    Example:
        >>> from flax_attn import Linear
        >>> import jax.numpy as jnp
        >>> layer = Linear(3, 2, rngs=nnx.Rngs(0))
        >>> load_state_dict(layer, {"weight": np.ones((2, 3)), "bias": np.zeros(2)})
        >>> layer(jnp.ones(3))
        Array([3., 3.], dtype=float32)
    """
    axes = axes_of(module, layout)
    own = tensors(module)
    ours = from_layout(weights, layout, own, axes=axes, prefix=prefix, what=type(module).__name__)
    _check_range(own, ours)
    # All are made before any is written, and as copies: JAX may share the memory of an array.
    # NumPy casts without compiling a program for each shape, and JAX takes what it made as it is.
    new = []
    for variable, arrays in whole(own, ours):
        array = np.reshape(arrays, variable.shape)
        copied = np.array(array, variable.dtype)
        new.append((variable, jax.device_put(copied)))
    for variable, array in new:
        variable[...] = array


def _check_range(tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise where a finite number would become infinite in the dtype of its parameter."""
    lines = list(_beyond_range(tensors, arrays))
    if lines:
        heading = "numbers stay finite in the dtype of their parameter:"
        text = "\n  ".join([heading, *lines])
        raise ConversionError(f"{text}\nBuild the module with a wider param_dtype")


def _beyond_range(tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    for name, array in arrays.items():
        dtype = tensors[name].dtype
        beyond = _beyond(array, dtype)
        if beyond is not None:
            yield f"{name} holds {beyond:.6g}, beyond {dtype}"


def _beyond(array: np.ndarray, dtype: np.dtype) -> float | None:
    """Return a finite number of an array that another dtype does not hold; None without one."""
    limit = _largest(dtype)
    # Most weights keep their dtype, and need not be read.
    if not limit or _largest(array.dtype) <= limit:
        return None
    beyond = array[np.isfinite(array) & (np.abs(array) > limit)]
    return float(beyond[0]) if beyond.size else None


def _largest(dtype: np.dtype) -> float:
    """Return the largest number of a floating dtype, and 0 of others."""
    return float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def parameters(module: nnx.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by the names that rules know them by: dotted paths.

    As in PyTorch, the layers of an `nnx.Sequential` are named by their index alone: its part
    `layers` is left out. Those of stacked layers are named as if the layers were a list.

    Example:
        >>> from flax_attn import LayerNorm, Linear
        >>> list(parameters(nnx.Sequential(Linear(3, 2, rngs=nnx.Rngs(0)), LayerNorm(2))))
        ['0.bias', '0.kernel', '1.scale', '1.shift']
    """
    return _named(module, nnx.Param)[0]


def statistics(module: nnx.Module) -> dict[str, Tensor]:
    """Return the running statistics of a module by their dotted names.

    They are loaded and stored like parameters, but not trained.

    Example:
        >>> list(statistics(nnx.BatchNorm(3, rngs=nnx.Rngs(0))))
        ['mean', 'var']
    """
    return _named(module, nnx.BatchStat)[0]


def tensors(module: nnx.Module) -> dict[str, Tensor]:
    """Return what a state dict holds of a module: its parameters, then its running statistics."""
    own, fixed = _named(module, nnx.Param, nnx.BatchStat)
    return {**own, **fixed}


def _named(module: nnx.Module, *kinds: type[nnx.Variable]) -> list[dict[str, Tensor]]:
    """Return the variables of each kind by name; a graph is walked once, which takes long."""
    names = naming(module)
    found: list[dict[str, Tensor]] = [{} for _ in kinds]
    for path, node in nnx.iter_graph(module):
        for kind, variables in zip(kinds, found, strict=True):
            if isinstance(node, kind):
                variables |= _by_layer(node, names(path))
    return found


def _by_layer(variable: nnx.Variable, names: Mapping[str, int | None]) -> dict[str, Tensor]:
    found = {}
    for name, layer in names.items():
        found[name] = variable if layer is None else LayerSlice(variable, layer)
    return found


def naming(module: nnx.Module) -> Callable[[tuple], dict[str, int | None]]:
    """Return a function from the path of a node in a module to its names.

    A node has one name, or one for each layer if layers are stacked. The value of a name is its
    layer.
    """
    sequences = set()
    stacks = {}
    modules = dict(nnx.iter_modules(module))
    vmapped = stacked_modules(modules)
    for path, submodule in modules.items():
        if isinstance(submodule, nnx.Sequential):
            sequences.add(path)
        layers = stacked_layers(submodule)
        if layers:
            stacks[path] = layers

    def names(path: tuple) -> dict[str, int | None]:
        # Sequences are known by their paths in the module, where stacked layers are not apart.
        left_out = {i for i in range(len(path)) if path[:i] in sequences}
        outer = around(path, vmapped)
        apart = numbered(path, outer, vmapped[outer]) if outer else layers_of(path, stacks)
        return {_dotted(own, left_out): layer for own, layer in apart}

    return names


def _dotted(path: tuple, left_out: Collection[int]) -> str:
    """Return the name of a path without the parts `layers` at these places."""
    parts = []
    for i, part in enumerate(path):
        if part != "layers" or i not in left_out:
            parts.append(str(part))
    return ".".join(parts)


# The letters of axes in patterns, by the attributes of modules that hold their sizes.
_AXES = {"head_dim": "h", "num_key_heads": "k", "channels": "c", "height": "p", "width": "q"}


def axes_of(module: nnx.Module, layout: LayoutLike) -> Axes:
    """Return the axis sizes of the submodules; raise if the layout cannot hold a submodule."""
    if not isinstance(module, nnx.Module):
        raise ConversionError(
            f"weights go into and out of NNX modules; got {type(module)}. Pass the Flax side as the"
            " module"
        )
    names = naming(module)
    table = as_layout(layout)
    modules = {}
    for path, submodule in nnx.iter_modules(module):
        modules |= dict.fromkeys(names(path), submodule)
    for where, submodule in modules.items():
        # Every submodule is asked: a layout may hold a whole model but for one part.
        reason = table.refuse(submodule)
        if reason:
            kind = type(submodule).__name__
            which = f"{where} ({kind})" if where else kind
            raise ConversionError(
                f"{which} cannot be stored in the layout {layout_name(layout)}: {reason}"
            )

    def axes(prefix: str) -> dict[str, int]:
        return _sizes(modules.get(prefix.rstrip(".")))

    return axes


def _sizes(module: nnx.Module | None) -> dict[str, int]:
    sizes = {}
    for name, letter in _AXES.items():
        size = getattr(module, name, None)
        if isinstance(size, int):
            sizes[letter] = size
    return sizes
