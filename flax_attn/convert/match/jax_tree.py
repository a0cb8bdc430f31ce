"""The layers of a JAX model: of NNX, bound Linen or Equinox."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_attn.convert.api import parameters, statistics
from flax_attn.convert.match.kinds import own_layers
from flax_attn.convert.match.tree import Branch, Group, Tensor, simplify
from flax_attn.convert.stacked import LayerSlice, children, stacked_layers, stacked_modules

# A tensor: the id of its variable, and its layer where layers are stacked.
_Key = tuple[int, int | None]
_Items = Iterator[tuple[str, Any]]
# The kinds of a module by itself whose parameters do not tell which it is.
NORMS = linen.LayerNorm | linen.RMSNorm | linen.GroupNorm
# The projections of an attention layer of Flax.
ATTENTION = {"query", "key", "value", "out"}


def jax_tree(module: Any, without: Collection[str] = ()) -> Group:
    """Return the layers of a JAX model, except the tensors of these names."""
    return simplify(_grow(_branch(module, without), ()))


def _grow(branch: Branch, path: tuple[str, ...], heads: bool = False) -> Group:
    named = branch.module is None and branch.branches.keys() >= ATTENTION
    children = [
        _grow(child, (*path, name), named and name in ATTENTION)
        for name, child in branch.branches.items()
    ]
    return Group(path, (*own_layers(branch, path, heads), *children), branch.ordered)


def _branch(module: Any, without: Collection[str]) -> Branch:
    if isinstance(module, nnx.Module):
        known = _Known(_tensors(module, without), _vmapped(module))
        return _of_nnx(module, known, set())
    if isinstance(module, linen.Module):
        return _of_bound(module, without)
    return _of_pytree(_tree_of(module), "", without)


def _tree_of(module: Any) -> Any:
    """Return the tree of parameters that a function is bound to; another module is its own."""
    return module.args[0] if is_bound(module) else module


def is_bound(module: Any) -> bool:
    """Whether this is a function that a tree of parameters is bound to, and nothing else."""
    is_partial = isinstance(module, jax.tree_util.Partial)
    return is_partial and len(module.args) == 1 and not module.keywords


class _Known(NamedTuple):
    """What is known of an NNX module: its tensors, and the counts of stacked layers by module."""

    tensors: dict[_Key, Tensor]
    counts: dict[int, int]


def _vmapped(module: nnx.Module) -> dict[int, int]:
    """Return how many layers each module holds that `nnx.vmap` has made, by its id."""
    modules = dict(nnx.iter_modules(module))
    counts = stacked_modules(modules)
    return {id(modules[path]): count for path, count in counts.items()}


def _tensors(module: nnx.Module, without: Collection[str]) -> dict[_Key, Tensor]:
    trained = parameters(module)
    tensors = {}
    for name, variable in {**trained, **statistics(module)}.items():
        if name not in without:
            tensors[_key(variable)] = Tensor(name, variable.shape, name in trained)
    return tensors


def _key(tensor: nnx.Variable | LayerSlice) -> _Key:
    if isinstance(tensor, LayerSlice):
        return id(tensor.variable), tensor.layer
    return id(tensor), None


def _of_nnx(module: Any, known: _Known, seen: set[int], layer: int | None = None) -> Branch:
    # A module may hold another that holds it.
    if id(module) in seen:
        return Branch()
    count = known.counts.get(id(module))
    if count and layer is None:
        layers = {i: (module, i) for i in range(count)}
        return _of_stacked(None, known, seen, layers)
    seen = seen | {id(module)}
    stacks = stacked_layers(module)
    if stacks:
        return _of_stacked(module, known, seen, children(module, stacks))
    tensors = {}
    branches = {}
    for name, value in _entries(module, _own_attributes):
        if isinstance(value, nnx.Variable):
            tensors[name] = known.tensors.get((id(value), layer))
        elif isinstance(value, nnx.Module | Mapping | list | tuple):
            branches[name] = _of_nnx(value, known, seen, layer)
    own = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    # The order of a mapping is that of its keys, not of construction.
    plain = isinstance(module, Mapping) and not isinstance(module, nnx.Module)
    return Branch(None if plain else module, own, branches, ordered=not plain)


def _of_stacked(
    module: Any, known: _Known, seen: set[int], layers: Mapping[int, tuple[Any, int]]
) -> Branch:
    """Return the branch of layers by their numbers, each with its place in what is stacked."""
    branches = {}
    for number, (child, index) in layers.items():
        branches[str(number)] = _of_nnx(child, known, seen, index)
    return Branch(module, branches=branches)


def _own_attributes(module: Any) -> _Items:
    for name, value in vars(module).items():
        # Flax keeps what it knows of a module as a tree under names of its own.
        if not name.startswith("_pytree__"):
            yield name, value


def _entries(tree: Any, attributes: Callable[[Any], _Items]) -> _Items:
    """Return what a container holds by its keys, and another object by its attributes."""
    if isinstance(tree, Mapping):
        return _named(tree.items())
    if isinstance(tree, nnx.List | list | tuple):
        return _named(enumerate(tree))
    return attributes(tree)


def _named(items: Iterable[tuple[Any, Any]]) -> _Items:
    return ((str(key), value) for key, value in items)


def _of_bound(module: linen.Module, without: Collection[str]) -> Branch:
    variables = module.variables if module.scope is not None else {}
    params, stats = variables.get("params", {}), variables.get("batch_stats", {})
    branch = _of_linen(params, stats, "", without)
    if not branch.branches and isinstance(module, NORMS):
        return Branch(module, branch.tensors)
    return branch


def _of_linen(
    params: Mapping[str, Any], stats: Mapping[str, Any], prefix: str, without: Collection[str]
) -> Branch:
    """Return the branch of two trees of variables; their order is not that of construction."""
    tensors = {}
    branches = {}
    for tree, trainable in ((params, True), (stats, False)):
        for name, value in tree.items():
            path = f"{prefix}{name}"
            if isinstance(value, Mapping):
                own_params = params.get(name, {})
                own_stats = stats.get(name, {})
                branches[name] = _of_linen(own_params, own_stats, f"{path}.", without)
            elif path not in without:
                tensors[name] = Tensor(path, jnp.shape(value), trainable)
    return Branch(None, tensors, branches, ordered=False)


def _of_pytree(tree: Any, prefix: str, without: Collection[str]) -> Branch:
    """Return the branch of an Equinox module: its floating arrays are its parameters."""
    tensors = {}
    branches = {}
    for name, value in _entries(tree, _fields):
        path = f"{prefix}{name}"
        if isinstance(value, jax.Array):
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            if floating and path not in without:
                tensors[name] = Tensor(path, value.shape)
        elif name == "_fun":
            # The name that equinox's own transforms, such as filter_vmap, give the module inside.
            return _of_pytree(value, prefix, without)
        elif _holds_more(value):
            branches[name] = _of_pytree(value, f"{path}.", without)
    plain = isinstance(tree, Mapping)
    return Branch(None if plain else tree, tensors, branches, ordered=not plain)


def _holds_more(value: Any) -> bool:
    known = is_dataclass(value) or isinstance(value, Mapping | list | tuple)
    return known or hasattr(value, "_fun")


def _fields(tree: Any) -> _Items:
    for field in fields(tree) if is_dataclass(tree) else ():
        if not field.metadata.get("static", False):
            # A field may never have been set.
            yield field.name, getattr(tree, field.name, None)
