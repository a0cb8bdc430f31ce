"""A call of a JAX module in which what its source, or that of JAX, names float32 is float64."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Their own source is left as it is: what a layer computes in float32 does not depend on the port.
_LIBRARIES = {"builtins", "equinox", "flax", "flax_attn", "haiku", "jax", "keras", "numpy", "torch"}


# Where JAX takes a softmax in float32 whatever it is given.
_ATTENTION = "jax._src.nn.functions"


@contextmanager
def named_float32_as_float64(*parts: Any) -> Iterator[None]:
    """Read float32 as float64 in JAX's attention, and in what is written where these parts are.

    It is read so in the Python modules that define them, their submodules, and functions that those
    use. A name of float32 elsewhere, such as in the default of an argument, stays as it is.
    """
    sources = _sources(parts)
    if _ATTENTION in sys.modules:
        sources.append(sys.modules[_ATTENTION])
    with ExitStack() as stack:
        for source in sources:
            # A list, as names are replaced meanwhile.
            held = vars(source)
            names = list(held.items())
            for name, value in names:
                wider = _wider(value)
                if wider is not value:
                    replaced = mock.patch.object(source, name, wider)
                    stack.enter_context(replaced)
        yield


def _sources(parts: Iterable[Any]) -> list[ModuleType]:
    """Return the modules of Python in which these parts are written, except for libraries."""
    own = set()
    for part in parts:
        inner = [node for _, node in nnx.iter_graph(part)] if isinstance(part, nnx.Module) else []
        own |= {_source(node) for node in (part, *inner)}
    for source in own & sys.modules.keys():
        if _is_own(source):
            values = vars(sys.modules[source]).values()
            own = own | {_source(value) for value in values if isinstance(value, FunctionType)}
    return [sys.modules[source] for source in sorted(own) if _is_own(source)]


def _source(part: Any) -> str:
    return getattr(part, "__module__", None) or ""


def _is_own(source: str) -> bool:
    return source in sys.modules and source.partition(".")[0] not in _LIBRARIES


class _Wider:
    """A module of arrays whose float32 is float64."""

    def __init__(self, module: ModuleType, **changes: Any):
        self._module = module
        vars(self).update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _wider(value: Any) -> Any:
    if value is jnp.float32 or value is np.float32:
        return jnp.float64
    if value is jnp or value is np:
        return _Wider(value, float32=value.float64)
    return _Wider(jax, numpy=_wider(jnp)) if value is jax else value
