"""The cache of a recurrent attention: its state and the last inputs of its convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float, Integer

from attn_spec.checks import check_positive
from flax_attn.functional.cache_base import Cache, check_empty
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.mask_part import Count, MaskPart
from flax_attn.functional.mask_parts import Causal, Lengths, Segments
from flax_attn.functional.masks import Mask
from flax_attn.functional.shapes import RowLengths


@dataclass(frozen=True)
class DeltaCache(Cache):
    """What a recurrent attention keeps of the tokens so far, of one size for any number of tokens.

    A pytree of fixed shapes, as `KVCache` is. There is no capacity, and so no token that does not
    fit: a row is `invalid` after a length outside `0 ... t` alone.

    Args:
        query: `(b, w - 1, k h)`, the last inputs of the convolution of queries.
        key: `(b, w - 1, k h)`, the last inputs of the convolution of keys.
        value: `(b, w - 1, n v)`, the last inputs of the convolution of values.
        state: `(b, n, v, h)`, in at least float32.
        length: how many tokens of each row were taken, `(b,)`; -1 in a row that is invalid. An
            integer is for all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if a size is not positive, or a length that is an integer lies outside `0 ...
            t`.

    Example:
        >>> cache = DeltaCache.zeros(2, 4, num_heads=3, head_dim=6, value_dim=5)
        >>> cache.state.shape, cache.value.shape, cache.length.tolist()
        ((2, 3, 5, 6), (2, 3, 15), [0, 0])
    """

    query: Float[Array, "*b before kh"]
    key: Float[Array, "*b before kh"]
    value: Float[Array, "*b before nv"]
    state: Float[Array, "*b n v h"]
    length: Count

    @staticmethod
    def zeros(
        b: int | None,
        kernel_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> DeltaCache:
        """Return an empty cache for inputs of `dtype`.

        b None is one sequence without a batch axis.
        """
        shapes = DeltaCache.shapes(
            b, kernel_size, num_heads, head_dim, value_dim=value_dim, num_key_heads=num_key_heads
        )
        check_empty(b, dtype)
        # A state is a sum over all tokens before.
        wide = accumulation_dtype(jnp.dtype(dtype))
        batch = () if b is None else (b,)
        return DeltaCache(
            query=jnp.zeros(shapes["query"], dtype),
            key=jnp.zeros(shapes["key"], dtype),
            value=jnp.zeros(shapes["value"], dtype),
            state=jnp.zeros(shapes["state"], wide),
            length=jnp.zeros(batch, jnp.int32),
        )

    @staticmethod
    def shapes(
        b: int | None,
        kernel_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what is stored, by the names of the fields."""
        if value_dim is None:
            value_dim = head_dim
        if num_key_heads is None:
            num_key_heads = num_heads
        check_positive(kernel_size=kernel_size, num_heads=num_heads, num_key_heads=num_key_heads)
        check_positive(head_dim=head_dim, value_dim=value_dim)
        batch = () if b is None else (b,)
        before = (*batch, kernel_size - 1)
        keys = (*before, num_key_heads * head_dim)
        values = (*before, num_heads * value_dim)
        state = (*batch, num_heads, value_dim, head_dim)
        return {"query": keys, "key": keys, "value": values, "state": state}

    @property
    def batch(self) -> tuple[int, ...]:
        return self.state.shape[:-3]


def documents_of(
    mask: Mask, positions: Integer[Array, "b t"], lengths: RowLengths
) -> tuple[Bool[Array, "b t"] | None, RowLengths]:
    """Read from a mask where documents begin among tokens, and how many tokens are real.

    Segments are documents one after another: an id that comes back begins another document.

    Args:
        mask: mask of the whole sequence: causal, segments and lengths.
        positions: positions of the tokens in their sequences.
        lengths: how many of the tokens are real; None is all.

    Raises:
        ValueError: if the mask has another part: a state knows neither windows nor single tokens.

    Example:
        >>> mask = Mask.segments(jnp.array([[4, 4, 7, 7]])) & Mask.lengths(key=jnp.array([3]))
        >>> starts, lengths = documents_of(mask, jnp.arange(4)[None], None)
        >>> starts.tolist(), lengths.tolist()
        ([[False, False, True, False]], [3])
    """
    starts = None
    for part in mask.parts:
        if isinstance(part, Segments):
            own = _begins(part, positions)
            starts = own if starts is None else starts | own
        elif isinstance(part, Lengths):
            for count in (part.query, part.key):
                if count is not None:
                    lengths = _fewer(lengths, count, positions)
        elif not _is_whole_causal(part):
            raise ValueError(
                "a recurrent attention takes causal masks, segments and lengths, as its state"
                f" holds all tokens before; got {Mask((part,))}. Use MultiHeadAttention for other"
                " masks"
            )
    return starts, lengths


def _is_whole_causal(part: MaskPart) -> bool:
    """Return whether a part is the causal mask of the whole sequence."""
    if not isinstance(part, Causal):
        return False
    # An offset that is an array is not read.
    return isinstance(part.offset, int | None) and not part.offset


def _begins(segments: Segments, positions: Array) -> Array:
    """Return which tokens are the first of their segments."""
    ids = jnp.atleast_2d(segments.query)
    # The first token of a sequence finds an empty state in any case.
    differs = ids[:, 1:] != ids[:, :-1]
    begins = jnp.pad(differs, [(0, 0), (1, 0)])
    begins = jnp.broadcast_to(begins, (len(positions), ids.shape[1]))
    return jnp.take_along_axis(begins, positions, axis=1, mode="clip")


def _fewer(lengths: RowLengths, count: Count, positions: Array) -> Array:
    """Return how many of the tokens that are real stand before the `count` of their sequence."""
    b, t = positions.shape
    counts = jnp.broadcast_to(jnp.asarray(count, jnp.int32), (b,))
    inside = positions < counts[:, None]
    lengths = jnp.asarray(t if lengths is None else lengths, jnp.int32)
    return jnp.minimum(inside.sum(axis=1, dtype=jnp.int32), lengths)
