"""Layers of attnax: weights of torch.nn are placed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attnax
import jax.numpy as jnp
import numpy as np
import torch
from attnax.kernels.score_mods import alibi_mod
from flax import nnx
from torch.nn.functional import linear, scaled_dot_product_attention

from field.by_hand.both import Case, layer_case, random_values
from field.by_hand.equinox_layers import turned
from field.by_hand.flax_layers import (
    STRESSED,
    X,
    filled,
    hidden_keys,
    mha,
    scale_and_bias,
    torch_attention,
)

TILES = {"attention_type": attnax.AttentionType.MEMORY_EFFICIENT, "attention_block_size": 4}
ENCODER = {"linear1": "ffn.dense1", "linear2": "ffn.dense2", "norm1": "ln1", "norm2": "ln2"}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "MultiHeadAttention/standard": partial(_attention, True, STRESSED),
        "MultiHeadAttention/tiles": partial(_attention, False, (), **TILES),
        "MultiHeadAttention/tiles-padding": partial(_attention, True, (), **TILES),
        "MultiHeadAttention/window": _window,
        "MultiHeadAttention/grouped-rope": _rope,
        "MultiHeadAttention/rope-past-its-table": partial(_rope, rope_max_positions=4),
        "MultiHeadAttention/alibi": _alibi,
        "RMSNorm/default": partial(_rms_norm, None),
        "RMSNorm/epsilon": partial(_rms_norm, 1e-6),
        "FeedForward/gelu": partial(_feed_forward, "gelu", torch.nn.GELU()),
        "FeedForward/relu": partial(_feed_forward, "relu", torch.nn.ReLU()),
        "EncoderBlock/pre-norm": partial(_encoder, True, "gelu"),
        "EncoderBlock/post-norm": partial(_encoder, False, "relu"),
        "DecoderBlock/pre-norm": _decoder,
    }
    yield from ((f"attnax/{name}", make) for name, make in rows.items())


def _projections(v, prefix="", ours=""):
    names, kinds = ("query", "key", "value"), {"weight": "kernel", "bias": "bias"}
    found = {
        f"{ours}output_proj.{new}": v[f"{prefix}out_proj.{old}"].T for old, new in kinds.items()
    }
    for old, new in kinds.items():
        parts = jnp.split(v[f"{prefix}in_proj_{old}"], 3)
        found |= {f"{ours}{name}_proj.{new}": x.T for name, x in zip(names, parts, strict=True)}
    return found


def _layer(**options):
    return attnax.MultiHeadAttention(nnx.Rngs(0), **{"num_heads": 3, "in_features": 12, **options})


def _attention(padded, stresses, **options):
    layer = _layer(**options)

    def ours(v, mask):
        return filled(layer, _projections(v))(v["x"], mask=hidden_keys(mask))

    return layer_case(mha(), X, ours, torch_attention, padded, stresses)


def _with_bias(layer, bias):
    """The twin adds `bias(tokens)` to its scores, or hides what is True in it."""

    def theirs(run, mask, x):
        return run(x, x, x, attn_mask=bias(x.shape[1]), need_weights=False)[0]

    return layer_case(
        mha(), X, lambda v, mask: filled(layer, _projections(v))(v["x"]), theirs, stresses=STRESSED
    )


def _window():
    return _with_bias(
        _layer(attention_window=3), lambda t: ~torch.ones(t, t, dtype=torch.bool).tril().triu(-2)
    )


def _alibi():
    # Slopes of three heads, as the paper's code gives them.
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2])[:, None, None]

    def bias(t):
        distances = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        return (-slopes * distances).double().repeat(3, 1, 1)

    return _with_bias(_layer(score_mod=alibi_mod(num_heads=3)), bias)


def _rope(**options):
    layer = _layer(num_heads=4, num_kv_heads=2, in_features=16, use_rope=True, **options)
    widths = {"query": 16, "key": 8, "value": 8, "output": 16}
    shapes = {f"{name}.weight": (width, 16) for name, width in widths.items()}
    shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
    values = random_values(shapes) | {"x": np.random.default_rng(3).normal(size=(3, 7, 16))}

    def ours(v, mask):
        params = {f"{name}_proj.kernel": v[f"{name}.weight"].T for name in widths}
        params |= {f"{name}_proj.bias": v[f"{name}.bias"] for name in widths}
        return filled(layer, params)(v["x"], mask=attnax.make_causal_mask(7))

    def theirs(v, mask):
        q, k, w = (
            linear(v["x"], v[f"{name}.weight"], v[f"{name}.bias"])
            for name in ("query", "key", "value")
        )
        q, k, w = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, w))
        found = scaled_dot_product_attention(
            turned(q, 1e4), turned(k, 1e4), w, is_causal=True, enable_gqa=True
        )
        return linear(found.transpose(1, 2).flatten(2), v["output.weight"], v["output.bias"])

    return Case(ours, theirs, values, ("x",))


def _rms_norm(epsilon):
    layer = attnax.RMSNorm(12, rngs=nnx.Rngs(0))

    def ours(v, mask):
        return filled(layer, scale_and_bias(v))(v["x"])

    return layer_case(torch.nn.RMSNorm(12, eps=epsilon), X, ours, stresses=STRESSED)


def _feed_forward(name, activation):
    layer = attnax.FeedForward(nnx.Rngs(0), d_model=12, d_ff=20, ff_activation=name)
    twin = torch.nn.Sequential(torch.nn.Linear(12, 20), activation, torch.nn.Linear(20, 12))

    def ours(v, mask):
        return filled(layer, _named(v, {"0": "dense1", "2": "dense2"}))(v["x"])

    return layer_case(twin, X, ours, stresses=STRESSED)


def _named(v, names):
    """Return the parameters of Linear layers and norms by their other names."""
    found = {f"{new}.bias": v[f"{old}.bias"] for old, new in names.items()}
    weights = {new: v[f"{old}.weight"] for old, new in names.items()}
    return found | {
        f"{new}.kernel" if w.ndim == 2 else f"{new}.scale": w.T for new, w in weights.items()
    }


def _encoder(pre_norm, activation):
    layer = attnax.EncoderBlock(nnx.Rngs(0), 12, 3, 20, 0.0, pre_norm, ff_activation=activation)
    twin = torch.nn.TransformerEncoderLayer(
        12, 3, 20, 0.0, activation, batch_first=True, norm_first=pre_norm
    )

    def ours(v, mask):
        params = _projections(v, "self_attn.", "self_attn.") | _named(v, ENCODER)
        return filled(layer, params)(v["x"], mask=hidden_keys(mask))

    def theirs(run, mask, x):
        return run(x, src_key_padding_mask=None if mask is None else ~mask)

    return layer_case(twin, X, ours, theirs, True, STRESSED)


def _decoder():
    layer = attnax.DecoderBlock(nnx.Rngs(0), 12, 3, 20, 0.0, True, ff_activation="relu")
    twin = torch.nn.TransformerDecoderLayer(
        12, 3, 20, 0.0, "relu", batch_first=True, norm_first=True
    )

    def ours(v, mask):
        params = _projections(v, "self_attn.", "self_attn.") | _projections(
            v, "multihead_attn.", "cross_attn."
        )
        full = filled(layer, params | _named(v, ENCODER | {"norm3": "ln3"}))
        return full(
            v["x"], encoder_output=v["memory"], self_mask=attnax.make_causal_mask(v["x"].shape[1])
        )

    def theirs(run, mask, x, memory):
        return run(x, memory, tgt_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))

    return layer_case(twin, {**X, "memory": (3, 5, 12)}, ours, theirs, stresses=STRESSED)
