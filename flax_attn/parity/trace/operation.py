"""One operation of a jaxpr, to run it on other operands or with other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_attn.parity.jaxprs import bind
from flax_attn.parity.trace import jax_names

Operands = Sequence[Any]
Compute = Callable[[Operands], Any]


@dataclass(frozen=True)
class Operation:
    """An operation of a jaxpr.

    Args:
        equation: equation of the jaxpr.
        makers: equations of the same jaxpr, by the variable that they define.
    """

    equation: Any
    makers: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def primitive(self) -> str:
        """The name of the operation in JAX."""
        return self.equation.primitive.name

    @property
    def name(self) -> str:
        """The name of the operation in plain notation; of a compiled function, its own."""
        own = self.equation.params.get("name")
        return own if isinstance(own, str) else jax_names.name_of(self.equation)

    @property
    def given(self) -> list[Any]:
        """The shapes and dtypes of the operands."""
        return [atom.aval for atom in self.equation.invars]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.equation.outvars[0].aval.shape

    @property
    def kind(self) -> str:
        """The kind of the dtype of the result: `"f"`, `"i"`, `"b"`, or `""` of a key."""
        dtype = self.equation.outvars[0].aval.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return "f"
        return np.dtype(dtype).kind if isinstance(dtype, np.dtype) else ""

    @property
    def axes(self) -> list[int]:
        """The axes of the result along which there is an order."""
        return [axis for axis, size in enumerate(self.shape) if size > 1]

    def run(self, operands: Operands, **changes: Any) -> Any:
        """Return the result, with changed parameters."""
        return bind(self.equation, operands, **changes)[0]

    def constants(self) -> Iterator[tuple[int, float]]:
        """Yield the operands that are written as numbers: index and value."""
        for i, atom in enumerate(self.equation.invars):
            if isinstance(atom, Literal) and np.ndim(atom.val) == 0:
                yield i, float(atom.val)


def after(change: Callable[[Any], Any], op: Operation) -> Compute:
    """Return the operation with a change of its result."""
    return lambda operands: change(op.run(operands))


def on_changed(op: Operation, i: int, change: Callable[[Any], Any]) -> Compute:
    """Return the operation with a change of one operand."""

    def compute(operands: Operands) -> Any:
        given = list(operands)
        given[i] = change(given[i])
        return op.run(given)

    return compute


def only(op: Operation, i: int) -> Compute:
    """Return a function of the operands that returns one of them in the place of the result."""
    return lambda operands: jnp.broadcast_to(operands[i], op.shape)
