"""What is compiled for TPU chips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import ShapeDtypeStruct

from flax_attn.aot import tpu
from flax_attn.aot.target import Target
from flax_attn.bench.calls import ModelCall
from flax_attn.bench.suite import default_backends
from flax_attn.functional.masks import Mask

# The smallest slice of each generation that libtpu describes, and the GiB of memory of a chip.
TOPOLOGIES = {"v5e": ("v5e:2x2", 16), "v5p": ("v5p:2x2x1", 95), "v6e": ("v6e:2x2", 32)}
KERNELS = tuple(name for name in default_backends("tpu") if name not in ("auto", "reference"))


def targets(chips: Sequence[str] = tuple(TOPOLOGIES)) -> Iterator[Target]:
    """Return the chips.

    Raises:
        ImportError: if libtpu is not installed.
    """
    for chip in chips:
        topology, memory = TOPOLOGIES[chip]
        yield Target(chip, tpu.described(topology), memory * 2**30)


def _causal(b: int, t: int, n: int, k: int, h: int) -> ModelCall:
    query, key = (ShapeDtypeStruct((b, t, heads, h), jnp.bfloat16) for heads in (n, k))
    arrays = {"query": query, "key": key, "value": key, "mask": Mask.causal()}
    return ModelCall(f"causal, (b, t, n, k, h) = {(b, t, n, k, h)}", arrays)


CALLS = tuple(
    _causal(*shape)
    for shape in ((1, 4096, 16, 16, 128), (4, 2048, 8, 8, 128), (1, 8192, 32, 8, 128))
)
QUICK_CALLS, QUICK_KERNELS = CALLS[1:2], KERNELS
