"""Counter-based dropout: the same key drops the same weights in both frameworks.

Whether a weight is dropped depends on its key and its own index and on nothing else: not on the
block size of a kernel, not on the order of evaluation, not on the framework. The random function is
Threefry-2x32 with 20 rounds, the one that `jax.random` is built on. Torch has no arithmetic on
32-bit unsigned integers, so they are kept in int64 and masked to 32 bits.

References:
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (doi:10.1145/2063384.2063405);
    Srivastava et al. 2014, "Dropout" (jmlr.org/papers/v15/srivastava14a.html).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_spec.attention_checks import check_key_data
from attn_spec.checks import check_rate, check_type
from torch_ref.functional.dtypes import dtype_name
from torch_ref.functional.shapes import Index

# The published constants: rotations of the rounds, and parity of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The constant of the key schedule: a parity over its words that is never 0.
_PARITY = 0x1BD11BDA
_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout at `rate`, decided by `key`.

    Args:
        rate: probability that an element is dropped, in [0, 1).
        key: two integers below 2**32; `draw_key` draws them from torch's generator.

    Example:
        >>> KeyedDropout(0.1, torch.tensor([0, 7])).rate
        0.1
    """

    rate: float
    key: Tensor

    def __post_init__(self):
        check_rate(self.rate)


def draw_key(generator: torch.Generator | None = None) -> Int[Tensor, "2"]:
    """Return a fresh key from torch's generator.

    Example:
        >>> draw_key().shape
        torch.Size([2])
    """
    return torch.randint(0, 2**32, (2,), generator=generator)


def key_data(key: Tensor) -> Int[Tensor, "2"]:
    """Return the two integers that seed Threefry; of longer keys the first two.

    Example:
        >>> key_data(torch.tensor([0, 7], dtype=torch.uint32))
        tensor([0, 7])
    """
    example = "torch.tensor([7, 42]), two integers below 2**32"
    check_type("a dropout key", key, Tensor, example)
    check_key_data(tuple(key.shape), dtype_name(key.dtype))
    # Keys of other generators, such as rbg, are longer.
    return key[:2].to(torch.int64)


def threefry_2x32(key: tuple[Index, Index], counter: tuple[Index, Index]) -> tuple[Tensor, Tensor]:
    """Encrypt a counter of two integers with a key of two: 20 rounds of add, rotate, xor.

    Shapes:
        key, counter: two arrays of integers below 2**32 each; all four broadcast together.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(int(x)) for x in threefry_2x32((zero, zero), (zero, zero))]
        ['0x6b200159', '0x99ba4efe']
    """
    k0, k1 = key
    k2 = k0 ^ k1 ^ _PARITY
    schedule = (k0, k1, k2)
    x0, x1 = counter
    x0 = (x0 + k0) & _32_BITS
    x1 = (x1 + k1) & _32_BITS
    # Five groups of four rounds; after each the key is added once more.
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            # The first is a sum of fewer than 32 integers of 32 bits: it is masked in the end.
            x0 = x0 + x1
            rotated = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = (rotated ^ x0) & _32_BITS
        x0 = x0 + schedule[(step + 1) % 3]
        x1 = x1 + schedule[(step + 2) % 3]
        x1 = (x1 + step + 1) & _32_BITS
    return x0 & _32_BITS, x1


def fold_in(key: Tensor | None, index: int) -> Int[Tensor, "2"] | None:
    """Return the key of child `index`; None stays None.

    A block has a key, and each dropout inside it has a child of that key.

    Example:
        >>> key = torch.tensor([0, 0])
        >>> bool((fold_in(key, 1) == fold_in(key, 2)).any())
        False
    """
    if key is None:
        return None
    seed = key_data(key)
    counter = (torch.tensor(index), torch.tensor(0))
    return torch.stack(threefry_2x32((seed[0], seed[1]), counter))


def keep_mask(dropout: KeyedDropout, b: Index, n: Index, t: Index, s: Index) -> Tensor:
    """Return which elements survive: `threefry(threefry(key, (b, n)), (t, s)) >= rate * 2**32`.

    Shapes:
        b, n, t, s: integer index arrays that broadcast together; kernels pass those of a block.

    Example:
        >>> t, s = torch.arange(2)[:, None], torch.arange(6)[None, :]
        >>> zero = torch.zeros((1, 1), dtype=torch.int64)
        >>> keep_mask(KeyedDropout(0.5, torch.tensor([0, 0])), zero, zero, t, s).int()
        tensor([[1, 0, 1, 1, 0, 0],
                [0, 1, 0, 1, 0, 0]], dtype=torch.int32)
    """
    seed = key_data(dropout.key).to(t.device)
    # A counter holds two of the four indices: the others make a key of their own.
    head_key = threefry_2x32((seed[0], seed[1]), (b, n))
    bits, _ = threefry_2x32(head_key, (t, s))
    return bits >= threshold(dropout.rate)


def threshold(rate: float) -> int:
    """Return the least of the random integers of 32 bits that keep an element."""
    # A rate just below 1 would round to 2**32, which has 33 bits.
    largest = 2**32 - 1
    return min(round(rate * 2**32), largest)


def keep_grid(dropout: KeyedDropout, shape: Sequence[int], device=None) -> Tensor:
    """Return the whole `(b, n, t, s)` mask of `keep_mask`, for materialised arrays."""
    b, n, t, s = (torch.arange(size, device=device) for size in shape)
    return keep_mask(
        dropout,
        b[:, None, None, None],
        n[None, :, None, None],
        t[None, None, :, None],
        s[None, None, None, :],
    )


def drop(weights: Float[Tensor, "*shape"], keep: Tensor, rate: float) -> Float[Tensor, "*shape"]:
    """Zero what is not kept and divide the rest by `1 - rate`, so that the mean stays."""
    return torch.where(keep, weights / (1 - rate), 0)
