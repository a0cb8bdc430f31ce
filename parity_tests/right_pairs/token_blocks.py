"""Blocks of tokens: transformers, feed-forwards, mixers and windows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from einops import rearrange
from flax import nnx

from parity_tests.right_pairs.pairs import Build, Sides, Size, rngs
from parity_tests.right_pairs.tokens import attention


def _norm(width: int) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs())


class _EncoderBlock(nnx.Module):
    def __init__(self, size: Size, pre_norm: bool):
        self.pre_norm = pre_norm
        self.self_attn = attention(size)
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
        self.self_attn = attention(size)
        self.multihead_attn = attention(size)
        self.linear1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.linear2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())
        self.norm1 = _norm(size.width)
        self.norm2 = _norm(size.width)
        self.norm3 = _norm(size.width)

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


class _Swin(nnx.Module):
    def __init__(self, size: Size):
        self.heads = size.heads
        self.norm1 = _norm(size.width)
        self.norm2 = _norm(size.width)
        self.qkv = nnx.Linear(size.width, 3 * size.width, rngs=rngs())
        self.proj = nnx.Linear(size.width, size.width, rngs=rngs())
        self.table = nnx.Param(jnp.zeros((SPAN**2, size.heads)))
        self.fc1 = nnx.Linear(size.width, 2 * size.width, rngs=rngs())
        self.fc2 = nnx.Linear(2 * size.width, size.width, rngs=rngs())

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))

    def attend(self, x):
        q, k, v = _heads(self.qkv(_windows(x)), self.heads)
        q = q * q.shape[-1] ** -0.5
        bias = rearrange(self.table[...][OFFSETS], "t s n -> 1 n t s")
        scores = q @ k.mT + bias
        # The softmax of PyTorch adds up lower dtypes in float32.
        wide = scores.astype(jnp.promote_types(x.dtype, jnp.float32))
        weights = jax.nn.softmax(wide).astype(x.dtype)
        found = rearrange(weights @ v, "w n t h -> w t (n h)")
        return _image(self.proj(found), x)


class _TorchSwin(torch.nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.norm1 = torch.nn.LayerNorm(size.width)
        self.norm2 = torch.nn.LayerNorm(size.width)
        self.qkv = torch.nn.Linear(size.width, 3 * size.width)
        self.proj = torch.nn.Linear(size.width, size.width)
        self.table = torch.nn.Parameter(torch.zeros(SPAN**2, size.heads))
        self.fc1 = torch.nn.Linear(size.width, 2 * size.width)
        self.fc2 = torch.nn.Linear(2 * size.width, size.width)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(x))))

    def attend(self, x):
        q, k, v = _heads(self.qkv(_windows(x)), self.heads)
        q = q * q.shape[-1] ** -0.5
        offsets = torch.from_numpy(OFFSETS)
        bias = rearrange(self.table[offsets], "t s n -> 1 n t s")
        scores = q @ k.mT + bias
        weights = scores.softmax(-1)
        found = rearrange(weights @ v, "w n t h -> w t (n h)")
        return _image(self.proj(found), x)


def swin_block(size: Size) -> Sides:
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
