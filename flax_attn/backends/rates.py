"""What attention kernels reach of the rate of a chip, as it was published or measured.

`library` are the kernels of cuDNN, and splash attention on TPUs; `pallas` are those of `fused`.
Forward, in half precision.

References:
    Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), figure 5: an H100, 16,384 tokens, of 989
    TFLOP/s. cuDNN 413, 595 and 509 at widths 64, 128 and 256.
    docs/performance.md, an H100: `fused` at widths 64 (BERT), 128 (Mistral 7B) and 256 (Gemma 2),
    and in float32.
    Dao 2023, FlashAttention-2 (arXiv:2307.08691): 50 to 73 % of the rate of an A100, whose kernels
    cuDNN's are like.
    triton-lang.org, tutorial 06, 4 rows of 32 heads of 64: 162 TFLOP/s at 8192 tokens, which is
    52 % of an A100.
    github.com/jax-ml/jax/issues/35114: cuDNN in JAX at 40.6 % of an H100 where the mask is
    structure, and 15.8 % where it is an array.
"""

from typing import NamedTuple

from flax_attn.backends.call import Call
from flax_attn.backends.chips import Chip
from flax_attn.backends.platform import chip_in_use
from flax_attn.backends.work import is_float32

# Of a kernel whose mask is an array, what remains of its rate.
OF_AN_ARRAY = 15.8 / 40.6
# An assumption: on chips older than an H100, and on TPUs, `fused` was never timed, nor its tiles
# tried. It masks each tile, which the kernels of the table do not.
UNTIMED = 0.8
# Of the rate of TF32 on an H100, what `fused` reaches in float32.
IN_FLOAT32 = 0.1


class Reached(NamedTuple):
    """Shares of the rate of a chip, by the widths of heads up to which they hold."""

    library: dict[int, float]
    pallas: dict[int, float]


_HOPPER = Reached(
    library={64: 413 / 989, 128: 595 / 989, 256: 509 / 989},
    pallas={64: 0.2, 128: 0.39, 256: 0.21},
)
_AMPERE = Reached(library={256: 0.6}, pallas={256: 162 / 312 * UNTIMED})
# Nothing is published about TPUs: the lower figure of cuDNN, for kernels of all widths.
_TPU = Reached(library={256: 0.4}, pallas={256: 0.4 * UNTIMED})


def library(call: Call, structure: bool = True) -> float:
    """Return what the kernels of cuDNN or splash attention reach of the chip in use.

    Args:
        call: call.
        structure: whether the kernel knows the mask as structure, and not as an array.
    """
    share = _of_width(_reached(chip_in_use(call.platform)).library, call)
    return share if structure else share * OF_AN_ARRAY


def pallas(call: Call) -> float:
    """Return what `fused` is taken to reach of the chip in use."""
    reached = _reached(chip_in_use(call.platform))
    if reached is _HOPPER and is_float32(call):
        return IN_FLOAT32
    return _of_width(reached.pallas, call)


def _reached(chip: Chip) -> Reached:
    if chip.kind == "tpu":
        return _TPU
    return _HOPPER if chip.capability >= 9 else _AMPERE


def _of_width(shares: dict[int, float], call: Call) -> float:
    width = max(call.query.shape[3], call.value.shape[3])
    known = [share for limit, share in shares.items() if width <= limit]
    return known[0] if known else shares[max(shares)]
