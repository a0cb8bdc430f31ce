"""Any JAX module as arrays by name, the rest of its state, and a function that rebuilds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_attn.convert.api import naming
from flax_attn.convert.entry import Entry
from flax_attn.convert.match.jax_tree import is_bound
from flax_attn.parity.adapters.adapter import Mode, PairingError
from flax_attn.parity.adapters.module_adapter import check_kind

# The collections of Linen that a PyTorch module has as well.
_SHARED = ("params", "batch_stats")
# A function of parameters and statistics by name, and of the rest, that builds a module.
Build = Callable[[Mapping[str, jax.Array], Any], Any]
# A function of a module that returns its running statistics and the rest of its state.
State = Callable[[Any], tuple[dict[str, jax.Array], Any]]


class Parts(NamedTuple):
    """A module split into its arrays.

    Args:
        params: the parameters, by dotted name.
        statistics: running statistics of BatchNorm, by dotted name.
        rest: a tree of everything else that is an array.
        build: function of one mapping of parameters and statistics, and of the rest, that rebuilds
            the module.
        call: method that calls the module, for its signature.
        state: function that returns the running statistics and the rest of a module that was built,
            as its calls left them; None if calls leave all as it is.
    """

    params: dict[str, jax.Array]
    statistics: dict[str, jax.Array]
    rest: Any
    build: Build
    call: Callable
    state: State | None = None

    def cut(self, cuts: Mapping[str, Entry]) -> Parts:
        """Return the parts with some parameters in pieces.

        Args:
            cuts: entry whose pieces a parameter is cut into, by its name.
        """
        if not cuts:
            return self
        return self._replace(
            params=_cut(self.params, cuts),
            statistics=_cut(self.statistics, cuts),
            build=_joining(self, cuts),
            state=self.state and _cutting(self.state, cuts),
        )


def _joining(parts: Parts, cuts: Mapping[str, Entry]) -> Build:
    """Return a function that builds a module from parameters of which some are in pieces."""
    arrays = {**parts.params, **parts.statistics}
    names = {name: list(cuts[name].pieces_of_ours(name, arrays[name])) for name in cuts}

    def build(arrays: Mapping[str, jax.Array], rest: Any) -> Any:
        pieces = {name: [arrays[piece] for piece in own] for name, own in names.items()}
        whole = {name: cuts[name].ours_of_pieces(own) for name, own in pieces.items()}
        return parts.build({**arrays, **whole}, rest)

    return build


def _cutting(state: State, cuts: Mapping[str, Entry]) -> State:
    """Return a function of the state of a module that cuts the running statistics."""

    def cut(module: Any) -> tuple[dict[str, jax.Array], Any]:
        statistics, rest = state(module)
        return _cut(statistics, cuts), rest

    return cut


def _cut(arrays: Mapping[str, jax.Array], cuts: Mapping[str, Entry]) -> dict[str, jax.Array]:
    found = {}
    for name, array in arrays.items():
        found |= cuts[name].pieces_of_ours(name, array) if name in cuts else {name: array}
    return found


def take_apart(module: Any, mode: Mode = "eval") -> Parts:
    """Return the parts of an NNX, bound Linen or Equinox module, or of a plain function.

    A function of parameters and inputs, as `apply` of Haiku is, takes its parameters by
    `jax.tree_util.Partial`. The module itself is not changed; the parts are those of a copy in
    this mode, where it has modes.

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
        return _nnx(module, mode)
    if isinstance(module, linen.Module):
        return _linen(module)
    if is_bound(module):
        return _bound(module)
    if not jax.tree_util.all_leaves([module]):
        return _pytree(module, mode)
    return Parts({}, {}, {}, lambda arrays, rest: module, module)


def _bound(function: jax.tree_util.Partial) -> Parts:
    """Return the parts of a function that its parameters are bound to."""
    (params,) = function.args
    parts = _arrays(params, lambda tree: jax.tree_util.Partial(function.func, tree))
    return parts._replace(call=function.func)


def _nnx(module: nnx.Module, mode: Mode) -> Parts:
    taken = _TakenNnx(_in_mode(module, mode))
    statistics, params = taken.values()
    return Parts(params, statistics, taken.rest, taken.build, type(module).__call__, taken.state)


def _in_mode(module: nnx.Module, mode: Mode) -> nnx.Module:
    """Return a copy of a module in a mode."""
    copy = nnx.clone(module)
    if mode == "eval":
        copy.eval()
    else:
        copy.train()
    if mode == "statistics":
        # Dropout is off, as in eval mode.
        copy.set_attributes(deterministic=True, raise_if_not_found=False)
    for _, embed in nnx.iter_modules(copy):
        # This layer alone fixes the dtype of its parameter at construction; here it follows each
        # run's dtype.
        if isinstance(embed, nnx.Embed) and embed.dtype == embed.embedding.dtype:
            embed.dtype = None
    return copy


class _TakenNnx:
    """An NNX module as its graph, its parameters and running statistics, and the rest."""

    def __init__(self, module: nnx.Module):
        self._graph, *shared, self.rest = nnx.split(module, nnx.Param, _is_statistic, ...)
        self._variables: dict[Any, Any] = {}
        for state in shared:
            self._variables |= dict(nnx.to_flat_state(state))
        name = naming(module)
        self._names = {path: name(path) for path in self._variables}

    def values(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the running statistics, and the parameters."""
        statistics, params = {}, {}
        for path, variable in self._variables.items():
            own = statistics if isinstance(variable, nnx.BatchStat) else params
            own.update(_values(variable, self._names[path]))
        return statistics, params

    def build(self, arrays: Mapping[str, jax.Array], rest: Any) -> nnx.Module:
        """Return a module of parameters and running statistics by name, and of the rest."""
        leaves = []
        for path, variable in self._variables.items():
            array = _join(arrays, self._names[path])
            leaves.append((path, variable.replace(array)))
        # Merged into a copy: a Variable can only be changed in the trace that made it.
        return nnx.merge(self._graph, nnx.from_flat_state(leaves), rest, copy=True)

    def state(self, module: nnx.Module) -> tuple[dict[str, jax.Array], Any]:
        """Return the running statistics of a module that was built, and the rest."""
        _, _, statistics, left = nnx.split(module, nnx.Param, _is_statistic, ...)
        found = {}
        for path, variable in nnx.to_flat_state(statistics):
            found.update(_values(variable, self._names[path]))
        return found, self._rest_of(left)

    def _rest_of(self, left: Any) -> Any:
        # What a call adds, such as an intermediate result, is no state of the next one.
        moved = dict(nnx.to_flat_state(left))
        known = nnx.to_flat_state(self.rest)
        rest = [(path, moved.get(path, before)) for path, before in known]
        return nnx.from_flat_state(rest)


def _values(variable: Any, names: Mapping[str, int | None]) -> dict[str, jax.Array]:
    """Return the array of a variable by its name, or those of its layers, if they are stacked."""
    array = variable.get_value()
    return {name: array if layer is None else array[layer] for name, layer in names.items()}


def _join(arrays: Mapping[str, jax.Array], names: Mapping[str, int | None]) -> jax.Array:
    """Return the array of a variable, those of stacked layers joined."""
    if None in names.values():
        return arrays[next(iter(names))]
    return jnp.stack([arrays[name] for name in names])


def _is_statistic(path: tuple, value: Any) -> bool:
    # BatchNorm also counts its calls, in a whole number.
    return isinstance(value, nnx.BatchStat) and jnp.issubdtype(value.dtype, jnp.floating)


def _linen(module: linen.Module) -> Parts:
    if module.scope is None:
        raise PairingError(
            f"{type(module).__name__} is a Linen module without variables. Pass"
            " module.bind(variables), or flax.nnx.bridge.ToNNX(module, rngs).lazy_init(inputs)"
        )
    unbound, variables = module.unbind()
    shared = {name: variables[name] for name in _SHARED if name in variables}
    rest = {name: values for name, values in variables.items() if name not in shared}
    leaves, structure = jax.tree_util.tree_flatten_with_path(shared)
    params, statistics, names = {}, {}, []
    for (collection, *path), leaf in leaves:
        own = params if collection.key == "params" else statistics
        # The name of a leaf is its path without that of its collection.
        name = _dotted(path)
        names.append(name)
        own[name] = leaf
    build = partial(_bind, unbound, structure, names)
    return Parts(params, statistics, rest, build, type(module).__call__)


def _bind(
    unbound: linen.Module,
    structure: Any,
    names: Sequence[str],
    arrays: Mapping[str, jax.Array],
    rest: Any,
) -> linen.Module:
    collections = jax.tree.unflatten(structure, [arrays[name] for name in names])
    return unbound.bind({**collections, **rest})


def _pytree(module: Any, mode: Mode) -> Parts:
    # An equinox module is a pytree with arrays for leaves; the floating ones are its parameters.
    if type(module).__module__.startswith("equinox") or hasattr(module, "__dataclass_fields__"):
        module = _inference(module, mode == "eval")
    return _arrays(module, lambda tree: tree)._replace(call=type(module).__call__)


def _arrays(module: Any, made: Callable[[Any], Any]) -> Parts:
    """Return the parts of a tree of arrays, that `made` makes a module of."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(module)
    static = {_dotted(path): leaf for path, leaf in leaves}
    # What is whole or no array, such as a key, is not a parameter.
    params = {name: leaf for name, leaf in static.items() if _is_floating(leaf)}
    return Parts(params, {}, {}, partial(_build, tree, static, made), made)


def _build(
    tree: Any,
    static: Mapping[str, Any],
    made: Callable[[Any], Any],
    arrays: Mapping[str, jax.Array],
    rest: Any,
) -> Any:
    # The names of the leaves are all different, and in their order.
    values = {**static, **arrays}
    return made(jax.tree.unflatten(tree, [values[name] for name in static]))


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _inference(module: Any, value: bool) -> Any:
    import equinox

    return equinox.nn.inference_mode(module, value)


def _dotted(path: Any) -> str:
    names = [_key_name(key) for key in path]
    # equinox's own transforms, such as filter_vmap, give the module inside them this name.
    return ".".join(name for name in names if name != "_fun")


def _key_name(key: Any) -> str:
    # Of an attribute, of an entry in a mapping, and of a place in a sequence.
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
