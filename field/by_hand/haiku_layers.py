"""Layers of Haiku: weights of torch.nn are placed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import haiku
import jax.numpy as jnp
import torch

from field.by_hand.both import Case, layer_case
from field.by_hand.flax_cells import cell_case, gates, lstm_case
from field.by_hand.flax_layers import STRESSED, X, hidden_keys, mha, torch_attention


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "MultiHeadAttention/default": _attention,
        "LayerNorm/default": _layer_norm,
        "RMSNorm/default": partial(_rms_norm, None),
        "RMSNorm/epsilon": partial(_rms_norm, 1e-5),
        "LSTM/step": partial(_lstm, 0.0),
        "LSTM/forget": partial(_lstm, 1.0),
        "GRU/step": _gru,
    }
    yield from ((f"haiku/{name}", make) for name, make in rows.items())


def _applied(function):
    return haiku.without_apply_rng(haiku.transform(function)).apply


def _attention():
    @_applied
    def run(x, mask):
        layer = haiku.MultiHeadAttention(3, 4, w_init=haiku.initializers.Constant(0.0), name="mha")
        return layer(x, x, x, mask=hidden_keys(mask))

    def ours(v, mask):
        parts = zip(
            gates(v, "in_proj_weight", "qkv").values(),
            gates(v, "in_proj_bias", "qkv").values(),
            strict=True,
        )
        names = ("query", "key", "value")
        params = {
            f"mha/{name}": {"w": w.T, "b": b} for name, (w, b) in zip(names, parts, strict=True)
        }
        params["mha/linear"] = {"w": v["out_proj.weight"].T, "b": v["out_proj.bias"]}
        return run(params, v["x"], mask)

    return layer_case(mha(), X, ours, torch_attention, True, STRESSED)


def _layer_norm():
    @_applied
    def run(x):
        return haiku.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)

    def ours(v, mask):
        return run({"norm": {"scale": v["weight"], "offset": v["bias"]}}, v["x"])

    return layer_case(torch.nn.LayerNorm(12), X, ours, stresses=STRESSED)


def _rms_norm(epsilon):
    @_applied
    def run(x):
        return haiku.RMSNorm(-1, name="norm", **({} if epsilon is None else {"eps": epsilon}))(x)

    def ours(v, mask):
        return run({"norm": {"scale": v["weight"]}}, v["x"])

    return layer_case(torch.nn.RMSNorm(12, eps=epsilon), X, ours, stresses=STRESSED)


def _lstm(forget):
    """Return the case of Haiku's LSTM, which has the gates in the order i g f o.

    Haiku adds 1 to the forget gate, so `forget` is subtracted from its bias.
    """

    @_applied
    def run(x, hidden, state):
        new = haiku.LSTM(5, name="cell")(x, haiku.LSTMState(hidden, state))[1]
        return {"hidden": new.hidden, "state": new.cell}

    def ours(v, mask):
        weights = gates(
            {"w": jnp.concatenate([v["weight_ih"], v["weight_hh"]], axis=1)}, "w", "ifgo"
        )
        biases = gates({"b": v["bias_ih"] + v["bias_hh"]}, "b", "ifgo")
        biases["f"] = biases["f"] - forget
        linear = {"w": jnp.concatenate([weights[gate].T for gate in "igfo"], axis=1)}
        linear["b"] = jnp.concatenate([biases[gate] for gate in "igfo"])
        return run({"cell/linear": linear}, v["x"], v["hidden"], v["state"])

    return lstm_case(ours)


def _gru():
    """Haiku has the gates in the order z r a, and its z is 1 - z of PyTorch's."""

    @_applied
    def run(x, hidden):
        return haiku.GRU(5, name="cell")(x, hidden)[0]

    def ours(v, mask):
        def place(name):
            parts = gates(v, name, "rzn")
            return jnp.concatenate([-parts["z"], parts["r"], parts["n"]])

        names = {"w_i": "weight_ih", "w_h": "weight_hh", "b": "bias_ih"}
        return run({"cell": {new: place(old).T for new, old in names.items()}}, v["x"], v["hidden"])

    return cell_case(torch.nn.GRUCell(4, 5), ours, ("bias_hh",))
