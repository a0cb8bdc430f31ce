"""Both sides of a port as functions of the same named arrays, and their differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Values = Mapping[str, Any]
LONG = 101  # tokens
# Smallest scale of a gradient, as a fraction of the largest gradient. Smaller gradients, such as
# those that are rounding alone, are compared on this scale.
UNFELT = 1e-3
STRESSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "times 100": lambda x: 100 * x,
    # Gates saturate later than at 100, so their gradients are more than rounding.
    "times 10": lambda x: 10 * x,
    "times 1/1000": lambda x: x / 1000,
    "plus 1000": lambda x: x + 1000,
    "long": lambda x: np.random.default_rng(7).normal(size=(x.shape[0], LONG, *x.shape[2:])),
}


class JaxError(Exception):
    """The JAX side raises an error where the PyTorch side does not."""


@dataclass(frozen=True)
class Case:
    """One configuration of a port.

    Args:
        ours: the JAX side, a function of the values and of a mask `(b, t)`, True for tokens, or
            None.
        theirs: the PyTorch side, a function of the same arguments.
        values: parameters and floating inputs, by the names of the PyTorch side.
        inputs: names of the values that are inputs.
        tokens: the shape `(b, t)` if there is padding.
        stresses: names in `STRESSES` of the changes to the inputs.
    """

    ours: Callable[[Values, Any], Any]
    theirs: Callable[[Values, Any], Any]
    values: Mapping[str, np.ndarray]
    inputs: Sequence[str] = ()
    tokens: tuple[int, int] | None = None
    stresses: Sequence[str] = ()


def random_values(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return random numbers by name; what scales a norm is near 1, a variance is positive."""
    random = np.random.default_rng(20)
    found = {}
    for name, shape in shapes.items():
        x = random.normal(size=tuple(shape))
        found[name] = 0.5 + x**2 if name.endswith("running_var") else 0.3 * x
        if len(shape) == 1 and name.endswith(("weight", "original0")):
            found[name] = 1 + 0.3 * x
    return found


def placed(own: Mapping[str, Sequence[int]], values: Values) -> Values:
    """Return values for the parameters of a JAX module.

    Raises:
        ValueError: if its parameters have other names or shapes.
    """
    wrong = {(name, tuple(shape)) for name, shape in own.items()} ^ {
        (name, x.shape) for name, x in values.items()
    }
    if wrong:
        found = ", ".join(f"{name} {shape}" for name, shape in sorted(wrong))
        raise ValueError(
            f"one of the module and what is placed in it lacks {found}: place each of its"
            " parameters"
        )
    return values


def layer_case(
    twin: torch.nn.Module,
    inputs: Mapping[str, Sequence[int]],
    ours: Callable[..., Any],
    theirs: Callable[..., Any] | None = None,
    padded: bool = False,
    stresses: Sequence[str] = (),
    absent: Sequence[str] = (),
) -> Case:
    """Return the case of a layer whose PyTorch side is a module.

    Args:
        twin: the PyTorch side.
        inputs: shapes by name.
        ours: the JAX side.
        theirs: how to call the twin: `theirs(run, mask, *inputs)`; None is `run(*inputs)`.
        padded: whether there is padding.
        stresses: names in `STRESSES` of the changes to the inputs.
        absent: names of parameters that the JAX side lacks; they are 0.
    """
    twin = twin.eval().double()
    shapes = {name: p.shape for name, p in twin.named_parameters() if name not in absent}
    for name in absent:
        torch.nn.init.zeros_(twin.get_parameter(name))
    random = np.random.default_rng(21)
    values = random_values(shapes) | {
        name: random.normal(size=tuple(shape)) for name, shape in inputs.items()
    }

    def call(v: Values, mask: Any) -> Any:
        given = [v[name] for name in inputs]

        def run(*arguments: Any, **options: Any) -> Any:
            return call_with(twin, {name: v[name] for name in shapes}, *arguments, **options)

        return run(*given) if theirs is None else theirs(run, mask, *given)

    first = next(iter(inputs.values()))
    tokens = (first[0], first[1]) if padded else None
    return Case(ours, call, values, tuple(inputs), tokens, tuple(stresses))


def call_with(module: torch.nn.Module, values: Values, *arguments: Any, **options: Any) -> Any:
    """Call a module with tensors in place of its parameters and buffers, wherever they are tied to.

    torch.func.functional_call leaves a module that stands in several places, such as a shared
    embedding, untied.
    """
    taken = dict(module.named_parameters()) | dict(module.named_buffers())
    names = {id(taken[name]): name for name in values}
    tables = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({key: values[names[id(x)]] for key, x in table.items() if id(x) in names})
    try:
        return module(*arguments, **options)
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.update(kept)


def measures(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the errors on plain, padded and stress inputs, and with one fully padded row."""
    run = jax.jit(jax.value_and_grad(_weighted(case.ours), has_aux=True))
    yield _measure(case, run, "plain", case.values, None)
    if case.tokens:
        rows, tokens = case.tokens
        lengths = np.linspace(tokens, tokens // 3, rows).astype(int)
        yield _attempt(case, run, "padding", case.values, lengths)
        yield _attempt(
            case, run, "a row of padding", case.values, np.where(np.arange(rows) == 1, 0, lengths)
        )
    for name in case.stresses:
        change = STRESSES[name]
        values = {key: change(x) if key in case.inputs else x for key, x in case.values.items()}
        yield _attempt(case, run, name, values, None)


def _attempt(case: Case, run: Callable, name: str, values: Values, lengths: Any) -> dict[str, Any]:
    try:
        return _measure(case, run, name, values, lengths)
    except JaxError as error:  # for these inputs alone
        return {"inputs": name, "raises": str(error).strip()[:200]}


def _weighted(call: Callable) -> Callable:
    def loss(values, mask, weights):
        outputs = named(call(values, mask))
        return sum((w * outputs[name]).sum() for name, w in weights.items()), outputs

    return loss


def named(outputs: Any) -> dict[str, Any]:
    """Return the floating arrays of outputs by name: of dicts by key, of sequences by place."""
    if hasattr(outputs, "items"):
        parts = {name: named(part) for name, part in outputs.items()}
    elif isinstance(outputs, tuple | list):
        parts = {str(place): named(part) for place, part in enumerate(outputs)}
    else:
        return {"": outputs}
    return {
        f"{name}.{rest}".rstrip("."): x for name, part in parts.items() for rest, x in part.items()
    }


def _measure(case: Case, run: Callable, name: str, values: Values, lengths: Any) -> dict[str, Any]:
    mask = None if lengths is None else np.arange(case.tokens[1]) < lengths[:, None]
    # A row of padding is compared whole.
    seen = None if mask is None else mask | ~mask.any(axis=1, keepdims=True)
    weights = _weights(case, values, mask, seen)
    exact, gradients = _torch_side(case, values, mask, weights)
    arrays = {key: jnp.asarray(x) for key, x in values.items()}
    try:
        (_, outputs), ours = run(arrays, None if mask is None else jnp.asarray(mask), weights)
    except Exception as error:
        raise JaxError(f"{type(error).__name__}: {error}") from error
    found = {
        "outputs": relative(_where(outputs, seen), _where(exact, seen)),
        "gradients": relative(ours, gradients, UNFELT),
    }
    draws = [_torch_side(case, _perturbed(values, seed), mask, weights) for seed in range(2)]
    rounding = {
        "outputs": max(
            relative(_where(outputs, seen), _where(exact, seen)) for outputs, _ in draws
        ),
        "gradients": max(relative(other, gradients, UNFELT) for _, other in draws),
    }
    return {"inputs": name, **found, "rounding": rounding}


def _weights(case: Case, values: Values, mask: Any, seen: Any) -> dict[str, np.ndarray]:
    with torch.no_grad():
        outputs = _call_torch(case, {name: torch.tensor(x) for name, x in values.items()}, mask)
    random = np.random.default_rng(22)
    return _where({name: random.normal(size=tuple(x.shape)) for name, x in outputs.items()}, seen)


def _call_torch(case: Case, values: Values, mask: Any) -> dict[str, torch.Tensor]:
    # The fused kernel for CPUs gives wrong gradients in rows that are masked as a whole by the
    # lowest number.
    with sdpa_kernel(SDPBackend.MATH):
        return named(case.theirs(values, None if mask is None else torch.tensor(mask)))


def _torch_side(
    case: Case, values: Values, mask: Any, weights: Values
) -> tuple[dict[str, Any], dict[str, Any]]:
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in values.items()}
    outputs = _call_torch(case, leaves, mask)
    loss = sum((torch.tensor(w) * outputs[name]).sum() for name, w in weights.items())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return {name: x.detach().numpy() for name, x in outputs.items()}, gradients


def _perturbed(values: Values, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: x * (1 + 2.0**-52 * random.choice([-1, 1], x.shape)) for name, x in values.items()
    }


def _where(arrays: Values, seen: Any) -> dict[str, np.ndarray]:
    """Return arrays with 0 at padding."""
    found = {name: np.asarray(x) for name, x in arrays.items()}
    if seen is None:
        return found
    return {
        name: (
            np.where(seen.reshape(*seen.shape, *(1,) * (x.ndim - 2)), x, 0.0)
            if x.shape[:2] == seen.shape
            else x
        )
        for name, x in found.items()
    }


def relative(found: Values, exact: Values, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value of its array.

    The scale is at least `floor` times the largest value of all arrays.

    Raises:
        ValueError: if the arrays of both have other names or shapes.
    """
    shapes = [{name: np.shape(x) for name, x in side.items()} for side in (found, exact)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"JAX gives arrays of {shapes[0]}, PyTorch of {shapes[1]}: return the same from both"
        )
    least = floor * max((np.abs(x).max() for x in exact.values()), default=0.0)
    errors = [_error(np.asarray(found[name]), np.asarray(x), least) for name, x in exact.items()]
    return max(errors, default=0.0)


def _error(found: np.ndarray, exact: np.ndarray, least: float) -> float:
    if not (np.isfinite(found).all() and np.isfinite(exact).all()):
        return float("inf")
    scale = max(np.abs(exact).max(initial=0.0), least)
    difference = np.abs(found - exact).max(initial=0.0)
    return float(difference / scale) if scale else float(difference)
