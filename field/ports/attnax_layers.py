"""Layers of attnax beside those of torch.nn and the attention of transformers' Llama."""

from __future__ import annotations

from functools import partial

import attnax
import torch
from attnax.kernels.score_mods import alibi_mod
from flax import nnx

from field.port import CHECKS, Built, Port
from field.ports.equinox_layers import llama_rope
from field.ports.flax_layers import STRESSED, torch_attention

KIND = attnax.AttentionType


def ports() -> list[Port]:
    """Return the ports of attnax."""
    mha, llama = "torch.nn.MultiheadAttention", "the attention of transformers' Llama, in float64"
    return [
        _port("MultiHeadAttention/standard", "padding", _attention, mha),
        _port(
            "MultiHeadAttention/tiles",
            "memory_efficient, tiles of 4, 7 tokens",
            _tiled,
            mha,
            CHECKS,
        ),
        _port(
            "MultiHeadAttention/tiles-padding",
            "memory_efficient, tiles of 4, 7 tokens, a padding mask as make_padding_mask"
            " returns it",
            partial(_tiled, padded=True),
            mha,
            CHECKS,
        ),
        _port("MultiHeadAttention/window", "attention_window=3", _window, mha),
        _port(
            "MultiHeadAttention/grouped-rope",
            "two key/value heads for four, RoPE, causal",
            _rope,
            llama,
            CHECKS,
        ),
        _port(
            "MultiHeadAttention/rope-past-its-table",
            "RoPE, rope_max_positions=4, 7 tokens",
            partial(_rope, rope_max_positions=4),
            llama,
            CHECKS,
        ),
        _port(
            "MultiHeadAttention/alibi",
            "score_mod=alibi_mod, not causal",
            _alibi,
            f"{mha}, the bias of ALiBi as its mask",
        ),
        _port("RMSNorm/default", "default arguments", partial(_rms_norm, None), "torch.nn.RMSNorm"),
        _port(
            "RMSNorm/epsilon",
            "epsilon=1e-6 on both sides",
            partial(_rms_norm, 1e-6),
            "torch.nn.RMSNorm",
        ),
        _port(
            "FeedForward/gelu",
            "gelu",
            partial(_feed_forward, "gelu", torch.nn.GELU()),
            "Linear, GELU, Linear",
        ),
        _port(
            "FeedForward/relu",
            "relu",
            partial(_feed_forward, "relu", torch.nn.ReLU()),
            "Linear, ReLU, Linear",
        ),
        _port(
            "EncoderBlock/pre-norm",
            "pre-norm, gelu",
            partial(_encoder, True, "gelu"),
            "torch.nn.TransformerEncoderLayer",
        ),
        _port(
            "EncoderBlock/post-norm",
            "post-norm, relu",
            partial(_encoder, False, "relu"),
            "torch.nn.TransformerEncoderLayer",
        ),
        _port(
            "DecoderBlock/pre-norm", "pre-norm, relu", _decoder, "torch.nn.TransformerDecoderLayer"
        ),
    ]


def _port(name, configuration, build, twin, checks=STRESSED):
    return Port(f"attnax/{name}", "attnax", configuration, lambda dtype: build(), twin, checks)


def _layer(**options):
    return attnax.MultiHeadAttention(nnx.Rngs(0), **{"num_heads": 3, "in_features": 12, **options})


def _mha():
    return torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()


def _masked(layer, x, mask=None):
    return layer(x, mask=None if mask is None else mask[:, None, None])


def _attention(**options):
    return Built(
        _layer(**options), _mha(), [(3, 7, 12)], flax_call=_masked, torch_call=torch_attention
    )


def _tiled(padded=False):
    layer = _layer(attention_type=KIND.MEMORY_EFFICIENT, attention_block_size=4)
    calls = {"flax_call": _masked, "torch_call": torch_attention}
    if not padded:
        calls = {"torch_call": lambda layer, x: torch_attention(layer, x)}
    return Built(layer, _mha(), [(3, 7, 12)], **calls)


def _window():
    def theirs(layer, x):
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        return layer(x, x, x, attn_mask=(distance < 0) | (distance >= 3), need_weights=False)[0]

    return Built(_layer(attention_window=3), _mha(), [(3, 7, 12)], torch_call=theirs)


class LlamaAttention(torch.nn.Module):
    """Causal attention with grouped heads that are turned as Llama's are."""

    def __init__(self, d, n, k):
        super().__init__()
        self.width = d // n
        self.q_proj, self.k_proj, self.v_proj = (
            torch.nn.Linear(d, self.width * heads) for heads in (n, k, k)
        )
        self.o_proj = torch.nn.Linear(d, d)

    def forward(self, x):
        """Return the output of the layer."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = llama_rope(q, 10000.0), llama_rope(k, 10000.0)
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(found.transpose(1, 2).flatten(2))


def _rope(**options):
    layer = _layer(num_heads=4, num_kv_heads=2, in_features=16, use_rope=True, **options)

    def ours(layer, x):
        return layer(x, mask=attnax.make_causal_mask(x.shape[1]))

    return Built(layer, LlamaAttention(16, 4, 2).eval(), [(3, 7, 16)], flax_call=ours)


def _alibi():
    layer, slopes = (
        _layer(score_mod=alibi_mod(num_heads=3)),
        torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]),
    )

    def theirs(layer, x):
        tokens = torch.arange(x.shape[1])
        bias = -slopes[:, None, None].to(x.dtype) * (tokens[:, None] - tokens).abs()
        return layer(x, x, x, attn_mask=bias.repeat(len(x), 1, 1), need_weights=False)[0]

    return Built(layer, _mha(), [(3, 7, 12)], torch_call=theirs)


def _rms_norm(epsilon):
    return Built(
        attnax.RMSNorm(12, rngs=nnx.Rngs(0)), torch.nn.RMSNorm(12, eps=epsilon), [(3, 7, 12)]
    )


def _feed_forward(name, activation):
    layer = attnax.FeedForward(nnx.Rngs(0), d_model=12, d_ff=20, ff_activation=name)
    twin = torch.nn.Sequential(torch.nn.Linear(12, 20), activation, torch.nn.Linear(20, 12))
    return Built(layer, twin, [(3, 7, 12)])


def _encoder(pre_norm, activation):
    layer = attnax.EncoderBlock(nnx.Rngs(0), 12, 3, 20, 0.0, pre_norm, ff_activation=activation)
    twin = torch.nn.TransformerEncoderLayer(
        12, 3, 20, 0.0, activation, batch_first=True, norm_first=pre_norm
    )
    return Built(layer, twin.eval(), [(3, 7, 12)], flax_call=_masked, torch_call=_padded)


def _padded(layer, x, mask=None):
    return layer(x, src_key_padding_mask=None if mask is None else ~mask)


def _decoder():
    layer = attnax.DecoderBlock(nnx.Rngs(0), 12, 3, 20, 0.0, True, ff_activation="relu")
    twin = torch.nn.TransformerDecoderLayer(
        12, 3, 20, 0.0, "relu", batch_first=True, norm_first=True
    )

    def ours(layer, x, memory):
        return layer(x, encoder_output=memory, self_mask=attnax.make_causal_mask(x.shape[1]))

    def theirs(layer, x, memory):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return layer(x, memory, tgt_mask=hidden)

    inputs = [(3, 7, 12), (3, 5, 12)]
    return Built(layer, twin.eval(), inputs, flax_call=ours, torch_call=theirs)
