"""Frequencies of rotary and sinusoidal positions, and scalings of RoPE for longer inputs.

They are known before tracing: numpy in float64, so that a call rounds them once, to the dtype it
computes in.

References:
    Vaswani et al. 2017 (arXiv:1706.03762); Su et al. 2021, RoPE (arXiv:2104.09864);
    Chen et al. 2023, linear scaling (arXiv:2306.15595);
    Peng et al. 2023, dynamic NTK and YaRN (arXiv:2309.00071);
    Llama Team 2024, Llama 3 (arXiv:2407.21783).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from attn_spec.checks import check_positive

# Lengths may be an array of any framework.
Lengths = TypeVar("Lengths")
# Of shape (width / 2,), in float64: radians a token, from the fastest to the slowest.
Frequencies = np.ndarray


def plain_frequencies(base: float, width: int) -> Frequencies:
    """Return `base ** (-2i / width)` for `i = 0 ... width / 2 - 1`.

    Example:
        >>> plain_frequencies(10000.0, 4).tolist()
        [1.0, 0.01]
    """
    return base ** -(np.arange(0, width, 2) / width)


@dataclass(frozen=True)
class Scaling(ABC):
    """Base class of scalings: how the frequencies of RoPE change for longer inputs.

    A scaling of your own is a frozen dataclass that derives from it and defines `frequencies`.

    Args:
        factor: how many times longer the inputs become, at least 1.

    Raises:
        ValueError: if `factor` is less than 1.
    """

    factor: float

    def __post_init__(self):
        # Written so that NaN is refused too.
        if not self.factor >= 1:
            raise ValueError(
                "factor is how many times longer than in training the inputs become, at least 1; "
                f"got factor={self.factor}. For no scaling pass scaling=None"
            )

    @abstractmethod
    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width."""

    def amplitude(self) -> float:
        """Return the factor on what is rotated."""
        return 1.0

    def check_width(self, width: int) -> None:
        """Raise if so many rotated features do not fit; by default any number fits."""
        del width


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Every position is divided by `factor`.

        f_i / factor

    Example:
        >>> LinearScaling(8.0).frequencies(10000.0, 4).tolist()
        [0.125, 0.00125]

    References:
        Chen et al. 2023 (arXiv:2306.15595).
    """

    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width."""
        return plain_frequencies(base, width) / self.factor


@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """Dynamic NTK scaling: the base grows with the length of the input.

        f_i * stretch ** (-2i / (width - 2))
        stretch = 1 + factor * max(0, length / original_context_length - 1)

    Up to `original_context_length` tokens nothing changes. The length is the largest position of a
    sequence plus one. Keys that a cache keeps were rotated for the length of their own call: cached
    decoding beyond `original_context_length` is another function than the full forward.

    Args:
        factor: how fast the stretch grows, at least 1.
        original_context_length: length of the longest input in training.

    Raises:
        ValueError: if `factor` is less than 1 or `original_context_length` is not positive.

    Example:
        >>> DynamicNTKScaling(2.0, original_context_length=4).stretch(np.array([3.0, 8.0])).tolist()
        [1.0, 3.0]

    References:
        Peng et al. 2023, appendix B.1 (arXiv:2309.00071).
    """

    original_context_length: int

    def __post_init__(self):
        super().__post_init__()
        check_positive(original_context_length=self.original_context_length)

    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width, those of short inputs."""
        return plain_frequencies(base, width)

    def stretch(self, length: Lengths) -> Lengths:
        """Return the factor that the slowest frequency of an input of this length is divided by."""
        array: Any = length
        beyond = array / self.original_context_length - 1
        # Within the original length nothing changes.
        return 1 + self.factor * beyond.clip(0)

    def exponents(self, width: int) -> np.ndarray:
        """Return the power of the stretch in each frequency, from 0 (fastest) to -1 (slowest)."""
        return np.linspace(0, -1, width // 2)


@dataclass(frozen=True)
class YaRNScaling(Scaling):
    """Fast frequencies stay, slow ones are divided by `factor`, with a linear ramp between them.

        f_i * (1 - r_i) + f_i / factor * r_i    with r_i = clip((i - fast) / (slow - fast), 0, 1)

    `fast` and `slow` are the indices whose wavelengths fit `beta_fast` and `beta_slow` times into
    `original_context_length`. What is rotated is multiplied by `attention_factor`, which stands for
    a temperature of the softmax; None is `m(mscale) / m(mscale_all_dim)` with `m(c) = 1 + c *
    ln(factor) / 10`.

    Args:
        factor: how many times longer the inputs become, at least 1.
        original_context_length: length of the longest input in training.
        beta_fast: rotations within the original context from which on a frequency stays.
        beta_slow: rotations within the original context down to which a frequency is divided in
            full.
        truncate: whether `fast` and `slow` are rounded outwards to integers.
        mscale: argument of `m` in the numerator above.
        mscale_all_dim: argument of `m` in the denominator above; DeepSeek sets both.
        attention_factor: factor on what is rotated; None is the quotient above.

    Raises:
        ValueError: if `factor` is less than 1, `original_context_length` is not positive or the
            betas are not in order.

    Example:
        >>> yarn = YaRNScaling(4.0, original_context_length=2048)
        >>> (plain_frequencies(10000.0, 16) / yarn.frequencies(10000.0, 16)).round(2).tolist()
        [1.0, 1.0, 1.0, 1.23, 1.6, 2.29, 4.0, 4.0]
        >>> round(yarn.amplitude(), 4)
        1.1386

    References:
        Peng et al. 2023 (arXiv:2309.00071); DeepSeek-AI 2024, mscale (arXiv:2405.04434).
    """

    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_positive(original_context_length=self.original_context_length)
        _check_order("beta_slow", self.beta_slow, "beta_fast", self.beta_fast, "Usual are 1 and 32")

    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width."""
        fast, slow = self._ramp_ends(base, width)
        # Where the ends meet, the ramp is a step.
        length = (slow - fast) or 1
        ramp = np.clip((np.arange(width // 2) - fast) / length, 0, 1)
        plain = plain_frequencies(base, width)
        return plain * (1 - ramp) + plain / self.factor * ramp

    def _ramp_ends(self, base: float, width: int) -> tuple[float | int, float | int]:
        """Return the indices of the frequencies between which the ramp runs."""
        fast = self._index(self.beta_fast, base, width)
        slow = self._index(self.beta_slow, base, width)
        if self.truncate:
            fast = math.floor(fast)
            slow = math.ceil(slow)
        # The published code bounds by the width, though there are half as many frequencies.
        return max(fast, 0), min(slow, width - 1)

    def _index(self, rotations: float, base: float, width: int) -> float:
        """Return the index of the frequency that rotates so often within the original context.

        The i at which `base ** (-2i / width) * original_context_length = rotations * 2 pi`.
        """
        wavelength = self.original_context_length / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    def amplitude(self) -> float:
        """Return the factor on what is rotated."""
        if self.attention_factor is not None:
            return self.attention_factor
        tenth = math.log(self.factor) / 10
        above = 1 + self.mscale * tenth
        below = 1 + self.mscale_all_dim * tenth
        return above / below


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Short wavelengths stay, long ones are multiplied by `factor`, with a ramp between them.

        f_i * s_i + f_i / factor * (1 - s_i)
        s_i = clip((rotations_i - low) / (high - low), 0, 1)

    `rotations_i = f_i * original_context_length / (2 pi)` is how often the wavelength fits into the
    original context, `low` and `high` are `low_freq_factor` and `high_freq_factor`.

    Args:
        factor: how many times longer the inputs become, at least 1.
        original_context_length: length of the longest input in training.
        low_freq_factor: rotations down to which a frequency is divided in full.
        high_freq_factor: rotations from which on a frequency stays.

    Raises:
        ValueError: if `factor` is less than 1, `original_context_length` is not positive or the two
            frequency factors are not in order.

    Example:
        >>> plain, scaled = plain_frequencies(500000.0, 8), Llama3Scaling().frequencies(500000.0, 8)
        >>> (plain / scaled).round(2).tolist()
        [1.0, 1.0, 2.69, 8.0]

    References:
        Llama Team 2024 (arXiv:2407.21783); the constants are those of Llama 3.1.
    """

    factor: float = 8.0
    original_context_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        check_positive(original_context_length=self.original_context_length)
        low, high = self.low_freq_factor, self.high_freq_factor
        _check_order("low_freq_factor", low, "high_freq_factor", high, "Usual are 1 and 4")

    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width."""
        plain = plain_frequencies(base, width)
        rotations = plain * self.original_context_length / (2 * math.pi)
        ramp_length = self.high_freq_factor - self.low_freq_factor
        stays = np.clip((rotations - self.low_freq_factor) / ramp_length, 0, 1)
        return plain * stays + plain / self.factor * (1 - stays)


def _check_order(low_name: str, low: float, high_name: str, high: float, remedy: str) -> None:
    if not 0 < low < high:
        raise ValueError(
            f"{low_name} and {high_name} bound a ramp: 0 < {low_name} < {high_name}; "
            f"got {low_name}={low}, {high_name}={high}. {remedy}"
        )
