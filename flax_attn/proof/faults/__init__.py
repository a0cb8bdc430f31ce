"""The faults that ports are known for, each patched into the PyTorch module alone.

Every one changes the function or its training, and every one must be detected: `detect.py` applies
them one by one.
"""

from flax_attn.proof.faults import (
    attention,
    cache,
    decoders,
    encoders,
    functions,
    latent,
    layers,
    mixture,
    projections,
    recurrent,
    training,
)
from flax_attn.proof.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *(*attention.FAULTS, *projections.FAULTS, *cache.FAULTS, *functions.FAULTS),
    *(*layers.FAULTS, *decoders.FAULTS, *mixture.FAULTS, *latent.FAULTS, *recurrent.FAULTS),
    *(*encoders.FAULTS, *training.FAULTS),
)

__all__ = ["FAULTS", "Fault"]
