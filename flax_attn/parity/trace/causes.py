"""Why a node is wrong: known formulas, in plain NumPy, are fitted to what each side computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace import attention_forms, image_forms, layer_forms
from flax_attn.parity.trace.angle_tables import angle_tables
from flax_attn.parity.trace.attention_forms import context_forms, score_forms, softmax_forms
from flax_attn.parity.trace.convolution_forms import convolution
from flax_attn.parity.trace.hooks import CAST, path_of, spoken
from flax_attn.parity.trace.layer_forms import Forms
from flax_attn.parity.trace.mask_forms import mask_forms
from flax_attn.parity.trace.pooled_forms import pooled
from flax_attn.parity.trace.projected_forms import (
    attended_forms,
    head_forms,
    projected_scores,
    turned_forms,
)
from flax_attn.parity.trace.recurrent_forms import gru, lstm, running_statistics
from flax_attn.parity.trace.structure import UNKNOWN
from flax_attn.parity.trace.substitute import Evidence, Target, relative
from flax_attn.parity.trace.tables import dtype_of_numbers
from flax_attn.parity.trace.tied_forms import tied_products
from flax_attn.parity.trace.transposed_forms import transposed_convolution

Family = Callable[[np.ndarray, np.ndarray], Forms]
Lower = Mapping[str, Mapping[str, str]]
SIDES = ("flax", "torch")
EXACT = {str(side): tolerance.FORWARD for side in SIDES}
CLEAR = 8  # times what rounding may do: a larger difference has another cause
REPEATS = 3  # of the same cause that are named
STEPS: dict[str, tuple[Callable[[np.ndarray, np.ndarray, Arrays], Forms], ...]] = {
    "query": (head_forms,),
    "key": (head_forms,),
    "value": (head_forms,),
    "scores": (score_forms, projected_scores),
    "masked": (mask_forms, score_forms, projected_scores),
    "weights": (softmax_forms,),
    "context": (context_forms,),
}


def causes_of(
    found: Evidence, weights: Arrays, lower: Mapping[str, Lower] | None = None
) -> list[str]:
    """Return a sentence for everything wrong that a node computes, where the cause is known.

    A formula is named only if it fits what a side computes as closely as two right sides fit one
    another. Those of a family are tried in order, the right one first, so that none is named that
    is equal to the right one here.

    Args:
        found: the evidence on a node that is locally wrong.
        weights: weights of the whole pair, by names of PyTorch.
        lower: for each side, what its modules computed below float64.

    Example:
        >>> x, scale = np.linspace(-1, 1, 12).reshape(3, 4), np.ones(4)
        >>> def norm(eps):
        ...     return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        >>> target = Target("output", norm(1e-5), norm(1e-6))
        >>> found = Evidence("norm1", "module", [target], {"input": x})
        >>> causes_of(found, {"norm1.scale": scale})
        ['norm1: flax has eps=1e-05, torch 1e-06']
    """
    wrong = [
        target
        for target in found.targets
        if not target.error <= max(tolerance.FORWARD, target.rounding)
    ]
    once: dict[
        tuple[bytes, bytes], Target
    ] = {}  # what is passed on as query, key and value is one thing
    for target in wrong:
        once.setdefault((target.flax.tobytes(), target.torch.tobytes()), target)
    return [
        line for target in once.values() if (line := _cause(found, target, weights, lower or {}))
    ]


def grouped(causes: Sequence[str]) -> list[str]:
    """Return causes with those of repeated layers on one line, which names the first of them.

    Example:
        >>> causes = [f"blocks.{i}.norm: flax has eps=1e-06, torch 1e-05" for i in range(6)]
        >>> grouped(causes)  # doctest: +NORMALIZE_WHITESPACE
        ['blocks.0.norm: flax has eps=1e-06, torch 1e-05
         (also blocks.1.norm, blocks.2.norm, blocks.3.norm and 2 more)']
    """
    found: dict[str, list[str]] = {}
    for cause in causes:
        node, _, sentence = cause.partition(": ")
        found.setdefault(f"{re.sub('[0-9]+', '', node)}: {sentence}", []).append(cause)
    return [
        _with_repeats(same[0], [re.split("[,:]", cause)[0] for cause in same[1:]])
        for same in found.values()
    ]


def _with_repeats(cause: str, others: list[str]) -> str:
    more = f" and {len(others) - REPEATS} more" if len(others) > REPEATS else ""
    return f"{cause} (also {', '.join(others[:REPEATS])}{more})" if others else cause


def _cause(found: Evidence, target: Target, weights: Arrays, lower: Mapping[str, Lower]) -> str:
    place = (
        spoken(found.name) if target.label == "output" else f"{spoken(found.name)}, {target.label}"
    )
    families = list(_families(found, target, weights))
    forms = [_fitted(family, target) for family in families]
    both = _first_difference(forms) or _in_lower_dtypes(found.name, target, families, lower)
    if both:
        return f"{place}: {_difference(both['flax'], both['torch'])}"
    last = {
        f"{child} alone" for child in found.alone
    }  # that PyTorch returns what it calls last says nothing by itself
    one = next(
        (x for x in forms if any(x.values()) and not all(x.values()) and x["torch"] not in last),
        None,
    )
    cause = (
        _rounded(target)
        or _one_pass_variance(found, target, weights)
        or (_known_on_one_side(one) if one else "")
    )
    named = _lower_operations(found.name, target.error, lower)
    cast = cast_of(found.name, target.error, lower) if not cause or UNKNOWN in cause else ""
    return named or cast or (f"{place}: {cause}" if cause else "")


def _first_difference(forms: Sequence[Mapping[str, str]]) -> Mapping[str, str] | None:
    return next(
        (fits for fits in forms if all(fits.values()) and fits["flax"] != fits["torch"]), None
    )


def _in_lower_dtypes(
    name: str, target: Target, families: Sequence[Family], lower: Mapping[str, Lower]
) -> Mapping[str, str] | None:
    """Return the formulas that fit up to rounding, if rounding does not explain the error."""
    limits = {side: _rounding_around(name, lower.get(side, {})) for side in SIDES}
    if not max(limits.values()) > tolerance.FORWARD or target.error <= CLEAR * max(limits.values()):
        return None
    return _first_difference([_fitted(family, target, limits) for family in families])


def _rounding_around(name: str, lower: Lower) -> float:
    dtypes = [dtype for path in _around(name) for dtype in lower.get(path, {}).values()]
    return max([tolerance.FORWARD, *map(_rounding, dtypes)])


def _fitted(family: Family, target: Target, limits: Mapping[str, float] = EXACT) -> dict[str, str]:
    return {
        "flax": _fit(family, target.flax, target.torch, limits["flax"]),
        "torch": _fit(family, target.torch, target.flax, limits["torch"]),
    }


def _fit(family: Family, value: np.ndarray, other: np.ndarray, limit: float) -> str:
    with np.errstate(all="ignore"):
        return next(
            (text for text, form in family(value, other) if relative(form, value) <= limit), ""
        )


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
    return f"{side} has {forms[side]}, {other} has {UNKNOWN}"


def _families(found: Evidence, target: Target, weights: Arrays) -> Iterator[Family]:
    sources = {
        name: x for name, x in found.sources.items() if not target.without or name != target.without
    }
    if found.kind == "step":
        step = found.name.split("/")[1].split("#")[0]
        for steps in STEPS.get(step, ()):
            yield lambda value, other, steps=steps: steps(value, other, sources)
        return
    own = _own(found, weights)
    if target.label == "output" and "input" not in sources:
        yield lambda value, other: layer_forms.lookup(value, other, own)
    if target.label == "output" and "input" in sources and own:
        yield lambda value, other: layer_forms.norm(value, sources["input"], own)
        yield lambda value, other: layer_forms.group_norm(value, sources["input"], own)
        yield lambda value, other: layer_forms.linear(value, sources["input"], own, weights)
        yield lambda value, other: convolution(value, sources["input"], own)
        yield lambda value, other: transposed_convolution(value, sources["input"], own)
        yield lambda value, other: gru(value, sources, own)
    # What PyTorch calls last returns the output itself: it is named where nothing within says how
    # that is computed.
    inner = {
        name: x
        for name, x in sources.items()
        if name not in found.alone or not np.array_equal(x, target.torch)
    }
    for child in found.alone:  # before sums: else it is the output of that submodule
        yield lambda value, other, child=child: _by_hand(value, child, found, weights)
    yield lambda value, other: attention_forms.joined_forms(value, other, sources)
    yield lambda value, other: attended_forms(value, sources)
    yield lambda value, other: layer_forms.total(value, inner)
    yield lambda value, other: layer_forms.total(value, sources)
    yield lambda value, other: layer_forms.total_with_rows(value, inner, _inside(found, weights))
    called = {name: x for name, x in sources.items() if name not in found.alone}
    yield lambda value, other: layer_forms.activation(
        value, called | sources
    )  # ReLU of ReLU is ReLU
    yield lambda value, other: turned_forms(value, sources)
    yield lambda value, other: layer_forms.gated(value, inner)
    yield lambda value, other: image_forms.patches(value, inner)
    yield lambda value, other: image_forms.tokens(value, inner, own)
    yield lambda value, other: _pooled(value, found, weights)
    yield lambda value, other: layer_forms.multiple(value, inner)
    yield lambda value, other: tied_products(value, sources, weights)
    yield lambda value, other: angle_tables(value)
    yield lambda value, other: lstm(value, sources, _inside(found, weights) or weights)
    yield lambda value, other: running_statistics(value, sources, weights)


def _by_hand(value: np.ndarray, child: str, found: Evidence, weights: Arrays) -> Forms:
    """What a linear layer may compute that one side writes out."""
    for x in found.alone[child][:1]:
        forms = layer_forms.linear(value, x, _inner(found, child, weights), weights)
        yield from ((f"{text} of {child}", form) for text, form in forms)


def _pooled(value: np.ndarray, found: Evidence, weights: Arrays) -> Forms:
    """One vector for many tokens, pooled after a norm or before it."""
    yield from pooled(value, found.sources)
    for text, one in pooled(value, found.sources):
        for child in found.alone:
            forms = layer_forms.norm(value, one, _inner(found, child, weights))
            yield from ((f"{norm} by {child}, of {text}", form) for norm, form in forms)


def _inner(found: Evidence, child: str, weights: Arrays) -> Arrays:
    """Return the weights of a submodule of a node."""
    return _own(Evidence(f"{path_of(found.name)}.{child}".lstrip("."), "module"), weights)


def _own(found: Evidence, weights: Arrays) -> Arrays:
    prefix = path_of(found.name).removesuffix(".")
    return {name: w for name, w in weights.items() if name.rpartition(".")[0] == prefix}


def _inside(found: Evidence, weights: Arrays) -> Arrays:
    """Return the weights in a module by their names there; none for the whole module."""
    prefix = f"{path_of(found.name)}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


# Precision.


def _lower_operations(name: str, error: float, lower: Mapping[str, Lower]) -> str:
    """Name what was computed below float64 in or around the node, if that explains the error."""
    for path in _around(name):
        sides = {side: lower.get(side, {}).get(path, {}) for side in SIDES}
        kinds = dict.fromkeys([*sides["flax"], *sides["torch"]])
        kinds.pop(CAST, None)
        if "the softmax" in kinds:
            kinds.pop("exp", None)
        for kind in kinds:
            dtypes = {side: sides[side].get(kind, "float64") for side in SIDES}
            if error <= max(map(_rounding, dtypes.values())):
                return f"{spoken(path)}: {_dtypes_of(kind, dtypes)}"
    return ""


def cast_of(name: str, error: float, lower: Mapping[str, Lower]) -> str:
    """Name the side that casts to a lower dtype in or around a node, if that explains the error.

    Example:
        >>> cast_of("conv", 1e-8, {"flax": {".": {CAST: "float32"}}, "torch": {}})
        'the whole module: flax casts values to float32, torch does not'
    """
    for path in _around(name):
        casts = {side: lower.get(side, {}).get(path, {}).get(CAST, "") for side in SIDES}
        for side, other in (SIDES, SIDES[::-1]):
            if casts[side] and casts[side] != casts[other] and error <= _rounding(casts[side]):
                rest = f"{other} to {casts[other]}" if casts[other] else f"{other} does not"
                return f"{spoken(path)}: {side} casts values to {casts[side]}, {rest}"
    return ""


def _around(name: str) -> Iterator[str]:
    """Yield the path of a node, then those of the modules around it."""
    path = path_of(name)
    while path != ".":
        yield path
        path = path.rpartition(".")[0] or "."
    yield path


def _dtypes_of(kind: str, dtypes: Mapping[str, str]) -> str:
    if dtypes["flax"] == dtypes["torch"]:
        return f"both have {kind} in {dtypes['flax']}, where their roundings differ"
    return f"flax has {kind} in {dtypes['flax']}, torch in {dtypes['torch']}"


def _rounding(dtype: str) -> float:
    return tolerance.REORDERED * float(jnp.finfo(dtype).eps)


def _rounded(target: Target) -> str:
    """Say so if one side alone has only numbers of a lower dtype, close to those of the other."""
    dtypes = {"flax": dtype_of_numbers(target.flax), "torch": dtype_of_numbers(target.torch)}
    for dtype in dtypes.values():
        if (
            dtype != "float64"
            and dtypes["flax"] != dtypes["torch"]
            and target.error <= _rounding(dtype)
        ):
            return f"flax has numbers of {dtypes['flax']}, torch of {dtypes['torch']}"
    return ""


def _one_pass_variance(found: Evidence, target: Target, weights: Arrays) -> str:
    """Name the side with variances of `mean(x^2) - mean(x)^2`, if these explain the error."""
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
