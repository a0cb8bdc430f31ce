"""Layers and vision transformers of equimo.

Weights of torch.nn and of transformers are placed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import torch
import transformers
from equimo.layers.attention import Attention, AttentionBlock
from equimo.layers.ffn import SwiGlu
from equimo.layers.norm import LayerNorm2d, RMSNormGated
from equimo.models.vit import VisionTransformer

from field.by_hand.both import Case, layer_case
from field.by_hand.equinox_layers import filled
from field.by_hand.flax_layers import X, mha, torch_attention

KEY = jax.random.key(0)
KINDS = ("weight", "bias")
# The settings of equimo's DINOv2.
PRESET = {"act_layer": "exactgelu", "init_values": 1e-5, "eps": 1e-6}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "Attention/default": _attention,
        "AttentionBlock/default": _block,
        "AttentionBlock/exact": partial(_block, act_layer="exactgelu"),
        "SwiGlu/default": _swiglu,
        "LayerNorm2d/default": _layer_norm,
        "RMSNormGated/no-gate": _rms_norm,
        "VisionTransformer/dinov2": partial(_dinov2, 8, **PRESET),
        "VisionTransformer/dinov2-resized": partial(_dinov2, 12, dynamic_img_size=True, **PRESET),
        "VisionTransformer/vit": partial(_dinov2, 8, act_layer="gelu", init_values=1.0),
    }
    yield from ((f"equimo/{name}", make) for name, make in rows.items())


def _renamed(v, names):
    return {
        f"{ours}.{kind}": v[f"{theirs}.{kind}"] for ours, theirs in names.items() for kind in KINDS
    }


def _packed(v, prefix=""):
    found = {f"qkv.{kind}": v[f"{prefix}in_proj_{kind}"] for kind in KINDS}
    return found | {f"proj.{kind}": v[f"{prefix}out_proj.{kind}"] for kind in KINDS}


def _examples(module, x, mask=None):
    if mask is None:
        return jax.vmap(lambda x: module(x, key=KEY))(x)
    return jax.vmap(lambda x, mask: module(x, key=KEY, mask=mask[None, None]))(x, mask)


def _attention():
    layer = Attention(12, 3, key=KEY)

    def ours(v, mask):
        return _examples(filled(layer, _packed(v)), v["x"], mask)

    return layer_case(mha(), X, ours, torch_attention, True)


def _block(**options):
    layer = AttentionBlock(12, 3, key=KEY, mlp_ratio=2.0, **options)
    twin = torch.nn.TransformerEncoderLayer(
        12, 3, 24, 0.0, "gelu", batch_first=True, norm_first=True
    )
    names = {"prenorm": "norm1", "norm": "norm2", "mlp.fc1": "linear1", "mlp.fc2": "linear2"}

    def ours(v, mask):
        heads = {f"attn.{name}": x for name, x in _packed(v, "self_attn.").items()}
        return _examples(filled(layer, heads | _renamed(v, names)), v["x"])

    return layer_case(twin, X, ours)


def _swiglu():
    layer = SwiGlu(12, key=KEY, hidden_dim=36)  # of which it makes two thirds
    config = transformers.LlamaConfig(hidden_size=12, intermediate_size=24, mlp_bias=True)
    twin = transformers.models.llama.modeling_llama.LlamaMLP(config)
    names = {"w1": "gate_proj", "w2": "up_proj", "w3": "down_proj"}
    return layer_case(twin, X, lambda v, mask: _examples(filled(layer, _renamed(v, names)), v["x"]))


def _layer_norm():
    layer = LayerNorm2d(12)

    def ours(v, mask):
        return jax.vmap(filled(layer, {name: v[name] for name in KINDS}))(v["x"])

    def theirs(run, mask, x):
        return run(x.movedim(1, -1)).movedim(-1, 1)

    return layer_case(torch.nn.LayerNorm(12, eps=1e-6), {"x": (3, 12, 4, 5)}, ours, theirs)


def _rms_norm():
    layer = RMSNormGated(12)

    def ours(v, mask):
        return jax.vmap(jax.vmap(filled(layer, {"w": v["weight"]})))(v["x"])

    return layer_case(torch.nn.RMSNorm(12, eps=1e-5), X, ours)


def _dinov2(size, **options):
    sizes = {
        "image_size": 8,
        "patch_size": 2,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    twin = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, mlp_ratio=2))
    model = VisionTransformer(
        8,
        3,
        12,
        2,
        3,
        [2],
        key=KEY,
        mlp_ratio=2.0,
        reg_tokens=0,
        num_classes=0,
        use_mask_token=True,
        **options,
    )

    def ours(v, mask):
        full = filled(model, _vision(v))
        found = jax.vmap(lambda image: full.forward_features(image, key=KEY, inference=True))(
            v["x"]
        )
        return jnp.concatenate(
            [found["x_norm_cls_token"][:, None], found["x_norm_patchtokens"]], axis=1
        )

    def theirs(run, mask, images):
        return run(images).last_hidden_state

    return layer_case(twin, {"x": (2, 3, size, size)}, ours, theirs)


def _vision(v):
    found = {
        "cls_token": v["embeddings.cls_token"][0],
        "mask_token": v["embeddings.mask_token"],
        "global_pos_embed.weight": v["embeddings.position_embeddings"][0],
        "patch_embed.proj.weight": v["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": v["embeddings.patch_embeddings.projection.bias"][:, None, None],
        **_renamed(v, {"norm": "layernorm"}),
    }
    for i in range(2):
        here, there = f"blocks.0.blocks.{i}.", f"encoder.layer.{i}."
        found |= _renamed(v, {f"{here}prenorm": f"{there}norm1", f"{here}norm": f"{there}norm2"})
        found |= _renamed(v, {f"{here}mlp.{name}": f"{there}mlp.{name}" for name in ("fc1", "fc2")})
        found |= _renamed(v, {f"{here}attn.proj": f"{there}attention.output.dense"})
        for kind in KINDS:
            heads = [
                v[f"{there}attention.attention.{name}.{kind}"] for name in ("query", "key", "value")
            ]
            found[f"{here}attn.qkv.{kind}"] = jnp.concatenate(heads)
        found |= {f"{here}ls{n}.gamma": v[f"{there}layer_scale{n}.lambda1"] for n in (1, 2)}
    return found
