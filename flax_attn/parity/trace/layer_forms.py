"""What a layer may compute, in plain NumPy: the formulas that ports are known to confuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
TERMS = 4  # of a sum
SUMMANDS = 8  # that are tried
TABLES = 3  # whose rows may be among them

_erf = np.vectorize(math.erf, otypes=[np.float64])
ACTIVATIONS = {
    "exact GELU": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "tanh GELU": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick GELU, x * sigmoid(1.702 x)": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "SiLU": lambda x: x * _sigmoid(x),
}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2


def activation(value: np.ndarray, sources: Arrays) -> Forms:
    """A function of every number."""
    for name, x in sources.items():
        if x.shape == value.shape:
            yield from (
                (f"{text} of {name}", function(x)) for text, function in ACTIVATIONS.items()
            )


def gated(value: np.ndarray, sources: Arrays) -> Forms:
    """A function of one half of a projection, or of one of two, times the other."""
    pairs = [
        pair
        for name, x in sources.items()
        for pair in _halves(name, x)
        if x.shape[-1] == 2 * value.shape[-1]
    ]
    pairs += permutations(list(sources.items())[:SUMMANDS], 2)
    for (name, gate), (other, up) in pairs:
        if gate.shape == up.shape == value.shape:
            yield from (
                (f"{text} of {name} times {other}", f(gate) * up) for text, f in ACTIVATIONS.items()
            )


def _halves(
    name: str, x: np.ndarray
) -> Iterator[tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]]:
    halves = zip(
        (f"the first half of {name}", f"the second half of {name}"),
        np.array_split(x, 2, axis=-1),
        strict=True,
    )
    yield from permutations(halves, 2)


def total(value: np.ndarray, sources: Arrays) -> Forms:
    """A sum of what is there: how residual connections are wired."""
    alike = (
        value.shape,
        value.shape[1:],
        (1, *value.shape[1:]),
    )  # positions may come without a batch
    usable = [
        (name, np.broadcast_to(x, value.shape)) for name, x in sources.items() if x.shape in alike
    ]
    distinct = {x.tobytes(): (name, x) for name, x in reversed(usable)}
    summands = list(distinct.values())[:SUMMANDS][::-1]
    for count in range(1, TERMS + 1):
        for terms in combinations(summands, count):
            names = [name for name, _ in terms]
            yield (
                " + ".join(names) + (" alone" if count == 1 else ""),
                np.sum([x for _, x in terms], axis=0),
            )


def multiple(value: np.ndarray, sources: Arrays) -> Forms:
    """What is there times a number, as embeddings times the root of their width."""
    for name, x in sources.items():
        if x.shape == value.shape and x.any():
            factor = float((value * x).sum() / (x * x).sum())
            known = {name: 1.0, f"{name} * sqrt({x.shape[-1]})": x.shape[-1] ** 0.5}
            yield from ((text, x * number) for text, number in known.items())
            yield f"{name} * {factor:.6g}", x * factor


def total_with_rows(value: np.ndarray, sources: Arrays, weights: Arrays) -> Forms:
    """Yield sums that may include the first rows of a table, such as positions."""
    if value.ndim != 3:
        return
    t, d = value.shape[1:]
    tables = {
        name: w for name, w in weights.items() if w.ndim == 2 and w.shape[1] == d and len(w) >= t
    }
    rows = {
        f"the first rows of {name}": np.broadcast_to(w[:t], value.shape)
        for name, w in tables.items()
    }
    yield from total(value, {**dict(list(rows.items())[:TABLES]), **sources})


def linear(value: np.ndarray, x: np.ndarray, own: Arrays, everything: Arrays) -> Forms:
    """A matrix product, with a bias or without; also with weights of another layer."""
    matrix, bias = (next((w for w in own.values() if w.ndim == ndim), None) for ndim in (2, 1))
    if matrix is None:
        return
    biases = {name: w for name, w in everything.items() if w.shape == value.shape[-1:]}
    for text, product in _products("weight", x, matrix, value.shape):
        if bias is not None:
            yield f"{text} + bias", product + bias
        yield text if bias is None else f"{text} without its bias", product
        yield from ((f"{text} + {name}", product + w) for name, w in biases.items())
    for other, w in everything.items():
        for text, product in _products(other, x, w, value.shape) if w.shape == matrix.shape else ():
            yield (
                text if bias is None else f"{text} + bias",
                product if bias is None else product + bias,
            )
            yield from (
                (f"{text} + {name}", product + w)
                for name, w in biases.items()
                if _beside(name, other)
            )


def _products(name: str, x: np.ndarray, matrix: np.ndarray, shape: tuple[int, ...]) -> Forms:
    for text, w in ((f"x @ {name}.T", matrix.T), (f"x @ {name}", matrix)):
        if x.shape[-1] == w.shape[0] and (*x.shape[:-1], w.shape[1]) == shape:
            yield text, x @ w


def _beside(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]


def lookup(value: np.ndarray, other: np.ndarray, own: Arrays) -> Forms:
    """Rows of a table: which of them an embedding gives, where the other side gives others."""
    table = next((w for w in own.values() if w.ndim == 2), None)
    if (
        table is None
        or len(own) > 1
        or value.shape[-1:] != table.shape[1:]
        or value.shape != other.shape
    ):
        return
    rows, others = (np.abs(x[..., :1] - table[:, 0]).argmin(-1) for x in (value, other))
    same = (rows == rows.flat[0]).all() and (others == others.flat[0]).all()
    at = (
        tuple(int(i[0]) for i in np.nonzero(rows != others))
        if (rows != others).any()
        else (0,) * rows.ndim
    )
    yield f"row {rows[at]} of its table " + ("everywhere" if same else f"at {at}"), table[rows]


def norm(value: np.ndarray, x: np.ndarray, own: Arrays) -> Forms:
    """Layer norm and RMS norm, with the epsilon that fits best."""
    affine = _affine(value, x, own)
    if affine is None:
        return
    scale, shift = affine
    centred = x - x.mean(-1, keepdims=True)
    kinds = {
        "layer norm": (centred, (centred**2).mean(-1, keepdims=True)),
        "RMS norm": (x, (x**2).mean(-1, keepdims=True)),
        "layer norm with the variance divided by d - 1": (
            centred,
            centred.var(-1, ddof=1, keepdims=True),
        ),
    }
    ways = {
        "": (scale, shift),
        ", scale and shift swapped": (shift, scale),
        ", times 1 + scale": (1 + scale, shift),
    }
    ways |= {
        ", without its shift": (scale, 0 * shift),
        ", without scale and shift": (1 + 0 * scale, 0 * shift),
    }
    for kind, (centre, square) in kinds.items():
        for how, (a, b) in ways.items():
            yield from _with_epsilon(kind, how, value, centre, square, a, b)


def group_norm(value: np.ndarray, x: np.ndarray, own: Arrays) -> Forms:
    """Group norm with the channels last or first, with the epsilon that fits best."""
    yield from _group_norm(value, x, own)
    if value.ndim == x.ndim > 2:
        forms = _group_norm(np.moveaxis(value, 1, -1), np.moveaxis(x, 1, -1), own)
        yield from ((text, np.moveaxis(form, -1, 1)) for text, form in forms)


def _group_norm(value: np.ndarray, x: np.ndarray, own: Arrays) -> Forms:
    affine = _affine(value, x, own)
    if affine is None or x.ndim < 3:
        return
    channels = x.shape[-1]
    for groups in (g for g in range(1, channels + 1) if channels % g == 0):
        grouped, back = _grouping(x.shape, groups)
        rows, scale, shift, normed = (
            grouped(np.broadcast_to(y, x.shape)) for y in (x, *affine, value)
        )
        centred = rows - rows.mean(-1, keepdims=True)
        square = (centred**2).mean(-1, keepdims=True)
        forms = _with_epsilon(
            f"group norm of {groups} groups", "", normed, centred, square, scale, shift
        )
        yield from ((text, back(form)) for text, form in forms)


def _grouping(shape: tuple[int, ...], groups: int) -> tuple[Callable, Callable]:
    """Return a function that makes a row of each group of channels, and its inverse."""
    apart = (shape[0], -1, groups, shape[-1] // groups)
    joined = (shape[0], groups, -1)

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(apart).swapaxes(1, 2).reshape(joined)

    def back(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(shape[0], groups, -1, apart[-1]).swapaxes(1, 2).reshape(shape)

    return grouped, back


def _affine(value: np.ndarray, x: np.ndarray, own: Arrays) -> tuple[np.ndarray, np.ndarray] | None:
    vectors = [w for w in own.values() if w.shape == x.shape[-1:]]
    if value.shape != x.shape or not 1 <= len(vectors) <= 2 or len(vectors) < len(own):
        return None
    return vectors[0], vectors[1] if len(vectors) == 2 else np.zeros_like(vectors[0])


def _with_epsilon(kind, how, value, centre, square, scale, shift) -> Forms:
    factor = _factor(value, centre, scale, shift)
    if factor is None:
        return
    inside = _epsilon(factor**-2 - square)
    yield f"{kind} with eps={inside:g}{how}", centre / np.sqrt(square + inside) * scale + shift
    beside = _epsilon(1 / factor - np.sqrt(square))
    text = f"{kind} with eps={beside:g} added to the standard deviation{how}"
    yield text, centre / (np.sqrt(square) + beside) * scale + shift


def _factor(
    value: np.ndarray, centre: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> np.ndarray | None:
    """Return what each row was multiplied by before scale and shift."""
    if not scale.all():
        return None
    normal = (value - shift) / scale
    factor = (centre * normal).sum(-1, keepdims=True) / (centre**2).sum(-1, keepdims=True)
    return factor if np.isfinite(factor).all() and (factor > 0).all() else None


def _epsilon(found: np.ndarray) -> float:
    # To three digits, as people write it; what is not so does not fit. What rounding leaves of 0 is
    # 0.
    number = float(f"{np.median(found):.2e}")
    return number if number > tolerance.REORDERED * np.finfo(np.float64).eps else 0.0


def is_one_pass_norm(value: np.ndarray, other: np.ndarray, x: np.ndarray, own: Arrays) -> bool:
    """Return whether `value` is the layer norm `other` with the variance taken in one pass.

    `mean(x^2) - mean(x)^2` has the rounding of `mean(x^2)`, where the variance itself may be far
    smaller.
    """
    affine, mean = _affine(value, x, own), x.mean(-1, keepdims=True)
    if affine is None:
        return False
    with np.errstate(all="ignore"):
        factor, right = (_factor(side, x - mean, *affine) for side in (value, other))
        if factor is None or right is None:
            return False
        variance = x.var(-1, keepdims=True)  # each side may have its own epsilon
        off, noise = (
            np.abs(found - _epsilon(found))
            for found in (factor**-2 - variance, right**-2 - variance)
        )
    roundings = tolerance.REORDERED * np.finfo(np.float64).eps
    centring = max(tolerance.FORWARD, roundings * float(np.max(np.abs(mean) * right))) * np.max(
        np.abs(value)
    )
    rest = np.abs((x - mean) * factor * affine[0] + affine[1] - value)
    lost = off <= roundings * (x**2).mean(-1, keepdims=True)
    return bool(lost.all() and rest.max() <= centring and off.max() > 8 * noise.max())
