"""The layers of a JAX model: of NNX, bound Linen or Equinox."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_attn.convert.api import parameters, statistics
from flax_attn.convert.match.kinds import own_layers
from flax_attn.convert.match.tree import Branch, Group, Tensor, simplify
from flax_attn.convert.stacked import LayerSlice, children, stacked_layers

_Key = tuple[
    int, int | None
]  # of a tensor: that of its variable, and its layer where layers are stacked
NORMS = (
    linen.LayerNorm | linen.RMSNorm | linen.GroupNorm
)  # a module by itself whose parameters do not tell its kind
ATTENTION = {"query", "key", "value", "out"}  # the projections of an attention layer of Flax


def jax_tree(module: Any, without: Collection[str] = ()) -> Group:
    """Return the layers of a JAX model, but for the tensors of these names."""
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
        known = {_key(p): Tensor(name, p.shape) for name, p in parameters(module).items()}
        known |= {_key(s): Tensor(name, s.shape, False) for name, s in statistics(module).items()}
        return _of_nnx(module, {at: t for at, t in known.items() if t.name not in without}, set())
    if isinstance(module, linen.Module):
        variables = module.variables if module.scope is not None else {}
        params, stats = variables.get("params", {}), variables.get("batch_stats", {})
        branch = _of_linen(params, stats, "", without)
        return (
            branch
            if branch.branches or not isinstance(module, NORMS)
            else Branch(module, branch.tensors)
        )
    return _of_pytree(module, "", without)


def _key(tensor: nnx.Variable | LayerSlice) -> _Key:
    return (
        (id(tensor.variable), tensor.layer)
        if isinstance(tensor, LayerSlice)
        else (id(tensor), None)
    )


def _of_nnx(
    module: Any, known: Mapping[_Key, Tensor], seen: set[int], layer: int | None = None
) -> Branch:
    tensors, branches = {}, {}
    if id(module) in seen:  # a module may hold another that holds it
        return Branch()
    seen = seen | {id(module)}
    if layers := stacked_layers(module):
        found = children(module, layers).items()
        return Branch(
            module, branches={str(n): _of_nnx(child, known, seen, i) for n, (child, i) in found}
        )
    for name, value in _attributes(module):
        if isinstance(value, nnx.Variable):
            at = (id(value), layer)
            tensors |= {name: known[at]} if at in known else {}
        elif isinstance(value, nnx.Module | Mapping | list | tuple):
            branches[name] = _of_nnx(value, known, seen, layer)
    plain = isinstance(module, Mapping) and not isinstance(module, nnx.Module)
    return Branch(None if plain else module, tensors, branches, ordered=not plain)


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(module, Mapping):
        items = module.items()
    elif isinstance(module, nnx.List | list | tuple):
        items = enumerate(module)
    else:
        items = (
            (name, value)
            for name, value in vars(module).items()
            if not name.startswith("_pytree__")
        )
    return ((str(name), value) for name, value in items)


def _of_linen(
    params: Mapping[str, Any], stats: Mapping[str, Any], prefix: str, without: Collection[str]
) -> Branch:
    """Return the branch of two trees of variables; their order is not that of construction."""
    tensors, branches = {}, {}
    for tree, trainable in ((params, True), (stats, False)):
        for name, value in tree.items():
            if isinstance(value, Mapping):
                inner = params.get(name, {}), stats.get(name, {})
                branches[name] = _of_linen(*inner, f"{prefix}{name}.", without)
            elif f"{prefix}{name}" not in without:
                tensors[name] = Tensor(f"{prefix}{name}", jnp.shape(value), trainable)
    return Branch(None, tensors, branches, ordered=False)


def _of_pytree(tree: Any, prefix: str, without: Collection[str]) -> Branch:
    """Return the branch of an Equinox module: its floating arrays are its parameters."""
    tensors, branches = {}, {}
    for name, value in _leaves(tree):
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jnp.floating) and prefix + name not in without:
                tensors[name] = Tensor(prefix + name, value.shape)
        elif (
            name == "_fun"
        ):  # what equinox's own transforms, such as filter_vmap, call the module inside them
            return _of_pytree(value, prefix, without)
        elif (
            is_dataclass(value)
            or isinstance(value, Mapping | list | tuple)
            or hasattr(value, "_fun")
        ):
            branches[name] = _of_pytree(value, f"{prefix}{name}.", without)
    plain = isinstance(tree, Mapping)
    return Branch(None if plain else tree, tensors, branches, ordered=not plain)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif is_dataclass(tree):
        names = [field.name for field in fields(tree) if not field.metadata.get("static", False)]
        items = ((name, getattr(tree, name, None)) for name in names)
    else:
        items = ()
    return ((str(name), value) for name, value in items)
