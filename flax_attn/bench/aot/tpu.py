"""TPU chips, as libtpu describes them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.experimental import topologies

from flax_attn.bench.aot.program import Target
from flax_attn.bench.calls import ModelCall
from flax_attn.bench.suite import default_backends
from flax_attn.functional.masks import Mask

# The smallest slice of each generation that libtpu describes, and the GiB of memory of a chip.
TOPOLOGIES = {"v5e": ("v5e:2x2", 16), "v5p": ("v5p:2x2x1", 95), "v6e": ("v6e:2x2", 32)}
KERNELS = tuple(name for name in default_backends("tpu") if name not in ("auto", "reference"))

# Without these libtpu asks the cloud for a description of the machine.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NEEDED = "compiling for TPU needs libtpu, not a TPU: pip install 'flax-attn[tpu]'"


def targets(chips: Sequence[str] = tuple(TOPOLOGIES)) -> Iterator[Target]:
    """Return the chips.

    Raises:
        ImportError: if libtpu is not installed.
    """
    if find_spec("libtpu") is None:
        raise ImportError(_NEEDED)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for chip in chips:
        topology, memory = TOPOLOGIES[chip]
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        yield Target(chip, devices, memory * 2**30)


def _causal(b: int, t: int, n: int, k: int, h: int) -> ModelCall:
    query, key = (ShapeDtypeStruct((b, t, heads, h), jnp.bfloat16) for heads in (n, k))
    arrays = {"query": query, "key": key, "value": key, "mask": Mask.causal()}
    return ModelCall(f"causal, (b, t, n, k, h) = {(b, t, n, k, h)}", arrays)


CALLS = tuple(_causal(*shape) for shape in ((1, 4096, 16, 16, 128), (4, 2048, 8, 8, 128), (1, 8192, 32, 8, 128)))
QUICK_CALLS, QUICK_KERNELS = CALLS[1:2], KERNELS
