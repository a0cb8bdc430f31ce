"""Compare the Flax models of diffusers, removed in later releases, with their originals."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FlaxAutoencoderKL,
    FlaxControlNetModel,
    FlaxUNet2DConditionModel,
    UNet2DConditionModel,
)
from diffusers.models import attention, attention_flax, attention_processor, resnet, resnet_flax
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from field.port import Built, Port
from field.ports.flax_layers import channels_first
from flax_attn.convert import Rule, auto

CHECKS = ("weights", "forward", "gradients")
TOKENS, CONTEXT, IMAGE, TIME = (2, 6, 32), (2, 5, 24), (2, 32, 4, 4), (2, 16)
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "down_block_types": DOWN,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 24,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "sample_size": 16,
}


def ports() -> list[Port]:
    """Return the ports of diffusers."""
    return [
        _port("FlaxAttention/self", "self-attention", _attention),
        _port(
            "FlaxAttention/split-head-dim",
            "split_head_dim",
            partial(_attention, split_head_dim=True),
        ),
        _port(
            "FlaxAttention/memory-efficient",
            "use_memory_efficient_attention",
            partial(_attention, use_memory_efficient_attention=True),
        ),
        _port("FlaxBasicTransformerBlock/default", "cross-attention", _block),
        _port(
            "FlaxTransformer2DModel/conv", "one block, projections by convolutions", _transformer
        ),
        _port(
            "FlaxTransformer2DModel/linear",
            "one block, linear projections",
            partial(_transformer, linear=True),
        ),
        _port("FlaxResnetBlock2D/default", "default arguments", _resnet),
        _port("FlaxUNet2DConditionModel/default", "two levels, cross-attention", _unet),
        _port(
            "FlaxUNet2DConditionModel/linear",
            "use_linear_projection",
            partial(_unet, use_linear_projection=True),
        ),
        _port("FlaxControlNetModel/default", "two levels", _controlnet),
        _port("FlaxAutoencoderKL/default", "two levels, encoded and decoded", _autoencoder),
    ]


def _port(name, configuration, build):
    return Port(f"diffusers/{name}", "diffusers", configuration, build, checks=CHECKS)


def _bound(module, *inputs):
    return module.bind(module.init(jax.random.key(0), *(jnp.asarray(x) for x in inputs)))


def _zeros(shape):
    return np.zeros(shape)


def _attention(dtype, **options):
    ours = attention_flax.FlaxAttention(32, 4, 8, dtype=dtype, **options)
    theirs = attention_processor.Attention(32, heads=4, dim_head=8)
    return Built(_bound(ours, _zeros(TOKENS)), theirs.eval(), [TOKENS])


def _block(dtype):
    ours = attention_flax.FlaxBasicTransformerBlock(32, 4, 8, dtype=dtype)
    theirs = attention.BasicTransformerBlock(32, 4, 8, cross_attention_dim=24)

    def call(module, x, context):
        return module(x, encoder_hidden_states=context)

    bound = _bound(ours, _zeros(TOKENS), _zeros(CONTEXT))
    return Built(bound, theirs.eval(), [TOKENS, CONTEXT], torch_call=call)


def _transformer(dtype, linear=False):
    ours = attention_flax.FlaxTransformer2DModel(
        32, 4, 8, use_linear_projection=linear, dtype=dtype
    )
    theirs = Transformer2DModel(4, 8, 32, cross_attention_dim=24, use_linear_projection=linear)

    def call(module, x, context):
        return channels_first(lambda y: module(y, encoder_hidden_states=context).sample, x)

    bound = _bound(ours, _zeros((2, 4, 4, 32)), _zeros(CONTEXT))
    return Built(bound, theirs.eval(), [(2, 4, 4, 32), CONTEXT], torch_call=call)


def _resnet(dtype):
    ours = resnet_flax.FlaxResnetBlock2D(32, 64, dtype=dtype)
    theirs = resnet.ResnetBlock2D(in_channels=32, out_channels=64, temb_channels=16, eps=1e-5)

    def call(module, x, time):
        return channels_first(lambda y: module(y, time), x)

    inputs = [(2, 4, 4, 32), TIME]
    return Built(_bound(ours, *map(_zeros, inputs)), theirs.eval(), inputs, torch_call=call)


def _model(ours, theirs, inputs, ours_call, theirs_call, layouts=("auto",)):
    bound = ours.bind({"params": ours.init_weights(jax.random.key(0))})
    return Built(bound, theirs.eval(), inputs, layouts, flax_call=ours_call, torch_call=theirs_call)


def _call(module, sample, time, context):
    return module(sample, time, context).sample


def _unet(dtype, **options):
    options = {**UNET, "out_channels": 4, "up_block_types": UP, **options}
    ours, theirs = FlaxUNet2DConditionModel(dtype=dtype, **options), UNet2DConditionModel(**options)
    inputs = [(2, 4, 8, 8), np.array([3, 700]), CONTEXT]
    return _model(ours, theirs, inputs, _call, _call)


def _controlnet(dtype):
    sizes = {"conditioning_embedding_out_channels": (4, 4, 6, 6)}
    options = {name: value for name, value in UNET.items() if name != "sample_size"}
    ours = FlaxControlNetModel(sample_size=8, dtype=dtype, **options, **sizes)
    theirs = ControlNetModel(**options, **sizes)

    def call(module, sample, time, context, condition):
        found = module(sample, time, context, condition)
        return {"down": tuple(found.down_block_res_samples), "mid": found.mid_block_res_sample}

    def ours_call(module, *inputs):
        found = call(module, *inputs)  # Flax has the channels last
        return {
            "down": tuple(jnp.moveaxis(x, -1, 1) for x in found["down"]),
            "mid": jnp.moveaxis(found["mid"], -1, 1),
        }

    inputs = [(2, 4, 8, 8), np.array([3, 700]), CONTEXT, (2, 3, 64, 64)]
    return _model(ours, theirs, inputs, ours_call, call)


def _autoencoder(dtype):
    ours, theirs = FlaxAutoencoderKL(dtype=dtype, **VAE), AutoencoderKL(**VAE)

    def ours_call(module, image):
        latent = module.encode(image).latent_dist
        return {
            "mean": jnp.moveaxis(latent.mean, -1, 1),
            "image": module.decode(latent.mean).sample,
        }

    def theirs_call(module, image):
        latent = module.encode(image).latent_dist
        return {"mean": latent.mean, "image": module.decode(latent.mean).sample}

    return _model(ours, theirs, [(2, 3, 16, 16)], ours_call, theirs_call, [_paired])


def _paired(ours, theirs):
    """Pair the autoencoder's attention by hand: its names are from an earlier PyTorch release."""
    names = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    places = [
        (f"{side}.mid_block.attentions_0.", f"{side}.mid_block.attentions.0.")
        for side in ("encoder", "decoder")
    ]
    rules = []
    for (here, there), (name, original) in product(places, names.items()):
        rules.append(Rule((f"{here}{name}.kernel",), f"{there}{original}.weight", "i o -> o i"))
        rules.append(Rule((f"{here}{name}.bias",), f"{there}{original}.bias"))
    return auto(ours, theirs, rules=rules)
