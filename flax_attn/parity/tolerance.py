"""The rules of equality, each derived once. No check has a tolerance of its own.

In float64 on a CPU two equal functions differ by rounding alone, around 1e-16 an operation. A wrong
epsilon, a tanh for an erf or a transposed square matrix is six to twelve orders of magnitude above
the limits below.
"""

from collections.abc import Mapping, Sequence

import numpy as np

# In float64: the largest error over the largest value of the reference.
FORWARD = 1e-12
GRADIENT = 1e-11
# Of the derivatives of the gradients.
SECOND = 1e-10
# The step of differences of gradients: at the cube root of eps, what curvature and what rounding
# add to them is of one size, about the square of the step. A step is what they may differ by.
STEP = 6e-6
DIFFERENCES = STEP
# Of 100 steps of AdamW.
TRAINING = 1e-10
# In lower dtypes: error over that of plain PyTorch in the same dtype, both against float64.
LOW_FORWARD = 2.0
LOW_GRADIENT = 3.0
# How often an error in a lower dtype is drawn, and how often before it is called a difference.
DRAWS = 4
MORE_DRAWS = 16
# Roundings (eps) of the largest value between two orders of evaluation, such as eager and compiled.
REORDERED = 64
# The same for float32, of what was computed in it in two orders.
REORDERED_FLOAT32 = REORDERED * float(np.finfo(np.float32).eps)
# What an output may differ by where rounding is amplified: an error of all digits in float32.
MOST_FORWARD = REORDERED * float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
# The same of a gradient, in the ratio of the two rules: an error above it shows no agreement.
MOST_GRADIENT = MOST_FORWARD * GRADIENT / FORWARD
# The same of parameters and losses after training.
MOST_TRAINING = MOST_FORWARD * TRAINING / FORWARD
# A gradient this far below the largest one is rounding: the parameter does not change the outputs.
NULL = 1e-13

Arrays = Mapping[str, np.ndarray]
# The error of each tensor, by its name.
Errors = Mapping[str, float]
# Kinds of dtypes without a fraction: their numbers are equal, or not.
WHOLE = "biu"


def relative(ours: Arrays, reference: Arrays, scale: float = 0.0) -> dict[str, float]:
    """Return `max|ours - reference| / max(max|reference|, scale)` by name, over what is finite.

    NaN and infinities must be at the same indices in both; otherwise the error is infinite. Where
    nothing is finite the error is 0, which `worst_of` does not take for a measurement.
    """
    errors = {}
    for name, array in reference.items():
        errors[name] = _relative(ours[name], array, scale) if name in ours else np.inf
    return errors


def _relative(ours: np.ndarray, reference: np.ndarray, scale: float) -> float:
    if ours.shape != reference.shape:
        return np.inf
    whole = ours.dtype.kind in WHOLE and reference.dtype.kind in WHOLE
    if whole and np.array_equal(ours, reference):
        return 0.0
    ours = numbers(ours)
    reference = numbers(reference)
    finite = np.isfinite(reference)
    # NaN and infinities must be where the reference has them.
    if not np.array_equal(ours[~finite], reference[~finite], equal_nan=True):
        return np.inf
    ours = ours[finite]
    reference = reference[finite]
    if not np.isfinite(ours).all():
        return np.inf
    error = _largest(ours - reference)
    # 2**60 and 2**60 + 1 are one float64.
    if error == 0 and whole:
        return np.inf
    return _quotient(error, max(_largest(reference), scale))


def _quotient(error: float, size: float) -> float:
    if size:
        return error / size
    return np.inf if error else 0.0


def within(errors: Errors, limit: float) -> bool:
    """Return whether all errors are at most the limit; NaN is not.

    Example:
        >>> within({"output": 1e-15}, FORWARD), within({"output": float("nan")}, FORWARD)
        (True, False)
    """
    return all(error <= limit for error in errors.values())


def numbers(array: np.ndarray) -> np.ndarray:
    """Return integers and booleans as float64, in which a difference neither wraps nor is refused.

    Example:
        >>> numbers(np.int8([100])) - numbers(np.int8([-28]))
        array([128.])
    """
    return array.astype(np.float64) if array.dtype.kind in WHOLE else array


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def largest_of(arrays: Arrays) -> float:
    """Return the largest finite size of a number in several arrays."""
    return max((_largest(array) for array in arrays.values()), default=0.0)


def reordered(ours: Arrays, reference: Arrays) -> dict[str, float]:
    """Return the ratio of the error between two evaluations of a function to the allowed error.

    Both evaluations are in the function's own dtype. A ratio of at most 1 passes.

    Values that are rounding only, beside the largest of all, are measured by that.
    """
    largest = largest_of(reference)
    return {name: _reordered(ours[name], array, largest) for name, array in reference.items()}


def _reordered(ours: np.ndarray, reference: np.ndarray, largest: float) -> float:
    allowed = REORDERED * float(np.finfo(reference.dtype).eps)
    scale = largest if _largest(reference) <= allowed * largest else 0.0
    # A difference in the dtype itself would be rounded once more.
    error = _relative(ours.astype(np.float64), reference.astype(np.float64), scale)
    return error / allowed


def median(draws: Sequence[Errors]) -> dict[str, float]:
    """Return the median error of each tensor over the draws, as one draw shows luck; NaN stays NaN.

    Example:
        >>> median([{"output": 8.6}, {"output": 0.7}, {"output": 0.5}])
        {'output': 0.7}
    """
    return {name: float(np.median([draw[name] for draw in draws])) for name in draws[0]}


def null_directions(reference: Arrays) -> set[str]:
    """Return the names of gradients that are only rounding, such as that of a key bias."""
    largest = largest_of(reference)
    return {name for name, gradient in reference.items() if _largest(gradient) <= NULL * largest}


def nonzero_gradient(ours: Arrays, reference: Arrays) -> dict[str, np.ndarray]:
    """Return a mask of gradient elements that are more than rounding on a side, or 0 on both.

    A packed tensor may hold a null direction beside others, such as the key's part of a packed
    bias. Where some of its elements are rounding, those that are 0 may be rounding that came out
    so.
    """
    smallest = NULL * largest_of(reference)
    return {name: _nonzero(gradient, ours[name], smallest) for name, gradient in reference.items()}


def _nonzero(gradient: np.ndarray, other: np.ndarray, smallest: float) -> np.ndarray:
    size = np.maximum(np.abs(gradient), np.abs(other))
    more = np.asarray(size > smallest)
    either = np.asarray(more | (size == 0))
    return either if either.all() else more


def gradient_errors(ours: Arrays, reference: Arrays) -> dict[str, float]:
    """Return the relative errors; null directions are relative to the largest of all gradients."""
    names = null_directions(reference)
    null = {name: gradient for name, gradient in reference.items() if name in names}
    others = {name: gradient for name, gradient in reference.items() if name not in names}
    largest = largest_of(reference)
    return relative(ours, others) | relative(ours, null, largest)


def amplified(
    errors: Errors,
    rounding: Sequence[Errors],
    limit: float,
    most: float = np.inf,
) -> dict[str, float]:
    """Return errors in float64 over the allowed ones, by name: at most 1 passes.

    A function that amplifies rounding cannot agree to the limit in two orders of evaluation. Where
    64 times what one rounding more of each operation moves in PyTorch exceeds the limit, that is
    allowed, but never more than `most`.

    Args:
        errors: error of each tensor.
        rounding: errors of PyTorch with one rounding more of each operation, for several draws.
        limit: allowed error where rounding is not amplified.
        most: largest allowed error.

    Example:
        >>> amplified({"x": 0.5, "y": 0.5}, [{"x": 2**-4, "y": 2**-20}], limit=0.25)
        {'x': 0.125, 'y': 2.0}
    """
    found = dict(errors)
    for name in errors:
        moved = max(draw.get(name, 0.0) for draw in rounding)
        # Capped first: the limit itself holds whatever `most` is.
        allowed = min(REORDERED * moved, most)
        found[name] /= max(limit, allowed)
    return found


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
    found = {}
    for name, finite in finite_in_all(theirs, reference).items():
        if name not in ours or ours[name].shape != finite.shape:
            found[name] = np.inf
            continue
        own = ours[name][finite]
        draws = [draw[name][finite] for draw in theirs]
        found[name] = _excess(own, draws, reference[name][finite], factor, eps)
    return found


def _excess(
    own: np.ndarray, draws: list[np.ndarray], reference: np.ndarray, factor: float, eps: float
) -> float:
    """Return the largest ratio of our error to the allowed one, in each statistic."""
    if not np.isfinite(own).all():
        return np.inf
    # PyTorch overflows everywhere.
    if not reference.size:
        return 0.0
    error = np.abs(own - reference)
    theirs = [np.abs(draw - reference) for draw in draws]
    rounding = eps * np.abs(reference)
    ratios = []
    for statistic in (np.max, np.mean, _percentile_99):
        most = factor * max(statistic(other) for other in theirs)
        allowed = most + statistic(rounding)
        # Where nothing is allowed, an error of 0 still passes.
        ratio = statistic(error) / max(allowed, np.finfo(float).tiny)
        ratios.append(ratio)
    return float(max(ratios))


def _percentile_99(values: np.ndarray) -> np.floating:
    return np.percentile(values, 99)


def finite_in_all(theirs: Sequence[Arrays], reference: Arrays) -> dict[str, np.ndarray]:
    """Return a mask of what is finite in the reference and in every draw of PyTorch."""
    found = {}
    for name, array in reference.items():
        found[name] = np.asarray(np.isfinite(array))
        for draw in theirs:
            # Where PyTorch overflows, nothing is asked of ours.
            found[name] &= np.isfinite(draw[name])
    return found
