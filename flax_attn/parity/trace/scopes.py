"""Name the submodules of a JAX module in the operations that it traces.

Every submodule of a copy opens a scope of `jax.named_scope` with its path, which each operation of
the jaxpr keeps. No class, no module and no function is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import jax
from flax import linen, nnx

from flax_attn.convert.api import naming

# Packages whose modules compute by a formula only where an attribute has a certain value.
FORMULA = {"flax_attn": ("backend", "reference")}


def named(module: Any) -> AbstractContextManager[Any]:
    """Make every submodule of a copy name its operations; return the context to call it in."""
    if isinstance(module, linen.Module):
        return linen.intercept_methods(_intercept)
    inside = submodules(module)
    for path, inner in inside.items():
        if callable(inner):
            _name_calls(inner, path)
    for inner in [module, *inside.values()]:
        _use_formula(inner)
    return nullcontext()


def submodules(module: Any) -> dict[str, Any]:
    """Return the submodules of an NNX or Equinox module by path, named like the parameters."""
    if isinstance(module, nnx.Module):
        names = naming(module)
        found = {}
        for path, inner in nnx.iter_modules(module):
            name = _dotted(path, names(path))
            if name:
                found[name] = inner
        return found
    return dict(_inside("", module))


def _dotted(path: tuple, names: Mapping[str, int | None]) -> str:
    # As the parameters are named; a module of stacked layers is one module.
    if len(names) == 1:
        return next(iter(names))
    return ".".join(map(str, path))


def _inside(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
    # Of equinox: a module is a tree, and so is each module in it.
    def is_inner(x: Any) -> bool:
        return x is not module and callable(x) and not jax.tree_util.all_leaves([x])

    found, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=is_inner)
    for path, inner in found:
        if not is_inner(inner):
            continue
        name = prefix + jax.tree_util.keystr(path, simple=True, separator=".")
        yield name, inner
        yield from _inside(f"{name}.", inner)


def _intercept(method: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    path = ".".join(context.module.path)
    with jax.named_scope(f"@{path}@"):
        return method(*args, **kwargs)


def _name_calls(module: Any, path: str) -> None:
    try:
        object.__setattr__(module, "__class__", _naming(type(module), path))
    # A class that takes no subclass, or has slots: its operations have the name of what calls it.
    except TypeError:
        return


@cache
def _naming(cls: type, path: str) -> type:
    """Return a subclass whose instances name the operations of their calls.

    The path is kept in the class and not in the instance, so that copies that JAX makes of it name
    theirs as well.
    """
    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for method in ("__call__", "attend"):
        function = getattr(cls, method, None)
        if callable(function):
            names[method] = _scoped(function, path)
    return type(cls)(cls.__name__, (cls,), names)


def _scoped(function: Callable, path: str) -> Callable:
    @wraps(function)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"@{path}@"):
            return function(self, *args, **kwargs)

    return scoped


def _use_formula(module: Any) -> None:
    for cls in type(module).__mro__:
        package = cls.__module__.split(".")[0]
        attribute, value = FORMULA.get(package, ("", ""))
        if attribute and isinstance(getattr(module, attribute, None), str):
            setattr(module, attribute, value)
