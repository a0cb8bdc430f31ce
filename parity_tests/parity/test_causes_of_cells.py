"""Causes in recurrent cells and in running statistics."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.convert import Layout, Rule
from flax_attn.parity import compare
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.substitute import Evidence, Target

RANDOM = np.random.default_rng(0)
CELL = torch.nn.GRUCell(4, 5).double()
X, STATE = (torch.tensor(RANDOM.normal(size=(3, size))) for size in (4, 5))
RIGHT = "a GRU with the reset gate after the product with the state"


def stepped(before=False, no_n=False, no_bias=False, take=False, exchanged=False):
    """Return a new state, by the formula of PyTorch but for these faults."""
    bias = torch.zeros(15).double() if no_bias else CELL.bias_hh.detach().clone()
    bias[10:] = 0 if no_n else bias[10:]
    gates = (X @ CELL.weight_ih.T + CELL.bias_ih).chunk(3, -1)
    weights, biases = CELL.weight_hh.chunk(3), bias.chunk(3)
    r, z = (
        torch.sigmoid(gates[i] + STATE @ weights[i].T + biases[i])
        for i in ((1, 0) if exchanged else (0, 1))
    )
    inner = (
        (r * STATE) @ weights[2].T + biases[2] if before else r * (STATE @ weights[2].T + biases[2])
    )
    n = torch.tanh(gates[2] + inner)
    return (z * n + (1 - z) * STATE if take else (1 - z) * n + z * STATE).detach()


@pytest.mark.parametrize(
    ("faults", "name"),
    [
        ({"before": True}, "a GRU with the reset gate before that product"),
        ({"no_n": True}, f"{RIGHT}, without the bias of the state in n"),
        ({"no_bias": True}, f"{RIGHT}, without the biases of the state"),
        ({"take": True}, f"{RIGHT}, the update gate on the new state"),
        ({"exchanged": True}, f"{RIGHT}, its gates r and z exchanged"),
    ],
)
def test_grus(faults, name):
    theirs = CELL(X, STATE).detach()
    assert torch.allclose(theirs, stepped(), rtol=0, atol=1e-15)
    sources = {"input": X.numpy(), "input 2": STATE.numpy()}
    weights = {f"cell.{key}": w.detach().numpy() for key, w in CELL.named_parameters()}
    found = Evidence(
        "cell", "module", [Target("output", stepped(**faults).numpy(), theirs.numpy())], sources
    )
    assert causes_of(found, weights) == [f"cell: flax has {name}, torch has {RIGHT}"]
    found = Evidence(
        "cell", "module", [Target("output", theirs.numpy() ** 3, theirs.numpy())], sources
    )
    assert causes_of(found, weights) == [
        f"cell: torch has {RIGHT}, flax has none of the known formulas"
    ]


LSTM = torch.nn.LSTMCell(4, 5).double()
CARRY = torch.tensor(RANDOM.normal(size=(3, 5)))


def lstm_stepped(forget=0.0, order=(0, 1, 2, 3)):
    """Return both new states, with gates in another order and a number added to the forget gate."""
    gates = X @ LSTM.weight_ih.T + LSTM.bias_ih + STATE @ LSTM.weight_hh.T + LSTM.bias_hh
    i, f, g, o = (gates.chunk(4, -1)[part] for part in order)
    carry = torch.sigmoid(f + forget) * CARRY + torch.sigmoid(i) * torch.tanh(g)
    return {
        "hidden state": (torch.sigmoid(o) * torch.tanh(carry)).detach(),
        "cell state": carry.detach(),
    }


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("kind", ["hidden state", "cell state"])
@pytest.mark.parametrize(
    ("faults", "name"),
    [
        ({"forget": 1.0}, " that adds 1 to its forget gate"),
        ({"order": (0, 2, 1, 3)}, ", its gates in the order i, g, f, o"),
    ],
)
def test_lstms(faults, name, kind, matrices):
    right = dict(zip(("hidden state", "cell state"), LSTM(X, (STATE, CARRY)), strict=True))[
        kind
    ].detach()
    assert torch.allclose(right, lstm_stepped()[kind], rtol=0, atol=1e-15)
    sources = dict(
        zip(("input", "input 2", "input 3"), (x.numpy() for x in (X, STATE, CARRY)), strict=True)
    )
    weights = {
        f"cell.{key}": w.detach().numpy() for key, w in reversed(list(LSTM.named_parameters()))
    }
    if matrices == 1:
        joined = np.concatenate([weights.pop("cell.weight_ih"), weights.pop("cell.weight_hh")], 1)
        weights["cell.linear.weight"] = joined
    ours = lstm_stepped(**faults)[kind].numpy()
    found = Evidence("cell", "module", [Target("output", ours, right.numpy())], sources)
    text = f"the {kind} of an LSTM"
    assert causes_of(found, weights) == [f"cell: flax has {text}{name}, torch has {text}"]
    found = Evidence("cell", "module", [Target("output", ours**3, right.numpy())], sources)
    assert causes_of(found, weights) == [
        f"cell: torch has {text}, flax has none of the known formulas"
    ]


def test_the_missing_bias_of_the_cell_of_nnx_is_a_cause():
    rules = (
        Rule(("dense_i.kernel",), "weight_ih", "i o -> o i"),
        Rule(("dense_h.kernel",), "weight_hh", "i o -> o i"),
        Rule(("dense_i.bias",), "bias_ih"),
    )
    theirs = torch.nn.GRUCell(4, 5)
    with torch.no_grad():
        theirs.bias_hh[:10] = 0  # r and z have one bias
    with jax.numpy_dtype_promotion("standard"):
        report = compare(
            nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)),
            theirs,
            [(3, 4), (3, 5)],
            layout=Layout(rules, ignored="bias_hh"),
            flax_call=lambda cell, x, state: cell(state, x)[0],
            checks=["forward"],
        )
    assert report.causes == [
        f"the whole module: flax has {RIGHT}, without the bias of the state in n, torch has {RIGHT}"
    ]


def ours(layer, x):
    output = layer(x, use_running_average=False)
    return {"output": output, "mean": layer.mean.get_value(), "var": layer.var.get_value()}


def theirs(layer, x):
    layer.train()
    output = layer(x.movedim(-1, 1)).movedim(1, -1)
    return {"output": output, "mean": layer.running_mean.clone(), "var": layer.running_var.clone()}


@pytest.mark.parametrize(
    ("momentum", "causes"),
    [
        (
            0.9,
            [
                ", output 'var': flax has running_var of the variance divided by n with"
                " momentum=0.1, "
            ],
        ),
        (
            0.8,
            [
                ": flax has momentum=0.2, torch 0.1",
                ", output 'var': flax has running_var of the variance divided by n ",
            ],
        ),
    ],
)
def test_the_running_variance_of_flax_is_a_cause(momentum, causes):
    layer = nnx.BatchNorm(5, momentum=momentum, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        report = compare(
            layer,
            torch.nn.BatchNorm1d(5).eval(),
            [(3, 7, 5)],
            flax_call=ours,
            torch_call=theirs,
            checks=["forward"],
        )
    starts = [f"the whole module{cause}" for cause in causes]
    assert len(report.causes) == len(causes)
    assert all(cause.startswith(start) for cause, start in zip(report.causes, starts, strict=True))
    assert "divided by n - 1 with momentum=0.1" in report.causes[-1]
