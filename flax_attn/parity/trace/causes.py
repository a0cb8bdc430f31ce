"""Why a node is wrong: known formulas, in plain NumPy, are fitted to what each side computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace import attention_forms, layer_forms
from flax_attn.parity.trace.hooks import path_of, spoken
from flax_attn.parity.trace.layer_forms import Forms
from flax_attn.parity.trace.substitute import Evidence, Target, relative

Family = Callable[[np.ndarray, np.ndarray], Forms]
Lower = Mapping[str, Mapping[str, str]]
LOW = ("bfloat16", "float16", "float32")
SIDES = ("flax", "torch")
REPEATS = 3  # of the same cause that are named


def causes_of(found: Evidence, weights: Arrays, lower: Mapping[str, Lower] | None = None) -> list[str]:
    """Return a sentence for everything wrong that a node computes, where the cause is known.

    A formula is named only if it fits what a side computes as closely as two right sides fit one another. Those of a
    family are tried in order, the right one first, so that none is named that is equal to the right one here.

    Args:
        found: the evidence on a node that is locally wrong.
        weights: of the whole pair, by names of PyTorch.
        lower: for each side, what its modules computed below float64.

    Example:
        >>> x, scale = np.linspace(-1, 1, 12).reshape(3, 4), np.ones(4)
        >>> def norm(eps):
        ...     return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        >>> found = Evidence("norm1", "module", [Target("output", norm(1e-5), norm(1e-6))], {"input": x})
        >>> causes_of(found, {"norm1.scale": scale})
        ['norm1: flax has eps=1e-05, torch 1e-06']
    """
    wrong = [target for target in found.targets if not target.error <= max(tolerance.FORWARD, target.rounding)]
    return [line for target in wrong if (line := _cause(found, target, weights, lower or {}))]


def grouped(causes: Sequence[str]) -> list[str]:
    """Return causes with those of repeated layers on one line, which names the first of them.

    Example:
        >>> grouped([f"blocks.{i}.norm: flax has eps=1e-06, torch 1e-05" for i in range(6)])
        ['blocks.0.norm: flax has eps=1e-06, torch 1e-05 (also blocks.1.norm, blocks.2.norm, blocks.3.norm and 2 more)']
    """
    found: dict[str, list[str]] = {}
    for cause in causes:
        node, _, sentence = cause.partition(": ")
        found.setdefault(f"{re.sub('[0-9]+', '', node)}: {sentence}", []).append(cause)
    return [_with_repeats(same[0], [re.split("[,:]", cause)[0] for cause in same[1:]]) for same in found.values()]


def _with_repeats(cause: str, others: list[str]) -> str:
    more = f" and {len(others) - REPEATS} more" if len(others) > REPEATS else ""
    return f"{cause} (also {', '.join(others[:REPEATS])}{more})" if others else cause


def _cause(found: Evidence, target: Target, weights: Arrays, lower: Mapping[str, Lower]) -> str:
    place = spoken(found.name) if target.label == "output" else f"{spoken(found.name)}, {target.label}"
    forms = [_fitted(family, target) for family in _families(found, target, weights)]
    both = next((fits for fits in forms if all(fits.values()) and fits["flax"] != fits["torch"]), None)
    if both:
        return f"{place}: {_difference(both['flax'], both['torch'])}"
    one = next((fits for fits in forms if any(fits.values()) and not all(fits.values())), None)
    cause = _rounded(target) or _one_pass_variance(found, target, weights) or (_known_on_one_side(one) if one else "")
    return _lower_operations(found, target, lower) or (f"{place}: {cause}" if cause else "")


def _fitted(family: Family, target: Target) -> dict[str, str]:
    return {"flax": _fit(family, target.flax, target.torch), "torch": _fit(family, target.torch, target.flax)}


def _fit(family: Family, value: np.ndarray, other: np.ndarray) -> str:
    with np.errstate(all="ignore"):
        return next((text for text, form in family(value, other) if relative(form, value) <= tolerance.FORWARD), "")


def _difference(flax: str, torch: str) -> str:
    """Return the sentence, with the value alone where two formulas differ in that of one setting.

    Example:
        >>> _difference("RMS norm with eps=1e-06", "RMS norm with eps=1e-05")
        'flax has eps=1e-06, torch 1e-05'
        >>> _difference("no mask", "a causal mask")
        'flax has no mask, torch has a causal mask'
    """
    setting = re.compile(r"(.*\b)(\w+=)(\S+)(.*)")
    ours, theirs = setting.fullmatch(flax), setting.fullmatch(torch)
    if ours and theirs and ours.group(1, 2, 4) == theirs.group(1, 2, 4):
        return f"flax has {ours[2]}{ours[3]}, torch {theirs[3]}"
    return f"flax has {flax}, torch has {torch}"


def _known_on_one_side(forms: Mapping[str, str]) -> str:
    side, other = SIDES if forms["flax"] else SIDES[::-1]
    return f"{side} has {forms[side]}, {other} has none of the known formulas"


def _families(found: Evidence, target: Target, weights: Arrays) -> Iterator[Family]:
    sources = {name: x for name, x in found.sources.items() if not target.without or name != target.without}
    if found.kind == "step":
        step = found.name.split("/")[1].split("#")[0]
        for steps in attention_forms.STEPS.get(step, ()):
            yield lambda value, other, steps=steps: steps(value, other, sources)
        return
    own = _own(found, weights)
    if target.label == "output" and "input" in sources and own:
        yield lambda value, other: layer_forms.norm(value, sources["input"], own)
        yield lambda value, other: layer_forms.linear(value, sources["input"], own, weights)
    yield lambda value, other: attention_forms.joined_forms(value, other, sources)
    yield lambda value, other: layer_forms.total(value, sources)
    yield lambda value, other: layer_forms.activation(value, sources)


def _own(found: Evidence, weights: Arrays) -> Arrays:
    prefix = path_of(found.name).removesuffix(".")
    return {name: w for name, w in weights.items() if name.rpartition(".")[0] == prefix}


# Precision.


def _lower_operations(found: Evidence, target: Target, lower: Mapping[str, Lower]) -> str:
    """Name what was computed below float64 in the node, or in the modules around it, if that explains the error."""
    path = path_of(found.name)
    while True:
        sides = {side: lower.get(side, {}).get(path, {}) for side in SIDES}
        kinds = dict.fromkeys([*sides["flax"], *sides["torch"]])
        if "the softmax" in kinds:
            kinds.pop("exp", None)
        for kind in kinds:
            dtypes = {side: sides[side].get(kind, "float64") for side in SIDES}
            if target.error <= max(map(_rounding, dtypes.values())):
                return f"{spoken(path)}: flax has {kind} in {dtypes['flax']}, torch in {dtypes['torch']}"
        if path == ".":
            return ""
        path = path.rpartition(".")[0] or "."


def _rounding(dtype: str) -> float:
    return tolerance.REORDERED * float(jnp.finfo(dtype).eps)


def _rounded(target: Target) -> str:
    """Say so where all numbers of one side alone are numbers of a lower dtype, and close to the other's."""
    dtypes = {"flax": _dtype(target.flax), "torch": _dtype(target.torch)}
    for dtype in dtypes.values():
        if dtype != "float64" and dtypes["flax"] != dtypes["torch"] and target.error <= _rounding(dtype):
            return f"flax has numbers of {dtypes['flax']}, torch of {dtypes['torch']}"
    return ""


def _dtype(value: np.ndarray) -> str:
    value = value[np.isfinite(value)]
    with np.errstate(over="ignore"):
        fits = (kind for kind in LOW if (value.astype(jnp.dtype(kind)).astype(np.float64) == value).all())
        return next(fits, "float64")


def _one_pass_variance(found: Evidence, target: Target, weights: Arrays) -> str:
    """Name the side whose variance is off by what `mean(x^2) - mean(x)^2` loses, where that is all that is off."""
    own, x = _own(found, weights), found.sources.get("input")
    if found.kind == "step" or target.label != "output" or x is None:
        return ""
    for side, other, value, right in (
        ("flax", "torch", target.flax, target.torch),
        ("torch", "flax", target.torch, target.flax),
    ):
        if layer_forms.is_one_pass_norm(value, right, x, own):
            return f"{side} has the variance in one pass, mean(x^2) - mean(x)^2, {other} in two"
    return ""
