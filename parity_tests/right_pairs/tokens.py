"""Layers of tokens: attention and recurrent cells."""

from collections.abc import Callable
from typing import Any

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
    scores = _scores(query, key)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _scores(query, key):
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=wide)
    return scores * query.shape[-1] ** -0.5


def _torch_attend(layer, x, memory, **options):
    # Asked for no weights, PyTorch calls its fused attention, as most models do.
    return layer(x, memory, memory, need_weights=False, **options)[0]


def _attentions(size: Size, inputs: list[Any], **calls: Callable[..., Any]) -> Sides:
    """Return the attention of both sides, called in some way."""
    theirs = torch.nn.MultiheadAttention(size.width, size.heads, batch_first=True)
    return Sides(attention(size), theirs.eval(), inputs, calls)


def self_attention(size: Size) -> Sides:
    def theirs(layer, x):
        return _torch_attend(layer, x, x)

    return _attentions(size, [size.sequence], torch_call=theirs)


def causal_attention(size: Size) -> Sides:
    def ours(layer, x):
        visible = nnx.make_causal_mask(x[..., 0])
        return layer(x, mask=visible)

    def theirs(layer, x):
        return _torch_attend(layer, x, x, attn_mask=later_tokens(x))

    return _attentions(size, [size.sequence], flax_call=ours, torch_call=theirs)


def later_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the mask in which PyTorch hides the tokens behind each."""
    tokens = x.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def padded_attention(size: Size) -> Sides:
    def ours(layer, x, mask):
        return layer(x, mask=mask[:, None, None])

    def theirs(layer, x, mask):
        # PyTorch's masks say what is hidden.
        return _torch_attend(layer, x, x, key_padding_mask=~mask)

    inputs = [size.sequence, _not_padding(size)]
    return _attentions(size, inputs, flax_call=ours, torch_call=theirs)


def _not_padding(size: Size) -> np.ndarray:
    """Return which tokens are no padding; each example has another length."""
    # No example is empty: a softmax over no key is for another bench.
    lengths = size.tokens // 2 + np.arange(1, size.batch + 1)
    return np.arange(size.tokens) < lengths[:, None]


def cross_attention(size: Size) -> Sides:
    def ours(layer, x, context):
        return layer(x, context)

    def theirs(layer, x, context):
        return _torch_attend(layer, x, context)

    inputs = [size.sequence, size.memory]
    return _attentions(size, inputs, flax_call=ours, torch_call=theirs)


def grouped_query_function(size: Size) -> Sides:
    """Queries of several heads for each key."""
    query = size.batch, size.tokens, 2 * size.heads, size.width
    key = size.batch, size.tokens, size.heads, size.width
    return Sides(_grouped_queries, _torch_grouped_queries, [query, key, key])


def _grouped_queries(q, k, v):
    groups = q.shape[2] // k.shape[2]
    visible = nnx.make_causal_mask(q[:1, :, 0, 0])
    k = jnp.repeat(k, groups, axis=2)
    v = jnp.repeat(v, groups, axis=2)
    return _attend(q, k, v, visible)


def _torch_grouped_queries(q, k, v):
    # PyTorch has the heads before the tokens.
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    found = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2)


# Recurrent cells, whose two biases in PyTorch are one in Flax: the other is 0.


def _cell_rules(bias: str) -> list[Rule]:
    kernels = [Rule((f"dense_{side}.kernel",), f"weight_{side}h", "i o -> o i") for side in "ih"]
    return [*kernels, Rule((f"dense_{bias}.bias",), f"bias_{bias}h")]


def _without(cell, bias: str):
    parameter = getattr(cell, bias)
    torch.nn.init.zeros_(parameter)
    # Frozen, it has no gradient to compare.
    parameter.requires_grad_(False)
    return cell


def _lstm_call(cell, x, hidden, state):
    # Flax has the state before the output, and PyTorch behind it.
    (state, hidden), _ = cell((state, hidden), x)
    return hidden, state


def _torch_lstm_call(cell, x, hidden, state):
    return cell(x, (hidden, state))


def lstm_cell(size: Size) -> Sides:
    ours = nnx.OptimizedLSTMCell(size.width, size.out, rngs=rngs())
    theirs = _without(torch.nn.LSTMCell(size.width, size.out), "bias_ih")
    layout = Layout(tuple(_cell_rules("h")), "bias_ih")
    options = {"layout": layout, "flax_call": _lstm_call, "torch_call": _torch_lstm_call}
    return Sides(ours, theirs, [size.vectors, size.states, size.states], options)


def rnn_cell(size: Size) -> Sides:
    # Its own dtype would be float32, whatever the input is.
    ours = nnx.SimpleCell(size.width, size.out, dtype=None, rngs=rngs())
    theirs = _without(torch.nn.RNNCell(size.width, size.out), "bias_hh")
    layout = Layout(tuple(_cell_rules("i")), "bias_hh")
    options = {"layout": layout, "flax_call": lambda cell, x, hidden: cell(hidden, x)[1]}
    return Sides(ours, theirs, [size.vectors, size.states], options)


class _Gru(nnx.Module):
    """The cell of PyTorch, written out."""

    # Flax's own cell has no bias behind the product with the state.
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


GRU = Layout(
    (
        Rule(("ih.kernel",), "weight_ih", "i o -> o i"),
        Rule(("ih.bias",), "bias_ih"),
        Rule(("hh.kernel",), "weight_hh", "i o -> o i"),
        Rule(("hh.bias",), "bias_hh"),
    )
)


def gru_cell(size: Size) -> Sides:
    theirs = torch.nn.GRUCell(size.width, size.out)
    return Sides(_Gru(size), theirs, [size.vectors, size.states], {"layout": GRU})


def lstm(size: Size) -> Sides:
    """A whole sequence."""
    cell = nnx.OptimizedLSTMCell(size.width, size.out, rngs=rngs())
    ours = nnx.RNN(cell, rngs=rngs())
    theirs = _without(torch.nn.LSTM(size.width, size.out, batch_first=True), "bias_ih_l0")
    calls = {"flax_call": _from_zeros, "torch_call": lambda layer, x: layer(x)[0]}
    return Sides(ours, theirs, [size.sequence], {"layout": _lstm_layout(), **calls})


def _from_zeros(layer, x):
    # Its own first state is in float32.
    state = jnp.zeros((*x.shape[:-2], layer.cell.hidden_features), x.dtype)
    return layer(x, initial_carry=(state, state))


def _lstm_layout() -> Layout:
    """Return the rules of the cell, whose names in PyTorch end in the number of the layer."""
    rules = []
    for rule in _cell_rules("h"):
        (name,) = rule.ours
        rules.append(Rule((f"cell.{name}",), f"{rule.theirs}_l0", rule.pattern))
    return Layout(tuple(rules), "bias_ih_l0")


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
