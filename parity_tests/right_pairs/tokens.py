"""Layers of tokens: attention and recurrent cells."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.nn.functional import scaled_dot_product_attention

from flax_attn.convert import Layout, Rule
from parity_tests.right_pairs.pairs import Build, Sides, Size, rngs


def attention(size: Size) -> nnx.MultiHeadAttention:
    # Its own function has the softmax in float32, even in float64.
    options = {"attention_fn": _attend, "decode": False}
    return nnx.MultiHeadAttention(size.heads, size.width, **options, rngs=rngs())


def _attend(query, key, value, mask=None, **_):
    """Attention whose softmax is in float32 for lower dtypes, as PyTorch's is."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=wide)
    scores = scores * scale
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _torch_attention(size: Size) -> torch.nn.MultiheadAttention:
    return torch.nn.MultiheadAttention(size.width, size.heads, batch_first=True).eval()


def self_attention(size: Size) -> Sides:
    def theirs(layer, x):
        return layer(x, x, x, need_weights=False)[0]

    sides = attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence], {"torch_call": theirs})


def causal_attention(size: Size) -> Sides:
    def ours(layer, x):
        return layer(x, mask=nnx.make_causal_mask(x[..., 0]))

    def theirs(layer, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return layer(x, x, x, attn_mask=hidden, need_weights=False)[0]

    sides = attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence], {"flax_call": ours, "torch_call": theirs})


def padded_attention(size: Size) -> Sides:
    def ours(layer, x, mask):
        return layer(x, mask=mask[:, None, None])

    def theirs(layer, x, mask):
        return layer(x, x, x, key_padding_mask=~mask, need_weights=False)[0]

    lengths = size.tokens // 2 + np.arange(1, size.batch + 1)
    mask = np.arange(size.tokens) < lengths[:, None]
    sides = attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence, mask], {"flax_call": ours, "torch_call": theirs})


def cross_attention(size: Size) -> Sides:
    def ours(layer, x, context):
        return layer(x, context)

    def theirs(layer, x, context):
        return layer(x, context, context, need_weights=False)[0]

    sides = attention(size), _torch_attention(size)
    inputs = [size.sequence, (size.batch, size.tokens + 2, size.width)]
    return Sides(*sides, inputs, {"flax_call": ours, "torch_call": theirs})


def grouped_query_function(size: Size) -> Sides:
    """Queries of several heads for each key."""
    query = size.batch, size.tokens, 2 * size.heads, size.width
    key = size.batch, size.tokens, size.heads, size.width

    def ours(q, k, v):
        groups = q.shape[2] // k.shape[2]
        visible = nnx.make_causal_mask(q[:1, :, 0, 0])
        k = jnp.repeat(k, groups, axis=2)
        v = jnp.repeat(v, groups, axis=2)
        return _attend(q, k, v, visible)

    def theirs(q, k, v):
        options = {"is_causal": True, "enable_gqa": True}
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return Sides(ours, theirs, [query, key, key])


# Recurrent cells, whose two biases in PyTorch are one in Flax: the other is 0.


def _packed(bias: str) -> list[Rule]:
    kernels = [Rule((f"dense_{side}.kernel",), f"weight_{side}h", "i o -> o i") for side in "ih"]
    return [*kernels, Rule((f"dense_{bias}.bias",), f"bias_{bias}h")]


def _without(cell, bias: str):
    torch.nn.init.zeros_(getattr(cell, bias))
    getattr(cell, bias).requires_grad_(False)
    return cell


def _lstm_call(cell, x, hidden, state):
    (state, hidden), _ = cell((state, hidden), x)
    return hidden, state


def lstm_cell(size: Size) -> Sides:
    ours = nnx.OptimizedLSTMCell(size.width, size.out, rngs=rngs())
    theirs = _without(torch.nn.LSTMCell(size.width, size.out), "bias_ih")
    layout = Layout(tuple(_packed("h")), "bias_ih")
    inputs = [(size.batch, size.width), *[(size.batch, size.out)] * 2]

    def call(cell, x, hidden, state):
        return cell(x, (hidden, state))

    options = {"layout": layout, "flax_call": _lstm_call, "torch_call": call}
    return Sides(ours, theirs, inputs, options)


def rnn_cell(size: Size) -> Sides:
    ours = nnx.SimpleCell(size.width, size.out, dtype=None, rngs=rngs())
    theirs = _without(torch.nn.RNNCell(size.width, size.out), "bias_hh")
    layout = Layout(tuple(_packed("i")), "bias_hh")
    inputs = [(size.batch, size.width), (size.batch, size.out)]
    options = {"layout": layout, "flax_call": lambda cell, x, hidden: cell(hidden, x)[1]}
    return Sides(ours, theirs, inputs, options)


class _Gru(nnx.Module):
    """The cell of PyTorch, written out."""

    def __init__(self, size: Size):
        self.ih = nnx.Linear(size.width, 3 * size.out, rngs=rngs())
        self.hh = nnx.Linear(size.out, 3 * size.out, rngs=rngs())

    def __call__(self, x, hidden):
        of_input = jnp.split(self.ih(x), 3, -1)
        of_state = jnp.split(self.hh(hidden), 3, -1)
        reset = jax.nn.sigmoid(of_input[0] + of_state[0])
        update = jax.nn.sigmoid(of_input[1] + of_state[1])
        new = jnp.tanh(of_input[2] + reset * of_state[2])
        return (1 - update) * new + update * hidden


def gru_cell(size: Size) -> Sides:
    rules = []
    for side in ("ih", "hh"):
        rules.append(Rule((f"{side}.kernel",), f"weight_{side}", "i o -> o i"))
        rules.append(Rule((f"{side}.bias",), f"bias_{side}"))
    layout = Layout(tuple(rules))
    inputs = [(size.batch, size.width), (size.batch, size.out)]
    theirs = torch.nn.GRUCell(size.width, size.out)
    return Sides(_Gru(size), theirs, inputs, {"layout": layout})


def lstm(size: Size) -> Sides:
    """A whole sequence."""
    cell = nnx.OptimizedLSTMCell(size.width, size.out, rngs=rngs())
    theirs = _without(torch.nn.LSTM(size.width, size.out, batch_first=True), "bias_ih_l0")
    rules = []
    for rule in _packed("h"):
        rules.append(Rule((f"cell.{rule.ours[0]}",), f"{rule.theirs}_l0", rule.pattern))

    def call(layer, x):
        # Its own first state is in float32.
        state = jnp.zeros((*x.shape[:-2], size.out), x.dtype)
        return layer(x, initial_carry=(state, state))

    options = {
        "layout": Layout(tuple(rules), "bias_ih_l0"),
        "flax_call": call,
        "torch_call": lambda layer, x: layer(x)[0],
    }
    return Sides(nnx.RNN(cell, rngs=rngs()), theirs, [size.sequence], options)


LAYERS: tuple[Build, ...] = (
    self_attention,
    causal_attention,
    padded_attention,
    cross_attention,
    grouped_query_function,
    lstm_cell,
    rnn_cell,
    gru_cell,
    lstm,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
