"""The Flax models of diffusers: weights cross by the renaming of diffusers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    FlaxAutoencoderKL,
    FlaxControlNetModel,
    FlaxUNet2DConditionModel,
    UNet2DConditionModel,
)
from diffusers.models import attention, attention_flax, attention_processor, resnet, resnet_flax
from diffusers.models.modeling_flax_pytorch_utils import rename_key, rename_key_and_reshape_tensor
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from flax.traverse_util import flatten_dict, unflatten_dict

from field.by_hand.both import Case, layer_case, placed

TOKENS, CONTEXT, IMAGE = (2, 6, 32), (2, 5, 24), (2, 4, 4, 32)
SHARED = {
    "in_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 24,
}
UNET = {
    **SHARED,
    "sample_size": 8,
    "out_channels": 4,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "sample_size": 16,
}
TIMES = [3, 700]


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "FlaxAttention/self": _attention,
        "FlaxAttention/split-head-dim": partial(_attention, split_head_dim=True),
        "FlaxAttention/memory-efficient": partial(_attention, use_memory_efficient_attention=True),
        "FlaxBasicTransformerBlock/default": _block,
        "FlaxTransformer2DModel/conv": partial(_transformer, False),
        "FlaxTransformer2DModel/linear": partial(_transformer, True),
        "FlaxResnetBlock2D/default": _resnet,
        "FlaxUNet2DConditionModel/default": _unet,
        "FlaxUNet2DConditionModel/linear": partial(_unet, use_linear_projection=True),
        "FlaxControlNetModel/default": _controlnet,
        "FlaxAutoencoderKL/default": _autoencoder,
    }
    yield from ((f"diffusers/{name}", make) for name, make in rows.items())


def renamed(
    v: Mapping[str, Any], wanted: Mapping[tuple[str, ...], Any], names: Any
) -> dict[str, Any]:
    """Return the variables of a Flax model, of the parameters of its original."""
    pairs = (
        rename_key_and_reshape_tensor(tuple(rename_key(name).split(".")), v[name], wanted)
        for name in names
    )
    found = {".".join(path): value for path, value in pairs}
    own = {".".join(path): leaf.shape for path, leaf in wanted.items()}
    return {"params": unflatten_dict(dict(placed(own, found)), sep=".")}


def _case(module, twin, inputs, call, theirs=None):
    """Return a case; `call(apply, *inputs)` runs the Flax side."""
    names = [name for name, _ in twin.named_parameters()]
    if hasattr(module, "init_weights"):
        tree = jax.eval_shape(module.init_weights, jax.random.key(0))
    else:
        zeros = [jnp.zeros(shape) for shape in inputs.values()]
        tree = jax.eval_shape(module.init, jax.random.key(0), *zeros)["params"]
    wanted = flatten_dict(dict(tree))

    def ours(v, mask):
        return call(partial(module.apply, renamed(v, wanted, names)), *(v[name] for name in inputs))

    return layer_case(twin, inputs, ours, theirs)


def _apply(apply, *inputs):
    return apply(*inputs)


def _attention(**options):
    ours = attention_flax.FlaxAttention(32, 4, 8, dtype=jnp.float64, **options)
    return _case(
        ours, attention_processor.Attention(32, heads=4, dim_head=8), {"x": TOKENS}, _apply
    )


def _block():
    ours = attention_flax.FlaxBasicTransformerBlock(32, 4, 8, dtype=jnp.float64)
    twin = attention.BasicTransformerBlock(32, 4, 8, cross_attention_dim=24)

    def theirs(run, mask, x, context):
        return run(x, encoder_hidden_states=context)

    return _case(ours, twin, {"x": TOKENS, "context": CONTEXT}, _apply, theirs)


def _transformer(linear):
    ours = attention_flax.FlaxTransformer2DModel(
        32, 4, 8, use_linear_projection=linear, dtype=jnp.float64
    )
    twin = Transformer2DModel(4, 8, 32, cross_attention_dim=24, use_linear_projection=linear)

    def theirs(run, mask, x, context):
        return run(x.movedim(-1, 1), encoder_hidden_states=context).sample.movedim(1, -1)

    return _case(ours, twin, {"x": IMAGE, "context": CONTEXT}, _apply, theirs)


def _resnet():
    ours = resnet_flax.FlaxResnetBlock2D(32, 64, dtype=jnp.float64)
    twin = resnet.ResnetBlock2D(in_channels=32, out_channels=64, temb_channels=16, eps=1e-5)

    def theirs(run, mask, x, time):
        return run(x.movedim(-1, 1), time).movedim(1, -1)

    return _case(ours, twin, {"x": IMAGE, "time": (2, 16)}, _apply, theirs)


def _unet(**options):
    options = {**UNET, **options}
    ours = FlaxUNet2DConditionModel(dtype=jnp.float64, **options)

    def call(apply, sample, context):
        return apply(sample, jnp.asarray(TIMES), context).sample

    def theirs(run, mask, sample, context):
        return run(sample, torch.tensor(TIMES), context).sample

    inputs = {"sample": (2, 4, 8, 8), "context": CONTEXT}
    return _case(ours, UNet2DConditionModel(**options), inputs, call, theirs)


def _controlnet():
    sizes = {"conditioning_embedding_out_channels": (4, 4, 6, 6)}
    ours = FlaxControlNetModel(sample_size=8, dtype=jnp.float64, **SHARED, **sizes)

    def call(apply, sample, context, condition):
        found = apply(sample, jnp.asarray(TIMES), context, condition)
        return [
            jnp.moveaxis(x, -1, 1)
            for x in (*found.down_block_res_samples, found.mid_block_res_sample)
        ]

    def theirs(run, mask, sample, context, condition):
        found = run(sample, torch.tensor(TIMES), context, condition)
        return [*found.down_block_res_samples, found.mid_block_res_sample]

    inputs = {"sample": (2, 4, 8, 8), "context": CONTEXT, "condition": (2, 3, 64, 64)}
    return _case(ours, ControlNetModel(**SHARED, **sizes), inputs, call, theirs)


class Encoded(torch.nn.Module):
    """The mean that an autoencoder encodes an image to, and the image that it makes of it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image):
        mean = self.model.encode(image).latent_dist.mean
        return {"mean": mean, "image": self.model.decode(mean).sample}


def _autoencoder():
    ours = FlaxAutoencoderKL(dtype=jnp.float64, **VAE)
    wanted = flatten_dict(dict(jax.eval_shape(ours.init_weights, jax.random.key(0))))

    def call(v, mask):
        own = {name.removeprefix("model."): x for name, x in v.items() if name != "image"}
        params = renamed(own, wanted, own)

        def run(module, image):
            latent = module.encode(image).latent_dist
            return {
                "mean": jnp.moveaxis(latent.mean, -1, 1),
                "image": module.decode(latent.mean).sample,
            }

        return ours.apply(params, v["image"], method=run)

    return layer_case(Encoded(AutoencoderKL(**VAE)), {"image": (2, 3, 16, 16)}, call)
