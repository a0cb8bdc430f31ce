"""What is compiled for TPU chips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import ShapeDtypeStruct

from flax_attn.aot import tpu
from flax_attn.backends.chips import CHIPS
from flax_attn.bench.calls import ModelCall
from flax_attn.bench.suite import default_backends
from flax_attn.functional.masks import Mask
from tools.aot.devices import AbsentDevices

# The smallest slice of each generation that libtpu describes.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The formula would hold all scores, and `auto` is one of the others.
KERNELS = tuple(name for name in default_backends("tpu") if name not in ("auto", "reference"))


def targets(chips: Sequence[str] = tuple(TOPOLOGIES)) -> Iterator[AbsentDevices]:
    """Yield the chips.

    Raises:
        ImportError: if libtpu is not installed.
    """
    for chip in chips:
        devices = tpu.described(TOPOLOGIES[chip])
        yield AbsentDevices(chip, devices, CHIPS[chip].memory)


def _causal(b: int, t: int, n: int, k: int, h: int) -> ModelCall:
    query = ShapeDtypeStruct((b, t, n, h), jnp.bfloat16)
    key = ShapeDtypeStruct((b, t, k, h), jnp.bfloat16)
    arrays = {"query": query, "key": key, "value": key, "mask": Mask.causal()}
    return ModelCall(f"causal, (b, t, n, k, h) = {(b, t, n, k, h)}", arrays)


CALLS = (
    _causal(1, 4096, 16, 16, 128),
    _causal(4, 2048, 8, 8, 128),
    _causal(1, 8192, 32, 8, 128),
)
QUICK_CALLS, QUICK_KERNELS = CALLS[1:2], KERNELS
