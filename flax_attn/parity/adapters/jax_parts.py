"""Any JAX module as arrays by name, the rest of its state, and a function that rebuilds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_attn.convert.api import naming
from flax_attn.parity.adapters.adapter import PairingError, check_kind


class Parts(NamedTuple):
    """A module split into its arrays.

    Args:
        params: the parameters, by dotted name.
        statistics: running statistics of BatchNorm, by dotted name.
        rest: a tree of everything else that is an array.
        build: function of one mapping of parameters and statistics, and of the rest, that rebuilds
            the module.
        call: method that calls the module, for its signature.
    """

    params: dict[str, jax.Array]
    statistics: dict[str, jax.Array]
    rest: Any
    build: Callable[[Mapping[str, jax.Array], Any], Any]
    call: Callable


def take_apart(module: Any, train: bool = False) -> Parts:
    """Return the parts of an NNX, bound Linen or Equinox module, or of a plain function.

    A function of parameters and inputs, as `apply` of Haiku is, takes its parameters by
    `jax.tree_util.Partial`. The module itself is not changed; the parts are those of a copy in
    train or in eval mode, where it has modes.

    Raises:
        PairingError: if it is none of these, or a Linen module without variables.

    Example:
        >>> sorted(take_apart(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).params)
        ['bias', 'kernel']
    """
    rule = (
        "the Flax module is an NNX module, a bound Linen module, an equinox module or a function of"
        " arrays"
    )
    check_kind(module, rule, {"torch": "PyTorch"})
    if isinstance(module, nnx.Module):
        return _nnx(module, train)
    if isinstance(module, linen.Module):
        return _linen(module)
    if isinstance(module, jax.tree_util.Partial) and len(module.args) == 1 and not module.keywords:
        bound = _arrays(module.args[0], lambda tree: jax.tree_util.Partial(module.func, tree))
        return bound._replace(call=module.func)
    if not jax.tree_util.all_leaves([module]):
        return _pytree(module, train)
    return Parts({}, {}, {}, lambda arrays, rest: module, module)


def _nnx(module: nnx.Module, train: bool) -> Parts:
    copy = nnx.clone(module)
    (copy.train if train else copy.eval)()
    for _, embed in nnx.iter_modules(copy):
        # This layer alone fixes the dtype of its parameter at construction; here it follows each
        # run's dtype.
        if isinstance(embed, nnx.Embed) and embed.dtype == embed.embedding.dtype:
            embed.dtype = None
    graph, params, statistics, rest = nnx.split(copy, nnx.Param, _is_statistic, ...)
    flat = {path: leaf for state in (params, statistics) for path, leaf in nnx.to_flat_state(state)}
    name = naming(copy)
    names = {path: name(path) for path in flat}

    def build(arrays: Mapping[str, jax.Array], rest: Any) -> nnx.Module:
        state = nnx.from_flat_state(
            [(path, flat[path].replace(_join(arrays, own))) for path, own in names.items()]
        )
        return nnx.merge(
            graph, state, rest, copy=True
        )  # a Variable can only be changed in the trace that made it

    values = {
        name: flat[path].get_value() if layer is None else flat[path].get_value()[layer]
        for path, own in names.items()
        for name, layer in own.items()
    }
    kept = {
        name for path, own in names.items() for name in own if isinstance(flat[path], nnx.BatchStat)
    }
    return Parts(*_parted(values, kept), rest, build, type(module).__call__)


def _join(arrays: Mapping[str, jax.Array], names: Mapping[str, int | None]) -> jax.Array:
    """Return the array of a variable, those of stacked layers joined."""
    if None in names.values():
        return arrays[next(iter(names))]
    return jnp.stack([arrays[name] for name in names])


def _is_statistic(path: tuple, value: Any) -> bool:
    return isinstance(value, nnx.BatchStat) and jnp.issubdtype(
        value.dtype, jnp.floating
    )  # a count of calls is none


def _parted(
    arrays: Mapping[str, Any], statistics: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters, and the statistics."""
    params = {name: array for name, array in arrays.items() if name not in statistics}
    return params, {name: array for name, array in arrays.items() if name in statistics}


def _linen(module: linen.Module) -> Parts:
    if module.scope is None:
        raise PairingError(
            f"{type(module).__name__} is a Linen module without variables. Pass"
            " module.bind(variables), or flax.nnx.bridge.ToNNX(module, rngs).lazy_init(inputs)"
        )
    unbound, variables = module.unbind()
    trees = {
        name: variables.get(name, {}) for name in ("params", "batch_stats") if name in variables
    }
    leaves, structure = jax.tree_util.tree_flatten_with_path(trees)
    # The name of a leaf is its path without that of its collection.
    paths = [_dotted(path[1:]) for path, _ in leaves]
    rest = {name: value for name, value in variables.items() if name not in trees}

    def build(arrays: Mapping[str, jax.Array], rest: Any) -> linen.Module:
        return unbound.bind(
            {**jax.tree.unflatten(structure, [arrays[path] for path in paths]), **rest}
        )

    kept = {
        name for name, (path, _) in zip(paths, leaves, strict=True) if path[0].key == "batch_stats"
    }
    values = {name: leaf for name, (_, leaf) in zip(paths, leaves, strict=True)}
    return Parts(*_parted(values, kept), rest, build, type(module).__call__)


def _pytree(module: Any, train: bool) -> Parts:
    # An equinox module is a pytree with arrays for leaves; the floating ones are its parameters.
    if type(module).__module__.startswith("equinox") or hasattr(module, "__dataclass_fields__"):
        module = _inference(module, not train)
    return _arrays(module, lambda tree: tree)._replace(call=type(module).__call__)


def _arrays(module: Any, made: Callable[[Any], Any]) -> Parts:
    """Return the parts of a tree of arrays, that `made` makes a module of."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(module)
    is_param = [
        isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        for _, leaf in leaves
    ]
    params = {
        _dotted(path): leaf for (path, leaf), yes in zip(leaves, is_param, strict=True) if yes
    }
    static = {
        _dotted(path): leaf for (path, leaf), yes in zip(leaves, is_param, strict=True) if not yes
    }

    def build(arrays: Mapping[str, jax.Array], rest: Any) -> Any:
        return made(
            jax.tree.unflatten(tree, [{**static, **arrays}[_dotted(path)] for path, _ in leaves])
        )

    return Parts(params, {}, {}, build, made)


def _inference(module: Any, value: bool) -> Any:
    import equinox

    return equinox.nn.inference_mode(module, value)


def _dotted(path: Any) -> str:
    # `_fun` is what equinox's own transforms, such as filter_vmap, call the module inside them.
    names = [
        str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path
    ]
    return ".".join(name for name in names if name != "_fun")
