"""Compare layers and vision transformers of equimo with torch.nn and transformers."""

from __future__ import annotations

from functools import partial

import equinox
import jax
import jax.numpy as jnp
import torch
import transformers
from equimo.layers.attention import Attention, AttentionBlock
from equimo.layers.ffn import SwiGlu
from equimo.layers.norm import LayerNorm2d, RMSNormGated
from equimo.models.vit import VisionTransformer

from field.port import CHECKS, Built, Port
from field.ports.flax_layers import torch_attention
from flax_attn.convert import Layout, Rule

KEY = jax.random.key(0)
# Checks where weights are copied: gradients are those of the images.
INPUTS_ALONE = ("forward", "gradients")
TINY = {
    "image_size": 8,
    "patch_size": 2,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def ports() -> list[Port]:
    """Return the ports of equimo."""
    encoder, dino = "torch.nn.TransformerEncoderLayer", "transformers' Dinov2Model"
    exact = {"act_layer": "exactgelu"}
    preset = {**exact, "init_values": 1e-5, "eps": 1e-6}  # what equimo itself gives its DINOv2
    return [
        _port("Attention/default", "padding", _attention, "torch.nn.MultiheadAttention"),
        _port("AttentionBlock/default", "default arguments", _block, encoder),
        _port("AttentionBlock/exact", "act_layer=exactgelu", partial(_block, **exact), encoder),
        _port(
            "SwiGlu/default",
            "default arguments",
            _swiglu,
            "the feed-forward layer of transformers' Llama",
        ),
        _port(
            "LayerNorm2d/default",
            "default arguments",
            _layer_norm,
            "torch.nn.LayerNorm over channels, eps=1e-6",
        ),
        _port(
            "RMSNormGated/no-gate",
            "eps=1e-5, without a gate",
            _rms_norm,
            "torch.nn.RMSNorm, eps=1e-5",
        ),
        _port(
            "VisionTransformer/dinov2",
            "as its DINOv2",
            partial(_dinov2, **preset),
            dino,
            INPUTS_ALONE,
        ),
        _port(
            "VisionTransformer/dinov2-resized",
            "as its DINOv2, with dynamic_img_size and larger images than it was built for",
            partial(_dinov2, size=12, dynamic_img_size=True, **preset),
            dino,
            INPUTS_ALONE,
        ),
        _port(
            "VisionTransformer/vit",
            "as its ViT: default epsilon and activation",
            partial(_dinov2, act_layer="gelu", init_values=1.0),
            f"{dino}, layer_norm_eps=1e-6",
            INPUTS_ALONE,
        ),
    ]


def _port(name, configuration, build, twin, checks=CHECKS):
    return Port(f"equimo/{name}", "equimo", configuration, lambda dtype: build(), twin, checks)


def _examples(module, x, mask=None):
    """Call a module that takes one example, a key and a mask."""
    if mask is None:
        return jax.vmap(lambda x: module(x, key=KEY))(x)
    return jax.vmap(lambda x, mask: module(x, key=KEY, mask=mask[None, None]))(x, mask)


def _packed(prefix=""):
    rows = [("qkv.weight", "in_proj_weight"), ("qkv.bias", "in_proj_bias")]
    rows += [(f"proj.{kind}", f"out_proj.{kind}") for kind in ("weight", "bias")]
    return [Rule((ours,), f"{prefix}{theirs}") for ours, theirs in rows]


def _attention():
    twin = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    layouts = [Layout(tuple(_packed()))]
    layer = Attention(12, 3, key=KEY)
    return Built(
        layer, twin, [(3, 7, 12)], layouts, flax_call=_examples, torch_call=torch_attention
    )


def _block(**options):
    layer = AttentionBlock(12, 3, key=KEY, mlp_ratio=2.0, **options)
    twin = torch.nn.TransformerEncoderLayer(
        12, 3, 24, 0.0, "gelu", batch_first=True, norm_first=True
    )
    names = {"prenorm": "norm1", "norm": "norm2", "fc1": "linear1", "fc2": "linear2"}
    names = {**{f"mlp.{name}": names.pop(name) for name in ("fc1", "fc2")}, **names}
    rules = [
        Rule((f"{ours}.{kind}",), f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    ]
    attention = [Rule((f"attn.{rule.ours[0]}",), f"self_attn.{rule.theirs}") for rule in _packed()]

    def ours(layer, x):
        return _examples(layer, x)

    layouts = [Layout((*attention, *rules))]
    return Built(layer, twin.eval(), [(3, 7, 12)], layouts, flax_call=ours)


def _swiglu():
    layer = SwiGlu(12, key=KEY, hidden_dim=36)  # it makes two thirds of it, 24
    config = transformers.LlamaConfig(hidden_size=12, intermediate_size=24, mlp_bias=True)
    twin = transformers.models.llama.modeling_llama.LlamaMLP(config)
    names = {"w1": "gate_proj", "w2": "up_proj", "w3": "down_proj"}
    rules = [
        Rule((f"{ours}.{kind}",), f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    ]
    return Built(
        layer,
        twin.eval(),
        [(3, 7, 12)],
        [Layout(tuple(rules))],
        flax_call=lambda m, x: _examples(m, x),
    )


def _layer_norm():
    def theirs(layer, x):
        return layer(x.movedim(1, -1)).movedim(-1, 1)

    layer, twin = LayerNorm2d(12), torch.nn.LayerNorm(12, eps=1e-6)
    return Built(
        layer, twin, [(3, 12, 4, 5)], flax_call=lambda m, x: jax.vmap(m)(x), torch_call=theirs
    )


def _rms_norm():
    layer, twin = RMSNormGated(12), torch.nn.RMSNorm(12, eps=1e-5)
    rules = [Rule(("w",), "weight")]
    return Built(
        layer, twin, [(3, 7, 12)], [rules], flax_call=lambda m, x: jax.vmap(jax.vmap(m))(x)
    )


# Models: weights are copied from transformers, whose query, key and value are three layers.


def _dinov2(size=8, **options):
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**TINY, mlp_ratio=2, layerscale_value=1.0)
    twin = transformers.Dinov2Model(config).eval().double()
    torch.nn.init.normal_(twin.embeddings.cls_token)
    for parameter in twin.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
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

    def ours(model, images):
        found = jax.vmap(lambda image: model.forward_features(image, key=KEY, inference=True))(
            images
        )
        tokens = found["x_norm_cls_token"][:, None], found["x_norm_patchtokens"]
        return jnp.concatenate(tokens, axis=1)

    def theirs(model, images):
        return model(images).last_hidden_state

    return Built(
        _filled(model, twin), twin, [(2, 3, size, size)], [None], flax_call=ours, torch_call=theirs
    )


def _filled(model, twin):
    """Return a model of equimo with the weights of Dinov2Model."""
    values = {name: jnp.asarray(p.detach().numpy()) for name, p in twin.named_parameters()}
    rows = list(_rows(values, len(model.blocks[0].blocks)))
    return equinox.tree_at(
        lambda model: [get(model) for get, _ in rows], model, [value for _, value in rows]
    )


def _rows(values, depth):
    top = {
        "cls_token": lambda m: m.cls_token,
        "position_embeddings": lambda m: m.global_pos_embed.weight,
    }
    for name, get in top.items():
        yield get, values[f"embeddings.{name}"][0]
    yield (
        (lambda m: m.patch_embed.proj.weight),
        values["embeddings.patch_embeddings.projection.weight"],
    )
    yield (
        (lambda m: m.patch_embed.proj.bias),
        values["embeddings.patch_embeddings.projection.bias"][:, None, None],
    )
    for kind in ("weight", "bias"):
        yield (lambda m, kind=kind: getattr(m.norm, kind)), values[f"layernorm.{kind}"]
    for i in range(depth):
        for path, value in _block_values(values, f"encoder.layer.{i}."):
            yield (lambda m, i=i, path=path: _inside(m.blocks[0].blocks[i], path)), value


def _block_values(values, prefix):
    for kind in ("weight", "bias"):
        heads = [
            values[f"{prefix}attention.attention.{name}.{kind}"]
            for name in ("query", "key", "value")
        ]
        yield f"attn.qkv.{kind}", jnp.concatenate(heads)
        yield f"attn.proj.{kind}", values[f"{prefix}attention.output.dense.{kind}"]
        for ours, theirs in {
            "prenorm": "norm1",
            "norm": "norm2",
            "mlp.fc1": "mlp.fc1",
            "mlp.fc2": "mlp.fc2",
        }.items():
            yield f"{ours}.{kind}", values[f"{prefix}{theirs}.{kind}"]
    for i in (1, 2):
        yield f"ls{i}.gamma", values[f"{prefix}layer_scale{i}.lambda1"]


def _inside(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module
