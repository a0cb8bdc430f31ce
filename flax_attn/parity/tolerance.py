"""How equal is equal: the rules, each derived once. No check has a tolerance of its own.

In float64 on a CPU the two sides differ by rounding alone, around 1e-16 an operation. A wrong epsilon, a tanh for an
erf or a transposed square matrix stands ten orders of magnitude above the limits below.
"""

from collections.abc import Mapping

import numpy as np

FORWARD = 1e-12  # float64: largest error over the largest value of the truth
GRADIENT = 1e-11
TRAINING = 1e-10  # 100 steps of AdamW
LOW_FORWARD = 2.0  # lower dtypes: error over that of plain PyTorch in the same dtype, both against float64
LOW_GRADIENT = 3.0
REORDERED = 64  # one function evaluated in another order, such as compiled: roundings (eps) of the largest value
NULL = 1e-13  # a gradient this far below the largest one is rounding: a direction that the function does not feel

Arrays = Mapping[str, np.ndarray]


def relative(ours: Arrays, truth: Arrays, scale: float = 0.0) -> dict[str, float]:
    """Return `max|ours - truth| / max(max|truth|, scale)` by name; NaN must stand at the same places on both sides."""
    return {name: _relative(ours[name], truth[name], scale) for name in truth}


def _relative(ours: np.ndarray, truth: np.ndarray, scale: float) -> float:
    if ours.shape != truth.shape or (np.isnan(ours) != np.isnan(truth)).any():
        return np.inf
    error, size = _largest(np.asarray(ours - truth)), max(_largest(truth), scale)
    return error / size if size else (0.0 if error == 0 else np.inf)


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(np.abs(values), initial=0.0))


def reordered(ours: Arrays, truth: Arrays) -> dict[str, float]:
    """Return the error of one function evaluated twice in its own dtype over the allowed one: at most 1 passes.

    Values that are rounding only, beside the largest of all, are measured by that.
    """
    largest = max((_largest(value) for value in truth.values()), default=0.0)

    def excess(name: str) -> float:
        allowed = REORDERED * float(np.finfo(truth[name].dtype).eps)
        scale = largest if _largest(truth[name]) <= allowed * largest else 0.0
        return _relative(ours[name].astype(np.float64), truth[name].astype(np.float64), scale) / allowed

    return {name: excess(name) for name in truth}


def null_directions(truth: Arrays) -> set[str]:
    """Return the names of gradients that are rounding only, such as that of a key bias, which softmax ignores."""
    largest = max((_largest(gradient) for gradient in truth.values()), default=0.0)
    return {name for name, gradient in truth.items() if _largest(gradient) <= NULL * largest}


def gradient_errors(ours: Arrays, truth: Arrays) -> dict[str, float]:
    """Return the relative errors, those of null directions measured by the largest gradient of all."""
    null = null_directions(truth)
    largest = max((_largest(gradient) for gradient in truth.values()), default=0.0)
    errors = relative(ours, {name: g for name, g in truth.items() if name not in null})
    return errors | relative(ours, {name: truth[name] for name in null}, largest)


def lower_dtype(ours: Arrays, theirs: Arrays, truth: Arrays, factor: float, eps: float) -> dict[str, float]:
    """Return our error over the allowed one, by name: at most 1 passes.

    Allowed is `factor` times the error of PyTorch in the same dtype, plus one rounding of the truth itself, without
    which a value that PyTorch happens to hit exactly would allow nothing. In maximum, mean and 99th percentile.
    """
    statistics = (np.max, np.mean, lambda values: np.percentile(values, 99))

    def excess(name: str) -> float:
        own, other = np.abs(ours[name] - truth[name]), np.abs(theirs[name] - truth[name])
        size = np.abs(truth[name])
        return float(max(s(own) / max(factor * s(other) + eps * s(size), np.finfo(float).tiny) for s in statistics))

    return {name: excess(name) for name in truth}
