"""Compare layers of Haiku with torch.nn: functions with their parameters as callable trees."""

from __future__ import annotations

from functools import partial

import haiku
import jax
import jax.numpy as jnp
import torch

from field.port import Built, Port
from field.ports.flax_layers import CELL, STRESSED, torch_attention
from flax_attn.convert import Layout, Rule


def ports() -> list[Port]:
    """Return the ports of Haiku."""
    return [
        _port(
            "MultiHeadAttention/default",
            "biases, padding",
            _attention,
            "torch.nn.MultiheadAttention",
        ),
        _port("LayerNorm/default", "default arguments", _layer_norm, "torch.nn.LayerNorm"),
        _port("RMSNorm/default", "default arguments", partial(_rms_norm, None), "torch.nn.RMSNorm"),
        _port("RMSNorm/epsilon", "eps=1e-5", partial(_rms_norm, 1e-5), "torch.nn.RMSNorm"),
        _port("LSTM/step", "one step, one bias", partial(_lstm, 0.0), "torch.nn.LSTMCell", CELL),
        _port(
            "LSTM/forget",
            "one step, torch's forget bias 1 larger",
            partial(_lstm, 1.0),
            "torch.nn.LSTMCell",
            CELL,
        ),
        _port(
            "GRU/step",
            "one step, without biases of the hidden state",
            _gru,
            "torch.nn.GRUCell",
            CELL,
        ),
    ]


def _port(name, configuration, build, twin, checks=STRESSED):
    return Port(f"haiku/{name}", "dm-haiku", configuration, lambda dtype: build(), twin, checks)


def _bound(function, *inputs):
    """Bind a function of arrays to its parameters, as a callable tree for `compare`."""
    transformed = haiku.without_apply_rng(haiku.transform(function))
    return jax.tree_util.Partial(transformed.apply, transformed.init(jax.random.key(0), *inputs))


def _rules(module, pairs):
    return [Rule((f"{module}.{ours}",), theirs, *pattern) for ours, theirs, *pattern in pairs]


def _attention():
    def run(x, mask=None):
        layer = haiku.MultiHeadAttention(
            3, 4, w_init=haiku.initializers.VarianceScaling(), name="mha"
        )
        return layer(x, x, x, mask=None if mask is None else mask[:, None, None])

    def ours(layer, x, mask=None):
        return layer(x, mask)

    names = [f"mha/{name}" for name in ("query", "key", "value")]
    rules = [
        Rule(tuple(f"{name}.w" for name in names), "in_proj_weight", "i o -> o i"),
        Rule(tuple(f"{name}.b" for name in names), "in_proj_bias"),
        Rule(("mha/linear.w",), "out_proj.weight", "i o -> o i"),
        Rule(("mha/linear.b",), "out_proj.bias"),
    ]
    twin = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    bound = _bound(run, jnp.ones((2, 5, 12)))
    return Built(
        bound,
        twin,
        [(3, 7, 12)],
        [Layout(tuple(rules))],
        flax_call=ours,
        torch_call=torch_attention,
    )


def _layer_norm():
    def run(x):
        return haiku.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)

    rules = _rules("norm", [("scale", "weight"), ("offset", "bias")])
    return Built(_bound(run, jnp.ones((2, 12))), torch.nn.LayerNorm(12), [(3, 7, 12)], [rules])


def _rms_norm(epsilon):
    options = {} if epsilon is None else {"eps": epsilon}

    def run(x):
        return haiku.RMSNorm(-1, name="norm", **options)(x)

    twin = torch.nn.RMSNorm(12, eps=epsilon)
    return Built(
        _bound(run, jnp.ones((2, 12))), twin, [(3, 7, 12)], [_rules("norm", [("scale", "weight")])]
    )


def _lstm(forget):
    """Build the two LSTM steps: Haiku has the gates in the order i g f o, torch i f g o.

    The forget gate of torch has `forget` added to it.
    """

    def run(x, hidden, state):
        _, new = haiku.LSTM(5, name="cell")(x, haiku.LSTMState(hidden, state))
        return {"hidden": new.hidden, "state": new.cell}

    bound = _bound(run, jnp.ones((3, 4)), jnp.ones((3, 5)), jnp.ones((3, 5)))
    rules = _rules("cell/linear", [("w", "linear.weight", "i o -> o i"), ("b", "linear.bias")])
    return Built(bound, TorchLSTM(forget), [(3, 4), (3, 5), (3, 5)], [rules])


class TorchLSTM(torch.nn.Module):
    """torch.nn.LSTMCell with one matrix for input and hidden state, and Haiku's gate order."""

    def __init__(self, forget):
        super().__init__()
        self.linear, self.forget = torch.nn.Linear(4 + 5, 4 * 5), forget

    def forward(self, x, hidden, state):
        """Return the next hidden state and the next state."""
        order = torch.arange(20).reshape(4, 5)[[0, 2, 1, 3]].flatten()
        weight, bias = self.linear.weight[order], self.linear.bias[order]
        extra = torch.zeros_like(bias)
        extra[5:10] = self.forget
        found = torch.lstm_cell(x, (hidden, state), weight[:, :4], weight[:, 4:], bias, extra)
        return dict(zip(("hidden", "state"), found, strict=True))


def _gru():
    """Build the two GRU steps: Haiku has the gates in the order z r a.

    Its z is 1 - z of torch, and its reset gate is applied before the product.
    """

    def run(x, hidden):
        return haiku.GRU(5, name="cell")(x, hidden)[0]

    class Reordered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            cell = torch.nn.GRUCell(4, 5)
            self.weight_ih, self.weight_hh, self.bias_ih = (
                cell.weight_ih,
                cell.weight_hh,
                cell.bias_ih,
            )

        def forward(self, x, hidden):
            sign = torch.tensor([1.0, -1.0, 1.0], dtype=x.dtype).repeat_interleave(5)
            order = torch.arange(15).reshape(3, 5)[[1, 0, 2]].flatten()
            ih, hh, bias = (p[order] for p in (self.weight_ih, self.weight_hh, self.bias_ih))
            return torch.gru_cell(
                x,
                hidden,
                ih * sign[:, None],
                hh * sign[:, None],
                bias * sign,
                torch.zeros_like(bias),
            )

    pairs = [
        ("w_i", "weight_ih", "i o -> o i"),
        ("w_h", "weight_hh", "i o -> o i"),
        ("b", "bias_ih"),
    ]
    bound = _bound(run, jnp.ones((3, 4)), jnp.ones((3, 5)))
    return Built(bound, Reordered(), [(3, 4), (3, 5)], [_rules("cell", pairs)])
