"""Recurrent cells and running statistics, in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from flax_attn.parity.adapters.adapter import Arrays

Forms = Iterator[tuple[str, np.ndarray]]
RESETS = {
    "after": "the reset gate after the product with the state",
    "before": "the reset gate before that product",
}
BIASES = {
    "both": "",
    "no n": ", without the bias of the state in n",
    "input": ", without the biases of the state",
}
UPDATES = {"keep": "", "take": ", the update gate on the new state"}
SOURCES = 6  # of an LSTM, three of which are tried together
FORGETS = {0.0: "", 1.0: " that adds 1 to its forget gate"}
ORDERS = {(0, 1, 2): "", (1, 0, 2): ", its gates r and z exchanged"}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2


def gru(value: np.ndarray, sources: Arrays, own: Arrays) -> Forms:
    """Yield steps of a GRU, first PyTorch's: `n = tanh(W_in x + b_in + r * (W_hn h + b_hn))`."""
    width = value.shape[-1]
    matrices = [w for w in own.values() if w.ndim == 2 and len(w) == 3 * width]
    biases = [w for w in own.values() if w.shape == (3 * width,)]
    if len(matrices) != 2 or len(biases) > 2:
        return
    of_n = [np.concatenate([np.zeros(2 * width), w]) for w in own.values() if w.shape == (width,)]
    biases = [*biases, *of_n, np.zeros(3 * width), np.zeros(3 * width)][
        :2
    ]  # of the input, and of the state
    for x, state in permutations(sources.values(), 2):
        if state.shape == value.shape and x.shape == (*value.shape[:-1], matrices[0].shape[1]):
            for reset, bias, update, order in product(RESETS, BIASES, UPDATES, ORDERS):
                text = f"a GRU with {RESETS[reset]}{BIASES[bias]}{UPDATES[update]}{ORDERS[order]}"
                yield text, _gru(x, state, matrices, biases, reset, bias, update, order)


def _gru(
    x, state, matrices, biases, reset: str, bias: str, update: str, order: tuple[int, ...]
) -> np.ndarray:
    def gates(array: np.ndarray) -> list[np.ndarray]:
        parts = np.split(array, 3)
        return [parts[i] for i in order]

    (ir, iz, inn), (hr, hz, hn) = map(gates, matrices)
    (br, bz, bn), (cr, cz, cn) = map(gates, biases)
    cn = cn if bias == "both" else 0.0
    cr, cz = (0.0, 0.0) if bias == "input" else (cr, cz)
    r, z = (
        _sigmoid(x @ i.T + b + state @ h.T + c)
        for i, b, h, c in ((ir, br, hr, cr), (iz, bz, hz, cz))
    )
    hidden = r * (state @ hn.T + cn) if reset == "after" else (r * state) @ hn.T + cn
    n = np.tanh(x @ inn.T + bn + hidden)
    return (1 - z) * n + z * state if update == "keep" else z * n + (1 - z) * state


def lstm(value: np.ndarray, sources: Arrays, own: Arrays) -> Forms:
    """Yield steps of an LSTM, either state; first PyTorch's, with gates in the order i, f, g, o."""
    width = value.shape[-1]
    matrices = [w for w in own.values() if w.ndim == 2 and len(w) == 4 * width]
    bias = np.sum([w for w in own.values() if w.shape == (4 * width,)], axis=0)
    if not 1 <= len(matrices) <= 2:
        return
    triples = permutations(list(sources.values())[:SOURCES], 3)
    for matrix, (x, hidden, state) in product(_side_by_side(matrices), triples):
        joined = (4 * width, x.shape[-1] + width)
        if (
            hidden.shape == state.shape == value.shape
            and x.ndim == value.ndim
            and matrix.shape == joined
        ):
            gates = np.split(np.concatenate([x, hidden], -1) @ matrix.T + bias, 4, axis=-1)
            for order, (forget, added) in product(permutations("ifgo"), FORGETS.items()):
                i, f, g, o = (gates[order.index(gate)] for gate in "ifgo")
                new = _sigmoid(f + forget) * state + _sigmoid(i) * np.tanh(g)
                way = (
                    ""
                    if "".join(order) == "ifgo"
                    else f", its gates in the order {', '.join(order)}"
                )
                yield f"the hidden state of an LSTM{added}{way}", _sigmoid(o) * np.tanh(new)
                yield f"the cell state of an LSTM{added}{way}", new


def _side_by_side(matrices: list[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate(parts, 1) for parts in permutations(matrices)]


def running_statistics(value: np.ndarray, sources: Arrays, weights: Arrays) -> Forms:
    """Yield a running variance or mean after a batch, with the fitting momentum of PyTorch."""
    known = {
        name: old for name, old in weights.items() if old.shape == value.shape and "running" in name
    }
    for (name, old), x in product(known.items(), sources.values()):
        for axis in {1, x.ndim - 1} if value.ndim == 1 and x.ndim > 1 else ():
            if x.shape[axis] == len(value):
                rows = np.moveaxis(x, axis, -1).reshape(-1, len(value))
                for text, batch in _of_batch(name, rows):
                    momentum = float(f"{_momentum(value - old, batch - old):.6g}")
                    yield f"{text} with momentum={momentum:g}", old + momentum * (batch - old)


def _of_batch(name: str, rows: np.ndarray) -> Forms:
    if "mean" in name:
        yield f"{name} of the mean", rows.mean(0)
        return
    yield f"{name} of the variance divided by n - 1", rows.var(0, ddof=1)
    yield f"{name} of the variance divided by n", rows.var(0)


def _momentum(moved: np.ndarray, whole: np.ndarray) -> float:
    return float(moved @ whole / (whole @ whole))
