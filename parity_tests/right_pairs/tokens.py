"""Layers and blocks of tokens: attention, recurrent cells, transformers, mixers and windows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.nn.functional import scaled_dot_product_attention

from flax_attn.convert import Layout, Rule
from parity_tests.right_pairs.pairs import Build, Sides, Size, rngs


def _norm(width: int) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs())


def _attention(size: Size) -> nnx.MultiHeadAttention:
    # Its own function has the softmax in float32, even in float64.
    options = {"attention_fn": _attend, "decode": False}
    return nnx.MultiHeadAttention(size.heads, size.width, **options, rngs=rngs())


def _attend(query, key, value, mask=None, **_):
    """Attention whose softmax is in float32 for lower dtypes, as PyTorch's is."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=wide)
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _torch_attention(size: Size) -> torch.nn.MultiheadAttention:
    return torch.nn.MultiheadAttention(size.width, size.heads, batch_first=True).eval()


def self_attention(size: Size) -> Sides:
    def theirs(layer, x):
        return layer(x, x, x, need_weights=False)[0]

    sides = _attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence], {"torch_call": theirs})


def causal_attention(size: Size) -> Sides:
    def ours(layer, x):
        return layer(x, mask=nnx.make_causal_mask(x[..., 0]))

    def theirs(layer, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return layer(x, x, x, attn_mask=hidden, need_weights=False)[0]

    sides = _attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence], {"flax_call": ours, "torch_call": theirs})


def padded_attention(size: Size) -> Sides:
    def ours(layer, x, mask):
        return layer(x, mask=mask[:, None, None])

    def theirs(layer, x, mask):
        return layer(x, x, x, key_padding_mask=~mask, need_weights=False)[0]

    mask = np.arange(size.tokens) < np.arange(1, size.batch + 1)[:, None] + size.tokens // 2
    sides = _attention(size), _torch_attention(size)
    return Sides(*sides, [size.sequence, mask], {"flax_call": ours, "torch_call": theirs})


def cross_attention(size: Size) -> Sides:
    def ours(layer, x, context):
        return layer(x, context)

    def theirs(layer, x, context):
        return layer(x, context, context, need_weights=False)[0]

    sides = _attention(size), _torch_attention(size)
    inputs = [size.sequence, (size.batch, size.tokens + 2, size.width)]
    return Sides(*sides, inputs, {"flax_call": ours, "torch_call": theirs})


def grouped_query_function(size: Size) -> Sides:
    """Queries of several heads for each key."""
    query = size.batch, size.tokens, 2 * size.heads, size.width
    key = size.batch, size.tokens, size.heads, size.width

    def ours(q, k, v):
        groups = q.shape[2] // k.shape[2]
        visible = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))[None, None]
        return _attend(q, jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2), visible)

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2)

    return Sides(ours, theirs, [query, key, key])


class _EncoderBlock(nnx.Module):
    def __init__(self, size: Size, pre_norm: bool):
        self.pre_norm = pre_norm
        self.self_attn = _attention(size)
        self.linear1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.linear2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())
        self.norm1, self.norm2 = _norm(size.width), _norm(size.width)

    def __call__(self, x):
        if self.pre_norm:
            x = x + self.self_attn(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.feed_forward(x))

    def feed_forward(self, x):
        return self.linear2(jax.nn.relu(self.linear1(x)))


def _encoder_block(size: Size, pre_norm: bool) -> Sides:
    options = {"batch_first": True, "norm_first": pre_norm, "dim_feedforward": 2 * size.width}
    theirs = torch.nn.TransformerEncoderLayer(size.width, size.heads, **options).eval()
    return Sides(_EncoderBlock(size, pre_norm), theirs, [size.sequence])


class _DecoderBlock(nnx.Module):
    def __init__(self, size: Size):
        self.self_attn = _attention(size)
        self.multihead_attn = _attention(size)
        self.linear1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.linear2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())
        self.norm1, self.norm2, self.norm3 = (_norm(size.width) for _ in range(3))

    def __call__(self, x, memory):
        x = self.norm1(x + self.self_attn(x, mask=nnx.make_causal_mask(x[..., 0])))
        x = self.norm2(x + self.multihead_attn(x, memory))
        return self.norm3(x + self.linear2(jax.nn.relu(self.linear1(x))))


def decoder_block(size: Size) -> Sides:
    options = {"batch_first": True, "dim_feedforward": 2 * size.width}
    theirs = torch.nn.TransformerDecoderLayer(size.width, size.heads, **options).eval()

    def call(layer, x, memory):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return layer(x, memory, tgt_mask=hidden)

    inputs = [size.sequence, (size.batch, size.tokens + 2, size.width)]
    return Sides(_DecoderBlock(size), theirs, inputs, {"torch_call": call})


class _Mlp(nnx.Module):
    def __init__(self, size: Size):
        self.norm = _norm(size.width)
        self.up = nnx.Linear(size.width, 4 * size.width, rngs=rngs())
        self.down = nnx.Linear(4 * size.width, size.width, rngs=rngs())

    def __call__(self, x):
        hidden = jax.nn.gelu(self.up(self.norm(x)), approximate=False)
        return x + self.down(hidden)


class _TorchMlp(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm = torch.nn.LayerNorm(size.width)
        self.up = torch.nn.Linear(size.width, 4 * size.width)
        self.down = torch.nn.Linear(4 * size.width, size.width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def residual_mlp(size: Size) -> Sides:
    return Sides(_Mlp(size), _TorchMlp(size), [size.sequence])


class _SwiGlu(nnx.Module):
    def __init__(self, size: Size):
        hidden = 2 * size.width + 1
        self.gate = nnx.Linear(size.width, hidden, use_bias=False, rngs=rngs())
        self.up = nnx.Linear(size.width, hidden, use_bias=False, rngs=rngs())
        self.down = nnx.Linear(hidden, size.width, use_bias=False, rngs=rngs())

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class _TorchSwiGlu(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        hidden = 2 * size.width + 1
        self.gate = torch.nn.Linear(size.width, hidden, bias=False)
        self.up = torch.nn.Linear(size.width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, size.width, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def swiglu(size: Size) -> Sides:
    return Sides(_SwiGlu(size), _TorchSwiGlu(size), [size.sequence])


class _Mixer(nnx.Module):
    """A feed-forward over tokens, then one over channels."""

    def __init__(self, size: Size):
        self.norm1, self.norm2 = _norm(size.width), _norm(size.width)
        self.tokens1 = nnx.Linear(size.tokens, size.out, rngs=rngs())
        self.tokens2 = nnx.Linear(size.out, size.tokens, rngs=rngs())
        self.channels1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.channels2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())

    def __call__(self, x):
        mixed = jnp.swapaxes(self.norm1(x), 1, 2)
        mixed = self.tokens2(jax.nn.relu(self.tokens1(mixed)))
        x = x + jnp.swapaxes(mixed, 1, 2)
        return x + self.channels2(jax.nn.relu(self.channels1(self.norm2(x))))


class _TorchMixer(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
        self.tokens1 = torch.nn.Linear(size.tokens, size.out)
        self.tokens2 = torch.nn.Linear(size.out, size.tokens)
        self.channels1 = torch.nn.Linear(size.width, 2 * size.width)
        self.channels2 = torch.nn.Linear(2 * size.width, size.width)

    def forward(self, x):
        mixed = self.tokens2(self.tokens1(self.norm1(x).transpose(1, 2)).relu())
        x = x + mixed.transpose(1, 2)
        return x + self.channels2(self.channels1(self.norm2(x)).relu())


def mixer_block(size: Size) -> Sides:
    return Sides(_Mixer(size), _TorchMixer(size), [size.sequence])


# Windows of 2 x 2 pixels, with a bias for each offset between two of them.
WINDOW = 2
_ROWS, _COLUMNS = np.divmod(np.arange(WINDOW**2), WINDOW)
OFFSETS = (_ROWS[:, None] - _ROWS + WINDOW - 1) * (2 * WINDOW - 1)
OFFSETS = OFFSETS + _COLUMNS[:, None] - _COLUMNS + WINDOW - 1


class _Swin(nnx.Module):
    def __init__(self, size: Size):
        self.heads = size.heads
        self.norm1, self.norm2 = _norm(size.width), _norm(size.width)
        self.qkv = nnx.Linear(size.width, 3 * size.width, rngs=rngs())
        self.proj = nnx.Linear(size.width, size.width, rngs=rngs())
        self.table = nnx.Param(jnp.zeros(((2 * WINDOW - 1) ** 2, size.heads)))
        self.fc1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.fc2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))

    def attend(self, x):
        b, rows, columns, width = x.shape
        grid = b, rows // WINDOW, WINDOW, columns // WINDOW, WINDOW, width
        windows = x.reshape(grid).swapaxes(2, 3).reshape(-1, WINDOW**2, width)
        shape = len(windows), WINDOW**2, 3, self.heads, width // self.heads
        q, k, v = jnp.moveaxis(self.qkv(windows).reshape(shape), 2, 0)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("wtnh,wsnh->wnts", q * q.shape[-1] ** -0.5, k)
        bias = jnp.moveaxis(self.table[...][OFFSETS], -1, 0)
        weights = jax.nn.softmax((scores + bias[None]).astype(wide)).astype(x.dtype)
        found = jnp.einsum("wnts,wsnh->wtnh", weights, v).reshape(windows.shape)
        shape = b, rows // WINDOW, columns // WINDOW, WINDOW, WINDOW, width
        return self.proj(found).reshape(shape).swapaxes(2, 3).reshape(x.shape)


class _TorchSwin(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
        self.qkv = torch.nn.Linear(size.width, 3 * size.width)
        self.proj = torch.nn.Linear(size.width, size.width)
        self.table = torch.nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, size.heads))
        self.fc1 = torch.nn.Linear(size.width, 2 * size.width)
        self.fc2 = torch.nn.Linear(2 * size.width, size.width)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(x))))

    def attend(self, x):
        b, rows, columns, width = x.shape
        windows = x.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW)).transpose(2, 3)
        windows = windows.reshape(-1, WINDOW**2, width)
        qkv = self.qkv(windows).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        bias = self.table[torch.from_numpy(OFFSETS)].permute(2, 0, 1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + bias
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows.shape)
        grid = b, rows // WINDOW, columns // WINDOW, WINDOW, WINDOW, width
        return self.proj(found).reshape(grid).transpose(2, 3).reshape(x.shape)


def swin_block(size: Size) -> Sides:
    shape = (*size.image[:3], size.width)
    return Sides(_Swin(size), _TorchSwin(size), [shape])


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
    inputs = [(size.batch, size.width), (size.batch, size.out)]
    layout = {"layout": Layout(tuple(rules))}
    return Sides(_Gru(size), torch.nn.GRUCell(size.width, size.out), inputs, layout)


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
    decoder_block,
    residual_mlp,
    swiglu,
    mixer_block,
    swin_block,
    lstm_cell,
    rnn_cell,
    gru_cell,
    lstm,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
PAIRS["encoder_block"] = partial(_encoder_block, pre_norm=True)
PAIRS["encoder_block_post_norm"] = partial(_encoder_block, pre_norm=False)
