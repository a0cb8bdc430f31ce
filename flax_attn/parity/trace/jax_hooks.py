"""Observe a JAX module: trace a copy of it once, and read calls and steps from the jaxpr.

Every submodule of the copy marks its inputs and its output by an operation that does nothing. The
marked jaxpr is then evaluated, operation by operation, as often as something is to be recorded or
replaced. No class, no module and no function is patched: what runs elsewhere in the process is not
affected.

Steps are values named by `jax.ad_checkpoint.checkpoint_name`; the input and output of every
softmax, which is recognised by its formula, `exp(x - max(x)) / sum(exp(x - max(x)))`, whoever wrote
it; and what an `attention_fn`, as Flax's attention has it, takes and returns. What runs inside
`jax.jit`, `jax.checkpoint` and `jax.vmap` is observed as well, the mapped axis first; what runs
inside `scan`, `while_loop` and `cond` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from flax_attn.convert.api import naming
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.hooks import ROOT, Observer, floats, replaced, weighs
from flax_attn.parity.trace.jaxpr import evaluate, mark
from flax_attn.parity.trace.tables import tables_of_flax

# Packages whose modules name their scores and weights only where an attribute has a certain value.
NAMING_BACKEND = {"flax_attn": ("backend", "reference")}
# Compiled for one run: quickly, and with every rounding that the module asks for.
COMPILER = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}


@dataclass(frozen=True)
class TracedModule:
    """The forward pass of the Flax side in float64 and eval mode, as a jaxpr with marks.

    Args:
        jaxpr: jaxpr with the inputs as its arguments.
        constants: constants of the jaxpr, including the parameters.
        inputs: arguments of the jaxpr.
        output: tree structure of its result, a mapping of arrays.
        tables: constants other than parameters that hold numbers of float32.
    """

    jaxpr: Any
    constants: list[Any]
    inputs: list[Any]
    output: Any
    tables: frozenset[int] = frozenset()

    def run(self, observer: Observer) -> dict[str, jax.Array]:
        """Return the outputs, evaluated one operation after another while an observer follows."""
        return self._run(self.constants, self.inputs, observer)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `function(run, *arrays)` into a function of `arrays`; `run` is as the method."""

        def whole(constants: list[Any], inputs: list[Any], *arrays: Any) -> Any:
            return function(lambda observer: self._run(constants, inputs, observer), *arrays)

        jitted = jax.jit(whole, compiler_options=COMPILER)
        return lambda *arrays: jitted(self.constants, self.inputs, *arrays)

    def _run(
        self, constants: list[Any], inputs: list[Any], observer: Observer
    ) -> dict[str, jax.Array]:
        observer.tables = frozenset(id(constants[i]) for i in self.tables)
        floating = floats(inputs)
        inputs = replaced(inputs, floating, observer.enter(ROOT, floating))
        found = evaluate(self.jaxpr, constants, inputs, observer)
        output = floats(found)[:1]
        return jax.tree.unflatten(self.output, replaced(found, output, observer.leave(output)))


def trace(pair: Pair) -> TracedModule:
    """Return the forward pass of the Flax side of a pair."""
    adapter = pair.flax
    assert isinstance(adapter, JaxAdapter), "the record of an earlier run cannot be traced"

    def forward(inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        module = adapter.built()
        with _marked(module):
            return adapter.call(module, inputs, adapter.arrays(pair.extras))

    inputs = adapter.arrays(pair.inputs)
    closed, output = jax.make_jaxpr(forward, return_shape=True)(inputs)
    tables = tables_of_flax(pair, closed.consts)
    return TracedModule(
        closed.jaxpr, closed.consts, jax.tree.leaves(inputs), jax.tree.structure(output), tables
    )


def paths(module: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the paths of callable submodules; for Linen, of submodules that hold parameters.

    Example:
        >>> paths(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), {})
        ['0']
    """
    if isinstance(module, linen.Module):
        parts = [name.split(".")[:-1] for name in parameters]
        return list(dict.fromkeys(".".join(p[:i]) for p in parts for i in range(1, len(p) + 1)))
    return [path for path, inner in submodules(module).items() if callable(inner)]


def submodules(module: Any) -> dict[str, Any]:
    """Return the submodules of an NNX or Equinox module by path, named like the parameters."""
    if isinstance(module, nnx.Module):
        names = naming(module)
        return {
            name: inner
            for path, inner in nnx.iter_modules(module)
            if (name := _dotted(path, names(path)))
        }
    return {} if jax.tree_util.all_leaves([module]) else dict(_inside("", module))


def _dotted(path: tuple, names: Mapping[str, int | None]) -> str:
    # As the parameters are named; a module of stacked layers is one module.
    return next(iter(names)) if len(names) == 1 else ".".join(map(str, path))


def _inside(prefix: str, module: Any) -> Iterator[tuple[str, Any]]:
    # Of equinox: a module is a tree, and so is each module in it.
    def is_inner(x: Any) -> bool:
        return x is not module and callable(x) and not jax.tree_util.all_leaves([x])

    for path, inner in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_inner)[0]:
        if is_inner(inner):
            name = prefix + jax.tree_util.keystr(path, simple=True, separator=".")
            yield name, inner
            yield from _inside(f"{name}.", inner)


# Marks.


def _marked(module: Any) -> Any:
    """Make every submodule of a copy mark its calls; return the context to call it in."""
    if isinstance(module, linen.Module):
        return linen.intercept_methods(_intercept)
    for path, inner in submodules(module).items():
        if callable(inner):
            _mark_calls(inner, path)
    for inner in [module, *submodules(module).values()]:
        _name_steps(inner)
    return nullcontext()


def _intercept(method: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if context.method_name != "__call__" or not context.module.path:
        return method(*args, **kwargs)
    return _call(".".join(context.module.path), method, args, kwargs)


def _mark_calls(module: Any, path: str) -> None:
    try:
        object.__setattr__(module, "__class__", _marking(type(module), path))
    except TypeError:  # a class that takes no subclass, or has slots: its calls are not observed
        return


@cache
def _marking(cls: type, path: str) -> type:
    """Return a subclass whose instances mark their calls.

    The path is kept in the class and not in the instance, so that copies that JAX makes of it mark
    theirs as well.
    """

    @wraps(cls.__call__)
    def call(self, *args, **kwargs):
        return _call(path, super(marking, self).__call__, args, kwargs)  # pyright: ignore

    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if weighs(cls):

        @wraps(cls.attend)
        def attend(self, *args, **kwargs):
            return _call(path, super(marking, self).attend, args, kwargs)  # pyright: ignore

        names["attend"] = attend
    marking = type(cls)(cls.__name__, (cls,), names)
    return marking


def _call(path: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    if _innermost.get() == path:  # its own `attend`
        return function(*args, **kwargs)
    outer = _innermost.set(path)
    try:
        return _marked_call(path, function, args, kwargs)
    finally:
        _innermost.reset(outer)


_innermost: ContextVar[str] = ContextVar("path of the innermost call", default="")


def _marked_call(path: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    args, kwargs = _mark((args, kwargs), _jax_floats((args, kwargs)), event="enter", name=path)
    result = function(*args, **kwargs)
    return _mark(result, _jax_floats(result)[:1], event="leave", name=path)


def _mark(tree: Any, values: tuple, **event: str) -> Any:
    return replaced(tree, values, mark(values, **event))


def _jax_floats(tree: Any) -> tuple[Any, ...]:
    return tuple(x for x in floats(tree) if isinstance(x, jax.Array | np.ndarray))


def _name_steps(module: Any) -> None:
    for cls in type(module).__mro__:
        attribute, value = NAMING_BACKEND.get(cls.__module__.split(".")[0], ("", ""))
        if attribute and isinstance(getattr(module, attribute, None), str):
            setattr(module, attribute, value)
    attention = getattr(module, "attention_fn", None)
    if callable(attention) and isinstance(module, nnx.Module):
        setattr(module, "attention_fn", _stepping(attention))  # noqa: B010, an attribute of some modules


def _stepping(attention: Callable) -> Callable:
    @wraps(attention)
    def stepping(query, key, value, *args, **kwargs):
        named = (
            _mark(x, (x,), event="step", name=n)
            for x, n in ((query, "query"), (key, "key"), (value, "value"))
        )
        context = attention(*named, *args, **kwargs)
        return _mark(context, (context,), event="step", name="context")

    return stepping
