"""Mark values in a jaxpr, and evaluate it with an observer of marks, names and softmaxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.extend.core.primitives import name_p
from jax.interpreters import ad, batching, mlir

from flax_attn.parity.trace.hooks import Observer

INLINED = ("jit", "pjit", "remat2", "checkpoint", "closed_call")
RESHAPES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "stop_gradient", "max", "copy")

mark_p = Primitive("mark")
mark_p.multiple_results = True
mark_p.def_impl(lambda *values, **event: list(values))
mark_p.def_abstract_eval(lambda *values, **event: list(values))
mlir.register_lowering(mark_p, lambda context, *values, **event: values)
ad.primitive_jvps[mark_p] = lambda primals, tangents, **event: (
    mark_p.bind(*primals, **event),
    list(tangents),
)


def _mapped(
    values: Sequence[Any], axes: Sequence[Any], **event: str
) -> tuple[list[Any], list[Any]]:
    first = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, axes, strict=True)
    ]
    return mark_p.bind(*first, **event), [None if axis is None else 0 for axis in axes]


batching.primitive_batchers[mark_p] = _mapped


def mark(values: tuple[Any, ...], **event: str) -> tuple[Any, ...]:
    """Return arrays unchanged; while tracing, add an operation with this event to the jaxpr."""
    return tuple(mark_p.bind(*values, **event))


def evaluate(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], observer: Observer
) -> list[Any]:
    """Return the outputs of a jaxpr, each mark, name and softmax in it told to an observer."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    softmaxes = {eqn.outvars[0]: found for eqn, found in _softmaxes(jaxpr)}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        found = _evaluated(eqn, [read(atom) for atom in eqn.invars], observer)
        for x, axes in (softmaxes[made] for made in eqn.outvars if made in softmaxes):
            found = [_observed_softmax(read(x), found[0], axes, observer)]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluated(eqn: Any, values: list[Any], observer: Observer) -> Sequence[Any]:
    if eqn.primitive is mark_p:
        return _observed_mark(eqn.params, values, observer)
    if eqn.primitive is name_p:
        return [observer.step(values[0], eqn.params["name"])]
    inner = eqn.params.get("jaxpr")
    if eqn.primitive.name in INLINED and _has_events(inner):
        return evaluate(_opened(inner), getattr(inner, "consts", ()), values, observer)
    for operation, dtype in _operations(eqn):
        observer.computed(operation, dtype)
    if any(id(value) in observer.tables for value in values):
        observer.computed("table", "float32")
    with eqn.ctx.manager:
        result = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return result if eqn.primitive.multiple_results else [result]


def _observed_mark(
    event: Mapping[str, str], values: list[Any], observer: Observer
) -> Sequence[Any]:
    if event["event"] == "step":
        return [observer.step(values[0], event["name"])]
    return (
        observer.enter(event["name"], tuple(values))
        if event["event"] == "enter"
        else observer.leave(tuple(values))
    )


def _observed_softmax(x: Any, weights: Any, axes: tuple[int, ...], observer: Observer) -> Any:
    observer.computed("softmax", str(x.dtype))
    # Where a weight is exactly 0 the score was hidden, whatever number was used to hide it.
    masked = jnp.where(weights == 0, -jnp.inf, x)
    new = observer.step(masked, "masked")
    if new is not masked:
        top = new.max(axes, keepdims=True)
        exps = jnp.exp(new - jnp.where(jnp.isfinite(top), top, 0))
        total = exps.sum(axes, keepdims=True)
        weights = exps / jnp.where(
            total == 0, 1, total
        )  # where all is hidden by -inf on the other side, none
    return observer.step(weights, "weights")


def _opened(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)  # a ClosedJaxpr holds a Jaxpr


def _inner(eqn: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns"):
            yield _opened(value)


def _has_events(jaxpr: Any) -> bool:
    jaxpr = _opened(jaxpr)
    events = (
        eqn.primitive in (mark_p, name_p) or any(map(_has_events, _inner(eqn)))
        for eqn in jaxpr.eqns
    )
    return any(events) or any(True for _ in _softmaxes(jaxpr))


def _operations(eqn: Any) -> Iterator[tuple[str, str]]:
    casts = eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.float64
    name = "cast" if casts else eqn.primitive.name
    yield from ((name, str(x.aval.dtype)) for x in eqn.outvars if hasattr(x.aval, "dtype"))
    for jaxpr in _inner(eqn):
        for inner in jaxpr.eqns:
            yield from _operations(inner)


def _softmaxes(jaxpr: Any) -> Iterator[tuple[Any, tuple[Any, tuple[int, ...]]]]:
    """Yield the division that ends each softmax, with its input and the axes of its sum."""
    made = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}

    def origin(atom: Any, name: str) -> Any:
        """Return the operation of this name that a value comes from, but for changes of shape."""
        eqn = None if isinstance(atom, Literal) else made.get(atom)
        if eqn is None or eqn.primitive.name == name:
            return eqn
        operands = [x for x in eqn.invars if not isinstance(x, Literal)]
        return (
            origin(operands[0], name)
            if eqn.primitive.name in RESHAPES and len(operands) == 1
            else None
        )

    def untransposed(atom: Any) -> Any:
        eqn = None if isinstance(atom, Literal) else made.get(atom)
        return (
            atom
            if eqn is None or eqn.primitive.name != "transpose"
            else untransposed(eqn.invars[0])
        )

    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "div" or any(isinstance(atom, Literal) for atom in eqn.invars):
            continue
        exp, total = made.get(eqn.invars[0]), origin(eqn.invars[1], "reduce_sum")
        if (
            exp is None
            or exp.primitive.name != "exp"
            or total is None
            or total.invars[0] is not eqn.invars[0]
        ):
            continue
        shifted = origin(exp.invars[0], "sub")
        top = origin(shifted.invars[1], "reduce_max") if shifted else None
        if shifted and top and untransposed(top.invars[0]) is untransposed(shifted.invars[0]):
            yield eqn, (shifted.invars[0], tuple(map(int, total.params["axes"])))
