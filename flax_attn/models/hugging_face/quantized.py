"""Quantized weights: dequantized when read, never written."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax.typing import Dtype

from attn_spec.hugging_face.fields import Fields
from flax_attn.convert.headers import Stored
from flax_attn.models.hugging_face import fp8, mxfp4


def dequantized(
    stored: Mapping[str, Stored], fields: Fields, dtype: Dtype | None
) -> Mapping[str, Stored]:
    """Return the entries of a file as a config says that they are quantized.

    Args:
        stored: contents of the file, by name.
        fields: fields of `config.json`.
        dtype: dtype of numbers that are rounded; None is bfloat16.

    Raises:
        ValueError: if the config says that weights are quantized in a way that is not known.
    """
    quantization = read_quantization(fields)
    if quantization is None:
        return stored
    if quantization.text("quant_method") == "mxfp4":
        return mxfp4.dequantized(stored)
    return fp8.dequantized(
        stored, quantization.pair("weight_block_size", 128), dtype or jnp.bfloat16
    )


def read_quantization(fields: Fields) -> Fields | None:
    """Return what a config says of how its weights are quantized, None if they are not.

    Raises:
        ValueError: if it is a way that is not known.
    """
    found = fields.optional_object("quantization_config")
    if found is None:
        return None
    inner = Fields(f"{fields.where}: quantization_config", found).filled(quant_method="")
    if inner.choose("quant_method", {"mxfp4": False, "fp8": True}):
        inner.only(fmt="e4m3", activation_scheme="dynamic")
        inner.pair("weight_block_size", 128)
    return inner
