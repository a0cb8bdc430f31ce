"""The options of `from_pretrained`, and their checks."""

from collections.abc import Iterable
from typing import Literal, TypedDict

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jax.sharding import Mesh

from attn_spec.checks import check_choice, check_keywords
from flax_attn.models.quantize import WEIGHTS
from flax_attn.modules.initialisation import check_dtypes
from flax_attn.sharding.parameter_axes import check_mesh


class LoadOptions(TypedDict, total=False):
    """The options of `from_pretrained`."""

    dtype: Dtype | None
    param_dtype: Dtype | None
    precision: PrecisionLike
    backend: str
    remat: bool
    scan_layers: bool
    dropout: float | None
    rngs: nnx.Rngs | None
    progress: bool | None
    mesh: Mesh | None
    weights: Literal["int8", "stored"] | None


def check_options(options: LoadOptions) -> None:
    """Raise unless the options are right, before a file is read.

    Raises:
        TypeError: if one has another name; the message has the nearest one.
        ValueError: if one has a value that it cannot have.
    """
    check_keywords("from_pretrained", options, LoadOptions.__annotations__)
    mesh = options.get("mesh")
    weights = options.get("weights")
    if weights is not None:
        _check_quantized(weights, mesh, options.get("scan_layers", False))
    if mesh is not None:
        check_mesh(mesh)
    dtype = options.get("param_dtype")
    check_dtypes(dtype=options.get("dtype"), param_dtype=dtype)
    if dtype is not None:
        check_float64([dtype])


def _check_quantized(weights: str, mesh: Mesh | None, scan_layers: bool) -> None:
    check_choice("weights", weights, (*WEIGHTS, "stored"))
    if mesh is not None or scan_layers:
        given = "scan_layers" if mesh is None else "a mesh"
        raise ValueError(
            f'weights="{weights}" is for layers one by one on one device; got {given}. Load without'
            " one of the two"
        )


def check_float64(dtypes: Iterable[Dtype]) -> None:
    """Raise if a dtype is float64 where JAX has no float64."""
    for dtype in dtypes:
        if jnp.dtype(dtype) == jnp.float64 and jnp.result_type(float) != jnp.float64:
            raise ValueError(
                "parameters in float64 need JAX's 64-bit mode; got a param_dtype or weights of"
                ' float64. Pass param_dtype=jnp.float32 or call jax.config.update("jax_enable_x64",'
                " True)"
            )
