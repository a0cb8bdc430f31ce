"""Blocks of tokens: transformers, feed-forwards, mixers and windows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from einops import rearrange
from flax import nnx

from parity_tests.right_pairs.pairs import Build, Sides, Size, rngs
from parity_tests.right_pairs.tokens import attention, later_tokens


def _norm(width: int) -> nnx.LayerNorm:
    # PyTorch's epsilon. The fast variance cancels: E[x^2] - E[x]^2.
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs())


def _linear(d_in: int, d_out: int, bias: bool = True) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=bias, rngs=rngs())


class _Block(nnx.Module):
    """What the layers of an encoder and of a decoder share, under PyTorch's names."""

    def __init__(self, size: Size):
        self.self_attn = attention(size)
        self.linear1 = _linear(size.width, 2 * size.width)
        self.linear2 = _linear(2 * size.width, size.width)
        self.norm1 = _norm(size.width)
        self.norm2 = _norm(size.width)

    def feed_forward(self, x):
        return self.linear2(jax.nn.relu(self.linear1(x)))


class _EncoderBlock(_Block):
    def __init__(self, size: Size, pre_norm: bool):
        super().__init__(size)
        self.pre_norm = pre_norm

    def __call__(self, x):
        if self.pre_norm:
            x = x + self.self_attn(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.feed_forward(x))


def _encoder_block(size: Size, pre_norm: bool) -> Sides:
    options = {"batch_first": True, "norm_first": pre_norm, "dim_feedforward": 2 * size.width}
    theirs = torch.nn.TransformerEncoderLayer(size.width, size.heads, **options).eval()
    return Sides(_EncoderBlock(size, pre_norm), theirs, [size.sequence])


class _DecoderBlock(_Block):
    def __init__(self, size: Size):
        super().__init__(size)
        self.multihead_attn = attention(size)
        self.norm3 = _norm(size.width)

    def __call__(self, x, memory):
        visible = nnx.make_causal_mask(x[..., 0])
        x = self.norm1(x + self.self_attn(x, mask=visible))
        x = self.norm2(x + self.multihead_attn(x, memory))
        return self.norm3(x + self.feed_forward(x))


def decoder_block(size: Size) -> Sides:
    options = {"batch_first": True, "dim_feedforward": 2 * size.width}
    theirs = torch.nn.TransformerDecoderLayer(size.width, size.heads, **options).eval()
    inputs = [size.sequence, size.memory]
    return Sides(_DecoderBlock(size), theirs, inputs, {"torch_call": _decode})


def _decode(layer, x, memory):
    # Asked for nothing, PyTorch's layer hides no token.
    return layer(x, memory, tgt_mask=later_tokens(x))


class _Mlp(nnx.Module):
    def __init__(self, size: Size):
        self.norm = _norm(size.width)
        self.up = _linear(size.width, 4 * size.width)
        self.down = _linear(4 * size.width, size.width)

    def __call__(self, x):
        # Without a choice Flax takes the approximation by tanh.
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
        # An odd width tells the hidden layer from the others.
        hidden = 2 * size.width + 1
        self.gate = _linear(size.width, hidden, bias=False)
        self.up = _linear(size.width, hidden, bias=False)
        self.down = _linear(hidden, size.width, bias=False)

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
        self.tokens1 = _linear(size.tokens, size.out)
        self.tokens2 = _linear(size.out, size.tokens)
        self.channels1 = _linear(size.width, 2 * size.width)
        self.channels2 = _linear(2 * size.width, size.width)

    def __call__(self, x):
        # Tokens are last, so that a linear layer mixes them.
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
ROWS, COLUMNS = np.divmod(np.arange(WINDOW**2), WINDOW)
# Offsets are from 1 - WINDOW to WINDOW - 1.
SPAN = 2 * WINDOW - 1
DOWN = ROWS[:, None] - ROWS + WINDOW - 1
RIGHT = COLUMNS[:, None] - COLUMNS + WINDOW - 1
OFFSETS = DOWN * SPAN + RIGHT
IMAGE = "b (rows i) (columns j) d"
WINDOWS = "(b rows columns) (i j) d"


def _windows(x):
    return rearrange(x, f"{IMAGE} -> {WINDOWS}", i=WINDOW, j=WINDOW)


def _image(windows, x):
    """Return windows as an image of the shape of another."""
    rows = x.shape[1] // WINDOW
    columns = x.shape[2] // WINDOW
    sizes = {"rows": rows, "columns": columns, "i": WINDOW}
    return rearrange(windows, f"{WINDOWS} -> {IMAGE}", **sizes)


def _heads(qkv, heads: int):
    return rearrange(qkv, "w t (three n h) -> three w n t h", three=3, n=heads)


def _joined(values):
    return rearrange(values, "w n t h -> w t (n h)")


def _bias_of_offsets(table):
    # Each pair of pixels takes the row of its offset: rows are used several times.
    return rearrange(table[OFFSETS], "t s n -> 1 n t s")


class _WindowAttention(nnx.Module):
    """Attention within windows, as Swin has it."""

    def __init__(self, size: Size):
        self.heads = size.heads
        self.qkv = _linear(size.width, 3 * size.width)
        self.proj = _linear(size.width, size.width)
        self.table = nnx.Param(jnp.zeros((SPAN**2, size.heads)))

    def __call__(self, x):
        q, k, v = _heads(self.qkv(_windows(x)), self.heads)
        bias = _bias_of_offsets(self.table[...])
        scores = q * q.shape[-1] ** -0.5 @ k.mT + bias
        # The softmax of PyTorch adds up lower dtypes in float32.
        wide = scores.astype(jnp.promote_types(x.dtype, jnp.float32))
        weights = jax.nn.softmax(wide).astype(x.dtype)
        return _image(self.proj(_joined(weights @ v)), x)


class _Swin(nnx.Module):
    def __init__(self, size: Size):
        self.norm1 = _norm(size.width)
        self.norm2 = _norm(size.width)
        self.attention = _WindowAttention(size)
        self.fc1 = _linear(size.width, 2 * size.width)
        self.fc2 = _linear(2 * size.width, size.width)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        hidden = jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False)
        return x + self.fc2(hidden)


class _TorchWindowAttention(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.qkv = torch.nn.Linear(size.width, 3 * size.width)
        self.proj = torch.nn.Linear(size.width, size.width)
        self.table = torch.nn.Parameter(torch.zeros(SPAN**2, size.heads))

    def forward(self, x):
        q, k, v = _heads(self.qkv(_windows(x)), self.heads)
        bias = _bias_of_offsets(self.table)
        scores = q * q.shape[-1] ** -0.5 @ k.mT + bias
        weights = scores.softmax(-1)
        return _image(self.proj(_joined(weights @ v)), x)


class _TorchSwin(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
        self.attention = _TorchWindowAttention(size)
        self.fc1 = torch.nn.Linear(size.width, 2 * size.width)
        self.fc2 = torch.nn.Linear(2 * size.width, size.width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        hidden = torch.nn.functional.gelu(self.fc1(self.norm2(x)))
        return x + self.fc2(hidden)


def swin_block(size: Size) -> Sides:
    # Even sides, which windows of two pixels divide.
    shape = (*size.image[:3], size.width)
    return Sides(_Swin(size), _TorchSwin(size), [shape])


LAYERS: tuple[Build, ...] = (
    decoder_block,
    residual_mlp,
    swiglu,
    mixer_block,
    swin_block,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
PAIRS["encoder_block"] = partial(_encoder_block, pre_norm=True)
PAIRS["encoder_block_post_norm"] = partial(_encoder_block, pre_norm=False)
