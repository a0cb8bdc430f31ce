"""Listening to a JAX module while it runs eagerly: its classes are wrapped for as long as that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.extend.core import get_opaque_trace_state
from jax.extend.core.primitives import name_p

from flax_attn.backends.registry import BACKENDS
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.hooks import ROOT, Listener


def paths(module: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the paths of the submodules that can be called; of a Linen module, those that hold parameters.

    Example:
        >>> paths(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), {})
        ['layers.0']
    """
    if isinstance(module, linen.Module):
        parts = [name.split(".")[:-1] for name in parameters]
        return list(dict.fromkeys(".".join(p[:i]) for p in parts for i in range(1, len(p) + 1)))
    return [path for path, inner in _submodules(module).items() if _method(type(inner)) is not None]


def run(pair: Pair, listener: Listener) -> dict[str, Any]:
    """Return the outputs of the Flax side, run eagerly with a listener; all classes are as before afterwards."""
    side = pair.flax
    assert isinstance(side, JaxAdapter), "nothing runs in the record of an earlier run"
    module = side.built()
    _use_reference(module)
    inputs = listener.enter(ROOT, (), side.arrays(pair.inputs))[1]
    with listening(module, listener):
        outputs = side.call(module, inputs, side.arrays(pair.extras))
    return listener.leave(outputs)


@contextmanager
def listening(module: Any, listener: Listener) -> Iterator[None]:
    """Tell a listener of all calls and steps. What runs inside `jax.jit`, `vmap` or `scan` cannot be told, and is not.

    Steps are the values named by `checkpoint_name`, what our softmax is given and, of any other attention,
    what goes into and comes out of `jax.nn.dot_product_attention` and `jax.nn.softmax`.
    """
    outside = get_opaque_trace_state()

    def audible() -> bool:
        return get_opaque_trace_state() == outside

    with ExitStack() as stack:
        if isinstance(module, linen.Module):
            stack.enter_context(linen.intercept_methods(_linen(listener, audible)))
        else:
            _wrap_classes(module, listener, audible, stack)
        for owner, name, make in STEPS:
            stack.enter_context(_swapped(owner, name, make(getattr(owner, name), listener, audible)))
        yield


def _wrap_classes(module: Any, listener: Listener, audible: Callable[[], bool], stack: ExitStack) -> None:
    found = {id(inner): (path, inner) for path, inner in _submodules(module).items()}
    methods = {type(inner): _method(type(inner)) for _, inner in found.values()}
    running = set()  # a method that calls that of its superclass is one call

    def wrapper(method: Any) -> Callable:
        @wraps(method)
        def call(self, *args, **kwargs):
            bound = method.__get__(self, type(self))
            if id(self) not in found or id(self) in running or not audible():
                return bound(*args, **kwargs)
            running.add(id(self))
            try:
                args, kwargs = listener.enter(found[id(self)][0], args, kwargs)
                return listener.leave(bound(*args, **kwargs))
            finally:
                running.discard(id(self))

        return call

    for cls, method in methods.items():
        if method is not None:
            stack.enter_context(_swapped(cls, "__call__", wrapper(method)))


def _method(cls: type) -> Any:
    # Not `cls.__call__`: where a class has none, that is how its metaclass makes instances.
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)


def _submodules(module: Any) -> dict[str, Any]:
    if isinstance(module, nnx.Module):
        return {".".join(map(str, path)): inner for path, inner in nnx.iter_modules(module) if path}
    return {} if jax.tree_util.all_leaves([module]) else dict(_inside("", module))


def _inside(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
    # Of equinox: a module is a tree, and so is each module in it.
    def is_inner(x: Any) -> bool:
        return x is not module and callable(x) and not jax.tree_util.all_leaves([x])

    for path, inner in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_inner)[0]:
        if is_inner(inner):
            name = prefix + jax.tree_util.keystr(path, simple=True, separator=".")
            yield name, inner
            yield from _inside(f"{name}.", inner)


def _linen(listener: Listener, audible: Callable[[], bool]) -> Callable:
    def intercept(next_function, args, kwargs, context):
        if context.method_name != "__call__" or not context.module.path or not audible():
            return next_function(*args, **kwargs)
        args, kwargs = listener.enter(".".join(context.module.path), args, kwargs)
        return listener.leave(next_function(*args, **kwargs))

    return intercept


@contextmanager
def _swapped(owner: Any, name: str, new: Any) -> Iterator[None]:
    own, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _use_reference(module: Any) -> None:
    # No other backend holds scores and weights.
    def is_ours(path: Any, inner: Any) -> bool:
        return getattr(inner, "backend", None) in ("auto", *BACKENDS)

    if isinstance(module, nnx.Module):
        module.set_attributes(is_ours, backend="reference", raise_if_not_found=False)


def _named(bind: Callable, listener: Listener, audible: Callable[[], bool]) -> Callable:
    def named(*values, name, **params):
        out = bind(*values, name=name, **params)
        return listener.step(out, name) if audible() else out

    return named


def _masked_softmax(function: Callable, listener: Listener, audible: Callable[[], bool]) -> Callable:
    def masked_softmax(scores, visible, sinks=None):
        if not audible():
            return function(scores, visible, sinks)
        masked = jnp.where(visible, scores, -jnp.inf)
        heard = listener.step(masked, "masked")
        return function(heard, visible if heard is masked else heard > -jnp.inf, sinks)

    return masked_softmax


def _softmax(function: Callable, listener: Listener, audible: Callable[[], bool]) -> Callable:
    def softmax(x, *args, **kwargs):
        if not audible():
            return function(x, *args, **kwargs)
        # Where a weight is exactly 0 the score was hidden, whatever number was used to hide it.
        masked = jnp.where(function(x, *args, **kwargs) == 0, -jnp.inf, x)
        heard = listener.step(masked, "masked")
        return listener.step(function(x if heard is masked else heard, *args, **kwargs), "weights")

    return softmax


def _attention(function: Callable, listener: Listener, audible: Callable[[], bool]) -> Callable:
    def dot_product_attention(query, key, value, *args, **kwargs):
        if not audible():
            return function(query, key, value, *args, **kwargs)
        query, key, value = (listener.step(x, n) for n, x in (("query", query), ("key", key), ("value", value)))
        return listener.step(function(query, key, value, *args, **kwargs), "context")

    return dot_product_attention


STEPS = (
    (name_p, "bind", _named),
    (jax.nn, "softmax", _softmax),
    (jax.nn, "dot_product_attention", _attention),
)
