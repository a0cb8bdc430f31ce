"""The rules of equality, each derived once. No check has a tolerance of its own.

In float64 on a CPU two equal functions differ by rounding alone, around 1e-16 an operation. A wrong
epsilon, a tanh for an erf or a transposed square matrix is six to twelve orders of magnitude above
the limits below.
"""

from collections.abc import Mapping, Sequence

import numpy as np

FORWARD = 1e-12  # float64: largest error over the largest value of the reference
GRADIENT = 1e-11
SECOND = 1e-10  # derivatives of the gradients
TRAINING = 1e-10  # 100 steps of AdamW
LOW_FORWARD = (
    2.0  # lower dtypes: error over that of plain PyTorch in the same dtype, both against float64
)
LOW_GRADIENT = 3.0
DRAWS = 4  # of an error in a lower dtype
# Roundings (eps) of the largest value between two orders of evaluation, such as eager and compiled.
REORDERED = 64
# A gradient this far below the largest one is rounding: the parameter does not change the outputs.
NULL = 1e-13

Arrays = Mapping[str, np.ndarray]
WHOLE = "biu"  # kinds of dtypes without a fraction: their numbers are equal, or not


def relative(ours: Arrays, reference: Arrays, scale: float = 0.0) -> dict[str, float]:
    """Return `max|ours - reference| / max(max|reference|, scale)` by name, over what is finite.

    NaN and infinities must be at the same indices in both; otherwise the error is infinite. Where
    nothing is finite the error is 0, which `worst_of` does not take for a measurement.
    """
    return {
        name: _relative(ours[name], reference[name], scale) if name in ours else np.inf
        for name in reference
    }


def _relative(ours: np.ndarray, reference: np.ndarray, scale: float) -> float:
    if ours.shape != reference.shape:
        return np.inf
    whole = ours.dtype.kind in WHOLE and reference.dtype.kind in WHOLE
    if whole and not np.array_equal(ours, reference):
        error = _largest(np.asarray(numbers(ours) - numbers(reference)))
        size = max(_largest(numbers(reference)), scale)
        return error / size if error and size else np.inf  # 2**60 and 2**60 + 1 are one float64
    ours, reference = numbers(ours), numbers(reference)
    finite = np.isfinite(reference)
    if (
        not np.array_equal(ours[~finite], reference[~finite], equal_nan=True)
        or not np.isfinite(ours[finite]).all()
    ):
        return np.inf
    error, size = (
        _largest(ours[finite] - reference[finite]),
        max(_largest(reference[finite]), scale),
    )
    return error / size if size else (0.0 if error == 0 else np.inf)


def numbers(array: np.ndarray) -> np.ndarray:
    """Return integers and booleans as float64, in which a difference neither wraps nor is refused.

    Example:
        >>> numbers(np.int8([100])) - numbers(np.int8([-28]))
        array([128.])
    """
    return array.astype(np.float64) if array.dtype.kind in WHOLE else array


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def reordered(ours: Arrays, reference: Arrays) -> dict[str, float]:
    """Return the ratio of the error between two evaluations of a function to the allowed error.

    Both evaluations are in the function's own dtype. A ratio of at most 1 passes.

    Values that are rounding only, beside the largest of all, are measured by that.
    """
    largest = max((_largest(value) for value in reference.values()), default=0.0)

    def excess(name: str) -> float:
        allowed = REORDERED * float(np.finfo(reference[name].dtype).eps)
        scale = largest if _largest(reference[name]) <= allowed * largest else 0.0
        return (
            _relative(ours[name].astype(np.float64), reference[name].astype(np.float64), scale)
            / allowed
        )

    return {name: excess(name) for name in reference}


def median(draws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median error of each tensor over the draws, as one draw shows luck; NaN stays NaN.

    Example:
        >>> median([{"output": 8.6}, {"output": 0.7}, {"output": 0.5}])
        {'output': 0.7}
    """
    return {name: float(np.median([draw[name] for draw in draws])) for name in draws[0]}


def null_directions(reference: Arrays) -> set[str]:
    """Return the names of gradients that are only rounding, such as that of a key bias."""
    largest = max((_largest(gradient) for gradient in reference.values()), default=0.0)
    return {name for name, gradient in reference.items() if _largest(gradient) <= NULL * largest}


def nonzero_gradient(ours: Arrays, reference: Arrays) -> dict[str, np.ndarray]:
    """Return a mask of gradient elements that are more than rounding, or 0 on both sides.

    A packed tensor may hold a null direction beside others, such as the key's part of a packed
    bias. Where some of its elements are rounding, those that are 0 may be rounding that came out
    so.
    """
    largest = max((_largest(gradient) for gradient in reference.values()), default=0.0)

    def of(gradient: np.ndarray, other: np.ndarray) -> np.ndarray:
        more, zero = np.abs(gradient) > NULL * largest, (gradient == 0) & (other == 0)
        return np.asarray(more | zero if (more | zero).all() else more)

    return {name: of(gradient, ours[name]) for name, gradient in reference.items()}


def gradient_errors(ours: Arrays, reference: Arrays) -> dict[str, float]:
    """Return the relative errors; null directions are relative to the largest of all gradients."""
    null = null_directions(reference)
    largest = max((_largest(gradient) for gradient in reference.values()), default=0.0)
    errors = relative(ours, {name: g for name, g in reference.items() if name not in null})
    return errors | relative(ours, {name: reference[name] for name in null}, largest)


def conditioned(
    errors: Mapping[str, float],
    float32: Mapping[str, float],
    limit: float,
    most: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return errors in float64 over the allowed ones, by name: at most 1 passes.

    A function that amplifies rounding cannot agree to the limit in two orders of summation. By how
    much it does is seen where rounding is large: the relative error in float32, scaled by the ratio
    of the two epsilons and with the allowance of one function in another order, is allowed where it
    exceeds the limit. An error of all digits counts as 1, so that never more than about 1e-7 is
    allowed; a gradient that rounding makes, such as that of a softmax which is a hard choice, has
    no digits, and `most` says by how much the largest gradient of all exceeds it.
    """
    ratio = float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
    worst = {name: min(float32.get(name, 0.0), (most or {}).get(name, 1.0)) for name in errors}
    return {
        name: error / max(limit, REORDERED * ratio * worst[name]) for name, error in errors.items()
    }


def excesses(reference: Arrays) -> dict[str, float]:
    """Return by how much the largest value of all exceeds what the error of each is measured by."""
    sizes, null = (
        {name: _largest(value) for name, value in reference.items()},
        null_directions(reference),
    )
    largest = max(sizes.values(), default=0.0)
    return {name: 1.0 if name in null else largest / size for name, size in sizes.items()}


def lower_dtype(
    ours: Arrays, theirs: Sequence[Arrays], reference: Arrays, factor: float, eps: float
) -> dict[str, float]:
    """Return our error over the allowed one, by name: at most 1 passes.

    Allowed is `factor` times the error of PyTorch in the same dtype, plus one rounding of the
    reference itself, without which a value that PyTorch happens to hit exactly would allow nothing.
    In maximum, mean and 99th percentile.

    PyTorch's error is partly luck, in a small tensor mostly: `theirs` are several draws of it, the
    first on the parameters and inputs rounded to the nearest, the others on these rounded up or
    down at random. The largest counts.
    """
    statistics = (np.max, np.mean, lambda values: np.percentile(values, 99))
    asked = finite_in_all(theirs, reference)

    def excess(name: str) -> float:
        finite = asked[name]
        if (
            name not in ours
            or ours[name].shape != reference[name].shape
            or not np.isfinite(ours[name][finite]).all()
        ):
            return np.inf
        if not finite.any():
            return 0.0
        own, *others = (np.abs(x[name] - reference[name])[finite] for x in (ours, *theirs))
        size = np.abs(reference[name][finite])
        allowed = (factor * max(s(other) for other in others) + eps * s(size) for s in statistics)
        return float(
            max(
                s(own) / max(most, np.finfo(float).tiny)
                for s, most in zip(statistics, allowed, strict=True)
            )
        )

    return {name: excess(name) for name in reference}


def finite_in_all(theirs: Sequence[Arrays], reference: Arrays) -> dict[str, np.ndarray]:
    """Return a mask of what is finite in the reference and in every draw of PyTorch."""
    found = {}
    for name, array in reference.items():
        found[name] = np.asarray(np.isfinite(array))
        for draw in theirs:
            found[name] &= np.isfinite(draw[name])
    return found
