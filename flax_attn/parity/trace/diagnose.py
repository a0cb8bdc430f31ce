"""What is the matter with a node: known forms are fitted to what each side computes, in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace import attention_hypotheses, hypotheses
from flax_attn.parity.trace.hooks import path_of, spoken
from flax_attn.parity.trace.hypotheses import Forms
from flax_attn.parity.trace.substitute import Evidence, Target, relative

Family = Callable[[np.ndarray, np.ndarray], Forms]
LOW = ("bfloat16", "float16", "float32")


def diagnose(found: Evidence, weights: Arrays) -> list[str]:
    """Return a sentence for everything wrong that a node computes, where a known form explains it.

    A form is named only if it fits what a side computes as closely as two right sides fit one another. The forms of a
    family are tried in order, the right one first, so that none is named a fault that is equal to the right one here.

    Args:
        found: the evidence on a guilty node.
        weights: of the whole pair, by names of PyTorch.

    Example:
        >>> x, scale = np.linspace(-1, 1, 12).reshape(3, 4), np.ones(4)
        >>> def norm(eps):
        ...     return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        >>> found = Evidence("norm1", "module", [Target("output", norm(1e-5), norm(1e-6))], {"input": x})
        >>> diagnose(found, {"norm1.scale": scale})[0].split(" (")[0]
        'norm1: torch is layer norm with eps=1e-06'
    """
    wrong = [target for target in found.targets if not target.error <= tolerance.FORWARD]
    lines = (_in_low_dtype(found, target) or _as_known_form(found, target, weights) for target in wrong)
    return [line for line in lines if line]


def _in_low_dtype(found: Evidence, target: Target) -> str:
    """Say so where the numbers of one side alone all are numbers of a lower dtype, and close to the other's."""
    kinds = {side: _dtype(value) for side, value in (("torch", target.torch), ("flax", target.flax))}
    for side, kind in kinds.items():
        if kind is not None and kinds["flax"] != kinds["torch"]:
            close = tolerance.REORDERED * float(jnp.finfo(kind).eps)
            if target.error <= close:
                return f"{_place(found, target)}: {side} rounds to {kind} (error {target.error:.0e})"
    return ""


def _dtype(value: np.ndarray) -> str | None:
    value = value[np.isfinite(value)]
    with np.errstate(over="ignore"):
        return next((kind for kind in LOW if (value.astype(jnp.dtype(kind)).astype(np.float64) == value).all()), None)


def _as_known_form(found: Evidence, target: Target, weights: Arrays) -> str:
    one_sided = ""
    for family in _families(found, target, weights):
        torch, flax = (_fit(family, *values) for values in _both_ways(target))
        if torch and flax and torch[0] != flax[0]:
            return f"{_place(found, target)}: torch is {_said(torch)}, flax is {_said(flax)}"
        if bool(torch) != bool(flax) and not one_sided:
            known, unknown = ("torch", "flax") if torch else ("flax", "torch")
            fitted = _said(torch or flax or ("", 0.0))
            one_sided = f"{_place(found, target)}: {known} is {fitted}, {unknown} is no form that is known"
    return one_sided


def _both_ways(target: Target) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield target.torch, target.flax
    yield target.flax, target.torch


def _families(found: Evidence, target: Target, weights: Arrays) -> Iterator[Family]:
    sources = {name: x for name, x in found.sources.items() if not target.without or name != target.without}
    if found.kind == "step":
        step = found.name.split("/")[1].split("#")[0]
        for steps in attention_hypotheses.STEPS.get(step, ()):
            yield lambda value, other, steps=steps: steps(value, other, sources)
        return
    prefix = path_of(found.name).removesuffix(".")
    own = {name: w for name, w in weights.items() if name.rpartition(".")[0] == prefix}
    if target.label == "output" and "input" in sources and own:
        yield lambda value, other: hypotheses.norm(value, sources["input"], own)
        yield lambda value, other: hypotheses.linear(value, sources["input"], own, weights)
    yield lambda value, other: attention_hypotheses.joined(value, other, sources)
    yield lambda value, other: hypotheses.total(value, sources)
    yield lambda value, other: hypotheses.activation(value, sources)


def _fit(family: Family, value: np.ndarray, other: np.ndarray) -> tuple[str, float] | None:
    with np.errstate(all="ignore"):
        fits = ((text, relative(form, value)) for text, form in family(value, other))
        return next(((text, error) for text, error in fits if error <= tolerance.FORWARD), None)


def _said(fit: tuple[str, float]) -> str:
    return f"{fit[0]} (fits {f'to {fit[1]:.0e}' if fit[1] else 'exactly'})"


def _place(found: Evidence, target: Target) -> str:
    return spoken(found.name) if target.label == "output" else f"{spoken(found.name)}, {target.label}"
