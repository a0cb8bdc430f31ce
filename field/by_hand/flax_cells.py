"""Recurrent cells of Flax, one step.

PyTorch adds two biases: a port with one bias gets their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import torch
from flax import linen, nnx

from field.by_hand.both import Case, Values, layer_case
from field.by_hand.flax_layers import filled

CELL = ("times 10", "times 1/1000")
INPUTS = {"x": (3, 4), "hidden": (3, 5)}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "linen.LSTMCell/step": _linen_lstm,
        "nnx.OptimizedLSTMCell/step": _nnx_lstm,
        "linen.GRUCell/step": _linen_gru,
        "nnx.GRUCell/step": _nnx_gru,
        "nnx.GRUCell/no-bias-of-n": partial(_nnx_gru, absent=("bias_hh",)),
        "nnx.SimpleCell/step": _simple,
    }
    yield from ((f"flax/{name}", make) for name, make in rows.items())


def gates(v: Values, name: str, letters: str) -> Mapping[str, Any]:
    """Return the part of each gate."""
    return dict(zip(letters, jnp.split(v[name], len(letters)), strict=True))


def lstm_case(ours: Callable) -> Case:
    """Return the case of a cell with two states."""
    inputs = {**INPUTS, "state": (3, 5)}

    def theirs(run, mask, x, hidden, state):
        hidden, state = run(x, (hidden, state))
        return {"hidden": hidden, "state": state}

    return layer_case(torch.nn.LSTMCell(4, 5), inputs, ours, theirs, stresses=CELL)


def cell_case(twin: torch.nn.Module, ours: Callable, absent: tuple[str, ...] = ()) -> Case:
    """Return the case of a cell with one state."""
    return layer_case(twin, INPUTS, ours, stresses=CELL, absent=absent)


def _linen_lstm():
    def ours(v, mask):
        of_input, of_hidden = gates(v, "weight_ih", "ifgo"), gates(v, "weight_hh", "ifgo")
        bias = dict(zip("ifgo", jnp.split(v["bias_ih"] + v["bias_hh"], 4), strict=True))
        params = {f"i{gate}": {"kernel": w.T} for gate, w in of_input.items()}
        params |= {f"h{gate}": {"kernel": w.T, "bias": bias[gate]} for gate, w in of_hidden.items()}
        (state, hidden), _ = linen.LSTMCell(5).apply(
            {"params": params}, (v["state"], v["hidden"]), v["x"]
        )
        return {"hidden": hidden, "state": state}

    return lstm_case(ours)


def _nnx_lstm():
    cell = nnx.OptimizedLSTMCell(4, 5, rngs=nnx.Rngs(0))

    def ours(v, mask):
        params = {"dense_i.kernel": v["weight_ih"].T, "dense_h.kernel": v["weight_hh"].T}
        params["dense_h.bias"] = v["bias_ih"] + v["bias_hh"]
        (state, hidden), _ = filled(cell, params)((v["state"], v["hidden"]), v["x"])
        return {"hidden": hidden, "state": state}

    return lstm_case(ours)


def _linen_gru():
    def ours(v, mask):
        of_input, of_hidden = gates(v, "weight_ih", "rzn"), gates(v, "weight_hh", "rzn")
        first, second = gates(v, "bias_ih", "rzn"), gates(v, "bias_hh", "rzn")
        bias = {"r": first["r"] + second["r"], "z": first["z"] + second["z"], "n": first["n"]}
        params = {f"i{gate}": {"kernel": w.T, "bias": bias[gate]} for gate, w in of_input.items()}
        params |= {f"h{gate}": {"kernel": w.T} for gate, w in of_hidden.items()}
        params["hn"]["bias"] = second["n"]
        return linen.GRUCell(5).apply({"params": params}, v["hidden"], v["x"])[1]

    return cell_case(torch.nn.GRUCell(4, 5), ours)


def _nnx_gru(absent=()):
    cell = nnx.GRUCell(4, 5, rngs=nnx.Rngs(0))

    def ours(v, mask):
        params = {"dense_i.kernel": v["weight_ih"].T, "dense_h.kernel": v["weight_hh"].T}
        # There is no place for the bias of n.
        second = jnp.zeros(15) if absent else v["bias_hh"].at[10:].set(0.0)
        return filled(cell, params | {"dense_i.bias": v["bias_ih"] + second})(v["hidden"], v["x"])[
            1
        ]

    return cell_case(torch.nn.GRUCell(4, 5), ours, absent)


def _simple():
    cell = nnx.SimpleCell(4, 5, rngs=nnx.Rngs(0))

    def ours(v, mask):
        params = {"dense_i.kernel": v["weight_ih"].T, "dense_h.kernel": v["weight_hh"].T}
        return filled(cell, params | {"dense_i.bias": v["bias_ih"] + v["bias_hh"]})(
            v["hidden"], v["x"]
        )[1]

    return cell_case(torch.nn.RNNCell(4, 5), ours)
