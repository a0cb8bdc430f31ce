"""A function of scores as data: what kernels get.

Only in flax_attn: PyTorch calls a function on tensors of indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_attn.functional.shapes import Index, Weights
from flax_attn.functional.token_runs import Places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TracedScore:
    """A function of scores, and the indices that it gets.

    Args:
        function: an `IndexFunction`.
        b: indices of the rows of the batch, `(b,)`.
        n: indices of the heads, `(n,)`.
        rows: positions of the queries, `(#b, t)`.
        cols: positions of the keys, `(#b, s)`.

    Attributes:
        axes: axes that the arrays are split over where a mesh divides the call. Positions are those
            of whole sequences.
    """

    function: Any
    b: Any
    n: Any
    rows: Any
    cols: Any
    axes: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "b": ("batch",),
        "n": ("heads",),
        "rows": ("batch", None),
        "cols": ("batch", None),
    }

    def apply(self, scores: Weights) -> Weights:
        """Return the new scores."""
        return self.function.over((scores,), self.b, self.n, self.rows, self.cols)

    def head(self, b: Index, n: Index) -> TracedScore:
        """Return the function for one row of the batch and one head."""
        return replace(
            self,
            b=lax.dynamic_slice_in_dim(self.b, b, 1),
            n=lax.dynamic_slice_in_dim(self.n, n, 1),
            # Positions that all rows share have one row, to which the index is clamped.
            rows=lax.dynamic_slice_in_dim(self.rows, b, 1),
            cols=lax.dynamic_slice_in_dim(self.cols, b, 1),
        )

    def tile(self, scores: Float[Array, "t s"], rows: Index, cols: Index) -> Float[Array, "t s"]:
        """Return the new scores of a tile of one head, given the indices of its tokens."""
        tile = self._at(rows, cols)
        return tile._new(scores, tile.floats)

    def pull(
        self, indices: tuple[Index, Index], scores: Array, cotangent: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the gradients of the scores of a tile and of the captured arrays.

        `cotangent` is the gradient of the new scores.
        """
        tile = self._at(*indices)
        _, gradients = jax.vjp(tile._new, scores, tile.floats)
        return gradients(cotangent)

    def _new(self, scores: Array, floats: tuple[Array, ...]) -> Array:
        """Return new scores `(t, s)`, given the captured arrays that have gradients."""
        function = self.with_floats(floats)
        return function.apply(scores[None, None])[0, 0]

    def _at(self, rows: Index, cols: Index) -> TracedScore:
        # Tiles may reach beyond the tokens, where all is hidden, but the function must not be asked
        # about it.
        return replace(
            self,
            rows=jnp.take(self.rows, rows, axis=1, mode="clip"),
            cols=jnp.take(self.cols, cols, axis=1, mode="clip"),
        )

    def placed(self, rows: Places, cols: Places) -> TracedScore:
        """Return the function for some of the tokens."""
        return replace(self, rows=rows.take(self.rows, 1), cols=cols.take(self.cols, 1))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def floats(self) -> tuple[Array, ...]:
        """The captured arrays that have gradients."""
        return self.function.floats

    def with_floats(self, floats: Sequence[Array]) -> TracedScore:
        """Return the function with other captured arrays that have gradients."""
        return replace(self, function=self.function.with_floats(floats))

    def cotangent(self, floats: Sequence[Array]) -> TracedScore:
        """Return gradients of captured arrays in the form of the function; the rest is None."""
        return TracedScore(self.function.with_floats(floats, None), None, None, None, None)
