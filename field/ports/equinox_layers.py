"""Compare layers of Equinox with torch.nn.

Equinox modules take a single example, so calls are mapped over the batch.
"""

from __future__ import annotations

from functools import partial

import equinox
import jax
import jax.numpy as jnp
import torch

from field.port import CHECKS, Built, Port
from field.ports.flax_layers import CELL, IMAGES, STRESSED, TorchGRU, torch_attention
from flax_attn.convert import Layout, Rule

KEY = jax.random.key(0)


def ports() -> list[Port]:
    """Return the ports of Equinox."""
    mha = "torch.nn.MultiheadAttention"
    return [
        _port(
            "nn.MultiheadAttention/default", "no biases, padding", partial(_attention, False), mha
        ),
        _port("nn.MultiheadAttention/biases", "biases, padding", partial(_attention, True), mha),
        _port("nn.MultiheadAttention/cross", "widths of query, key and value differ", _cross, mha),
        _port(
            "nn.RotaryPositionalEmbedding/default",
            "theta=10000",
            partial(_rope, 10000.0),
            "the rotary embedding of transformers' Llama",
            ("forward", "gradients"),
        ),
        _port(
            "nn.RotaryPositionalEmbedding/second-theta",
            "theta=500000, after a layer of the same width with theta=10000 ran in the same"
            " process",
            partial(_rope, 500000.0, 10000.0),
            "the rotary embedding of transformers' Llama",
            ("forward", "gradients"),
        ),
        _port("nn.LayerNorm/default", "default arguments", _layer_norm, "torch.nn.LayerNorm"),
        _port(
            "nn.RMSNorm/default",
            "default arguments",
            partial(_rms_norm, None),
            "torch.nn.RMSNorm",
            CHECKS,
        ),
        _port(
            "nn.RMSNorm/epsilon", "eps=1e-5, no bias", partial(_rms_norm, 1e-5), "torch.nn.RMSNorm"
        ),
        _port(
            "nn.GroupNorm/default", "default arguments", _group_norm, "torch.nn.GroupNorm", IMAGES
        ),
        _port(
            "nn.Conv2d/same-stride-2", "3x3, stride 2, padding 1", _conv, "torch.nn.Conv2d", IMAGES
        ),
        _port(
            "nn.ConvTranspose2d/stride-2",
            "4x4, stride 2, padding 1",
            _conv_transpose,
            "torch.nn.ConvTranspose2d",
            IMAGES,
        ),
        _port(
            "nn.GRUCell/step",
            "one step; of torch's bias_hh the part of n alone is there",
            _gru,
            "torch.nn.GRUCell",
            CELL,
        ),
        _port(
            "nn.LSTMCell/step",
            "one step; torch's bias_ih, which Equinox does not have, is 0",
            _lstm,
            "torch.nn.LSTMCell",
            CELL,
        ),
        _port(
            "nn.AdaptiveAvgPool2d/uneven",
            "8x7 to 3x4",
            _pool,
            "torch.nn.AdaptiveAvgPool2d",
            ("forward", "gradients"),
        ),
    ]


def _port(name, configuration, build, twin, checks=STRESSED):
    return Port(f"equinox/{name}", "equinox", configuration, lambda dtype: build(), twin, checks)


def _mapped(layer, *inputs):
    return jax.vmap(layer)(*inputs)


def _attention(bias):
    biases = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    layer = equinox.nn.MultiheadAttention(3, 12, key=KEY, **biases)

    def ours(layer, x, mask=None):
        mask = jnp.ones(x.shape[:2], bool) if mask is None else mask
        square = jnp.broadcast_to(mask[:, None], (*x.shape[:2], x.shape[1]))
        return jax.vmap(lambda x, mask: layer(x, x, x, mask))(x, square)

    twin = torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True).eval()
    return Built(layer, twin, [(3, 7, 12)], flax_call=ours, torch_call=torch_attention)


def _cross():
    layer = equinox.nn.MultiheadAttention(3, 12, key_size=7, value_size=9, key=KEY)
    twin = torch.nn.MultiheadAttention(12, 3, bias=False, kdim=7, vdim=9, batch_first=True).eval()

    def theirs(layer, query, key, value):
        return layer(query, key, value, need_weights=False)[0]

    return Built(
        layer, twin, [(2, 5, 12), (2, 4, 7), (2, 4, 9)], flax_call=_mapped, torch_call=theirs
    )


def _rope(theta, before=None):
    """Both turn pairs `(i, i + h/2)`; angles are made in float64."""
    if before is not None:
        equinox.nn.RotaryPositionalEmbedding(6, before)(jnp.ones((9, 6)))
    layer = equinox.nn.RotaryPositionalEmbedding(6, theta)
    return Built(
        lambda x: jax.vmap(layer)(x), partial(llama_rope, theta=theta), [(2, 9, 6)], [None]
    )


def llama_rope(x, theta):
    """Turn `(..., tokens, h)` as transformers' Llama does."""
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(
        x.dtype
    )


def _over_tokens(layer, x):
    return jax.vmap(jax.vmap(layer))(x)


def _layer_norm():
    return Built(
        equinox.nn.LayerNorm(12), torch.nn.LayerNorm(12), [(3, 7, 12)], flax_call=_over_tokens
    )


def _rms_norm(epsilon):
    options = {} if epsilon is None else {"eps": epsilon, "use_bias": False}
    twin = torch.nn.RMSNorm(12, eps=epsilon)
    layouts = [Layout((Rule(("weight",), "weight"),)), "auto"]
    if epsilon is None:
        twin, layouts = _ShiftedNorm(twin), ["auto"]
    return Built(
        equinox.nn.RMSNorm(12, **options), twin, [(3, 7, 12)], layouts, flax_call=_over_tokens
    )


class _ShiftedNorm(torch.nn.Module):
    """torch.nn.RMSNorm, and the bias that Equinox adds by default."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.bias = torch.nn.Parameter(torch.zeros_like(norm.weight))

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias


def _group_norm():
    layer = equinox.nn.GroupNorm(3, 12)
    return Built(layer, torch.nn.GroupNorm(3, 12), [(2, 12, 4, 3)], flax_call=_mapped)


def _conv():
    layer = equinox.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=KEY)
    return Built(
        layer, torch.nn.Conv2d(3, 4, 3, stride=2, padding=1), [(2, 3, 8, 7)], flax_call=_mapped
    )


def _conv_transpose():
    layer = equinox.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, key=KEY)
    twin = torch.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1)
    rules = (
        Rule(("weight",), "weight", "o i h w -> i o h w"),
        Rule(("bias",), "bias", "o 1 1 -> o"),
    )
    return Built(layer, twin, [(2, 3, 5, 6)], [Layout(rules)], flax_call=_mapped)


def _gru():
    same = [Rule((name,), name) for name in ("weight_ih", "weight_hh")]
    rules = [*same, Rule(("bias",), "bias_ih"), Rule(("bias_n",), "bias_hn")]
    cell = equinox.nn.GRUCell(4, 5, key=KEY)
    return Built(cell, TorchGRU(), [(3, 4), (3, 5)], [Layout(tuple(rules))], flax_call=_mapped)


def _lstm():
    cell, twin = equinox.nn.LSTMCell(4, 5, key=KEY), torch.nn.LSTMCell(4, 5)
    torch.nn.init.zeros_(twin.bias_ih)
    rules = [
        *(Rule((name,), name) for name in ("weight_ih", "weight_hh")),
        Rule(("bias",), "bias_hh"),
    ]

    def ours(cell, x, hidden, state):
        return jax.vmap(lambda x, h, c: cell(x, (h, c)))(x, hidden, state)

    def theirs(cell, x, hidden, state):
        return cell(x, (hidden, state))

    layouts = [Layout(tuple(rules), "bias_ih")]
    return Built(cell, twin, [(3, 4), (3, 5), (3, 5)], layouts, flax_call=ours, torch_call=theirs)


def _pool():
    layer = equinox.nn.AdaptiveAvgPool2d((3, 4))
    return Built(
        lambda x: jax.vmap(layer)(x), torch.nn.AdaptiveAvgPool2d((3, 4)), [(2, 3, 8, 7)], [None]
    )
