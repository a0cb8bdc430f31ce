"""Any JAX module as parameters by name, the rest of it, and a way to put both together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_attn.convert.api import naming
from flax_attn.parity.adapters.adapter import PairingError, check_kind


class Parts(NamedTuple):
    """A module taken apart.

    Args:
        params: the parameters, by dotted name.
        rest: a tree of everything else that is an array.
        build: makes the module again from both.
        call: its method that is called, for its signature.
    """

    params: dict[str, jax.Array]
    rest: Any
    build: Callable[[Mapping[str, jax.Array], Any], Any]
    call: Callable


def take_apart(module: Any, train: bool = False) -> Parts:
    """Return the parts of an NNX module, a bound Linen module, an equinox module or a plain function.

    The module itself is left as it is; the parts are those of a copy in train or in eval mode, where it has modes.

    Raises:
        PairingError: if it is none of these, or a Linen module without variables.

    Example:
        >>> sorted(take_apart(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).params)
        ['bias', 'kernel']
    """
    rule = "the Flax side is an NNX module, a bound Linen module, an equinox module or a function of arrays"
    check_kind(module, rule, {"torch": "PyTorch"})
    if isinstance(module, nnx.Module):
        return _nnx(module, train)
    if isinstance(module, linen.Module):
        return _linen(module)
    if not jax.tree_util.all_leaves([module]):
        return _pytree(module, train)
    return Parts({}, {}, lambda params, rest: module, module)


def _nnx(module: nnx.Module, train: bool) -> Parts:
    copy = nnx.clone(module)
    (copy.train if train else copy.eval)()
    for _, embed in nnx.iter_modules(copy):
        # The one layer that takes the dtype of its parameter when it is built; it is to follow that in every run.
        if isinstance(embed, nnx.Embed) and embed.dtype == embed.embedding.dtype:
            embed.dtype = None
    graph, params, rest = nnx.split(copy, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(params))
    name = naming(copy)
    paths = {name(path): path for path in flat}

    def build(params: Mapping[str, jax.Array], rest: Any) -> nnx.Module:
        state = nnx.from_flat_state([(path, flat[path].replace(params[name])) for name, path in paths.items()])
        return nnx.merge(graph, state, rest, copy=True)  # a Variable can be changed where it was made alone

    return Parts({name: flat[path].get_value() for name, path in paths.items()}, rest, build, type(module).__call__)


def _linen(module: linen.Module) -> Parts:
    if module.scope is None:
        raise PairingError(
            f"{type(module).__name__} is a Linen module without variables. Pass module.bind(variables), "
            "or flax.nnx.bridge.ToNNX(module, rngs).lazy_init(inputs)"
        )
    unbound, variables = module.unbind()
    paths = jax.tree_util.tree_flatten_with_path(variables.get("params", {}))
    rest = {name: value for name, value in variables.items() if name != "params"}

    def build(params: Mapping[str, jax.Array], rest: Any) -> linen.Module:
        tree = jax.tree.unflatten(paths[1], [params[_dotted(path)] for path, _ in paths[0]])
        return unbound.bind({"params": tree, **rest})

    return Parts({_dotted(path): leaf for path, leaf in paths[0]}, rest, build, type(module).__call__)


def _pytree(module: Any, train: bool) -> Parts:
    # An equinox module is a pytree with arrays for leaves; the floating ones are its parameters.
    if type(module).__module__.startswith("equinox") or hasattr(module, "__dataclass_fields__"):
        module = _inference(module, not train)
    leaves, tree = jax.tree_util.tree_flatten_with_path(module)
    is_param = [isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in leaves]
    params = {_dotted(path): leaf for (path, leaf), yes in zip(leaves, is_param, strict=True) if yes}
    static = {_dotted(path): leaf for (path, leaf), yes in zip(leaves, is_param, strict=True) if not yes}

    def build(params: Mapping[str, jax.Array], rest: Any) -> Any:
        return jax.tree.unflatten(tree, [{**static, **params}[_dotted(path)] for path, _ in leaves])

    return Parts(params, {}, build, type(module).__call__)


def _inference(module: Any, value: bool) -> Any:
    import equinox

    return equinox.nn.inference_mode(module, value)


def _dotted(path: Any) -> str:
    # `_fun` is what equinox's own transforms, such as filter_vmap, call the module inside them.
    names = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    return ".".join(name for name in names if name != "_fun")
