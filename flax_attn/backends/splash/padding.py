"""The sizes that splash attention pads to."""

from flax_attn.backends.call import Call
from flax_attn.functional.mask_parts import Lengths, Segments

LANES = 128  # the kernel's blocks are multiples of this many tokens


def padded(size: int) -> int:
    """Return the number of tokens after padding."""
    return -(-size // LANES) * LANES


def has_ids(call: Call) -> bool:
    """Return whether the kernel needs segment ids, for padding or for the mask."""
    return call.shape[3] % LANES > 0 or any(
        isinstance(part, Lengths | Segments) for part in call.mask.parts
    )
