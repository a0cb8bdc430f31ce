"""The workload of one measurement: sizes, mask, dtype, direction, its inputs and its operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.functional.masks import Count, Mask


@dataclass(frozen=True)
class Workload:
    """Causal self-attention on `(b, t, n, h)`, or a whole layer of that size.

    Args:
        b: batch size.
        n: number of heads.
        t: number of tokens.
        h: head width.
        backward: whether to compute the gradients of all inputs (and parameters) under a random
            cotangent.
        window: sliding window, in keys; None is causal without a window.
        dtype: dtype of inputs and output.
        layer: whether projections are included, on `(b, t, n * h)`.
        step: whether only the last token is a query, as in decoding; keys and values are stored
            heads first, as in a cache.
    """

    b: int
    n: int
    t: int
    h: int
    backward: bool = False
    window: int | None = None
    dtype: str = "float32"
    layer: bool = False
    step: bool = False

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs of one head.

        About half of `t * t` without a window.

        Example:
            >>> Workload(1, 1, 4, 8).pairs, Workload(1, 1, 4, 8, window=2).pairs
            (10, 7)
        """
        width = min(self.window or self.t, self.t)
        if self.step:
            return width
        return width * self.t - width * (width - 1) // 2

    @property
    def flops(self) -> int:
        """Operations of the matrix products on visible pairs, whatever is really computed.

        Two products forward; seven with the backward pass, which computes the scores again. A layer
        adds four projections, of three products each with the backward pass.
        """
        attention = 2 * (7 if self.backward else 2) * self.b * self.n * self.pairs * self.h
        projections = 2 * (12 if self.backward else 4) * self.b * self.t * (self.n * self.h) ** 2
        return attention + (projections if self.layer else 0)

    @property
    def size(self) -> str:
        """The shape of the input, and the direction."""
        shape = (self.b, self.t, self.n, self.h)
        if self.layer:
            shape = (self.b, self.t, self.n * self.h)
        if self.step:
            return f"{shape} decoding step"
        return f"{shape} {'forward+backward' if self.backward else 'forward'}"

    def mask(self, offset: Count | None = None) -> Mask:
        """Return the mask.

        `offset` is the position of the first query where the queries are only some of the rows.
        """
        # The one query of a step is the last token, and sees all others.
        offset = self.t - 1 if self.step else offset
        if self.window is None:
            return Mask.causal(offset)
        return Mask.sliding_window(self.window, offset)

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.size}{window}, {self.dtype}"


@lru_cache(maxsize=2)
def inputs(work: Workload) -> tuple[np.ndarray, ...]:
    """Return random query, key, value and cotangent `(b, t, n, h)`; or of a layer, two arrays.

    Those are its input and cotangent `(b, t, d)`.
    """
    draws = _draw(work)
    if work.step:
        query, key, value, cotangent = draws
        draws = [query[:, -1:], key, value, cotangent[:, -1:]]
    dtype = jnp.dtype(work.dtype)
    return tuple(draw.astype(dtype) for draw in draws)


def _draw(work: Workload) -> list[np.ndarray]:
    # The same numbers for every implementation: they are drawn on the host.
    random = np.random.default_rng(0)
    if work.layer:
        shape, count = (work.b, work.t, work.n * work.h), 2
    else:
        shape, count = (work.b, work.t, work.n, work.h), 4
    return [random.standard_normal(shape, np.float32) for _ in range(count)]


def with_gradients(compute: Callable[..., Any], backward: bool) -> Callable[..., tuple]:
    """Return a function of `(*inputs, cotangent)` to the output and the gradients of inputs.

    Gradients are left out unless `backward`.
    """

    def forward(*arguments):
        return (compute(*arguments[:-1]),)

    def both(*arguments):
        output, pull = jax.vjp(compute, *arguments[:-1])
        return output, *pull(arguments[-1])

    # The cotangent comes last in either, so that both are called alike.
    return both if backward else forward
