"""LongRoPE: each frequency of RoPE divided by a factor of its own, which was searched for."""

import math
from dataclasses import dataclass

import numpy as np

from attn_spec.frequencies import Frequencies, Scaling, plain_frequencies


@dataclass(frozen=True)
class LongRoPEScaling(Scaling):
    """Each frequency is divided by a factor of its own, one for short and one for long inputs.

        f_i / short_i  up to original_context_length tokens,  f_i / long_i  beyond

    The length is the largest position of a sequence plus one. What is rotated is multiplied by
    `attention_factor`; None is `sqrt(1 + ln(factor) / ln(original_context_length))`. Keys that a
    cache keeps were rotated for the length of their own call: cached decoding across
    `original_context_length` is another function than the full forward. `generate` reads all tokens
    again there, and so makes what the full forward does.

    Args:
        factor: how many times longer the inputs become, at least 1.
        original_context_length: length of the longest input in training, above 1.
        short_factors: divisors of the frequencies in short inputs, from the fastest to the slowest.
        long_factors: divisors of the frequencies in long inputs.
        attention_factor: factor on what is rotated; None is the root above.

    Raises:
        ValueError: if `factor` is less than 1, `original_context_length` is not above 1 or a factor
            is not positive; in a module, if there is not one factor a frequency.

    Example:
        >>> scaling = LongRoPEScaling(4.0, 4096, short_factors=(1.0, 1.25), long_factors=(2.0, 8.0))
        >>> scaling.frequencies(10000.0, 4).tolist(), scaling.long_frequencies(10000.0, 4).tolist()
        ([1.0, 0.008], [0.5, 0.00125])
        >>> round(scaling.amplitude(), 4)
        1.0801

    References:
        Ding et al. 2024 (arXiv:2402.13753).
    """

    original_context_length: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None = None

    def __post_init__(self):
        super().__post_init__()
        # The amplitude divides by its logarithm.
        if not self.original_context_length > 1:
            raise ValueError(
                "original_context_length is the longest input of the training, above 1; "
                f"got original_context_length={self.original_context_length}"
            )
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not all(factor > 0 for factor in factors):
                raise ValueError(
                    f"{name} divide the frequencies and must be positive; got {factors}"
                )

    def frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of a RoPE of this base and width, those of short inputs."""
        return plain_frequencies(base, width) / np.array(self.short_factors)

    def long_frequencies(self, base: float, width: int) -> Frequencies:
        """Return the frequencies of inputs longer than `original_context_length`."""
        return plain_frequencies(base, width) / np.array(self.long_factors)

    def check_width(self, width: int) -> None:
        """Raise unless there is a factor for each frequency."""
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != width // 2:
                raise ValueError(
                    f"{name} must be one for each of the {width // 2} frequencies of {width}"
                    f" rotated features; got {len(factors)}. Take those that were"
                    " searched for this model"
                )

    def tokens_left(self, length: int) -> int:
        """Return how many tokens can follow a prompt of this length before an input is long."""
        # The last token that is made is not an input yet.
        return self.original_context_length - length + 1

    def amplitude(self) -> float:
        """Return the factor on what is rotated."""
        if self.attention_factor is not None:
            return self.attention_factor
        # The entropy of a softmax grows with the logarithm of the number of keys.
        growth = math.log(self.factor) / math.log(self.original_context_length)
        return math.sqrt(1 + growth)
