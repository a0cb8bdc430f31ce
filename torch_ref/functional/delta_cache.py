"""The cache of a recurrent attention: its state and the last inputs of its convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn import functional

from attn_spec.checks import check_positive
from torch_ref.functional.cache_base import Cache, check_empty
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.mask_part import Count, MaskPart
from torch_ref.functional.mask_parts import Causal, Lengths, Segments
from torch_ref.functional.masks import Mask
from torch_ref.functional.shapes import RowLengths


@dataclass(frozen=True)
class DeltaCache(Cache):
    """What a recurrent attention keeps of the tokens so far, of one size for any number of tokens.

    There is no capacity, and so no token that does not fit: a row is
    `invalid` after a length outside `0 ... t` alone.

    Shapes:
        All without b for one sequence.

    Example:
        >>> cache = DeltaCache.zeros(2, 4, num_heads=3, head_dim=6, value_dim=5)
        >>> cache.state.shape, cache.value.shape, cache.length.tolist()
        (torch.Size([2, 3, 5, 6]), torch.Size([2, 3, 15]), [0, 0])
    """

    query: Float[Tensor, "*b before kh"]
    key: Float[Tensor, "*b before kh"]
    value: Float[Tensor, "*b before nv"]
    state: Float[Tensor, "*b n v h"]
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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> DeltaCache:
        """Return an empty cache for inputs of `dtype`.

        b None is one sequence without a batch axis.
        """
        shapes = DeltaCache.shapes(
            b, kernel_size, num_heads, head_dim, value_dim=value_dim, num_key_heads=num_key_heads
        )
        check_empty(b, dtype)
        # A state is a sum over all tokens before.
        wide = accumulation_dtype(dtype)
        batch = () if b is None else (b,)
        return DeltaCache(
            query=torch.zeros(shapes["query"], dtype=dtype, device=device),
            key=torch.zeros(shapes["key"], dtype=dtype, device=device),
            value=torch.zeros(shapes["value"], dtype=dtype, device=device),
            state=torch.zeros(shapes["state"], dtype=wide, device=device),
            length=torch.zeros(batch, dtype=torch.long, device=device),
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
        return tuple(self.state.shape[:-3])


def documents_of(
    mask: Mask, positions: Integer[Tensor, "b t"], lengths: RowLengths
) -> tuple[Bool[Tensor, "b t"] | None, RowLengths]:
    """Read from a mask where documents begin among tokens, and how many tokens are real.

    Segments are documents one after another: an id that comes back begins another document.

    Example:
        >>> mask = Mask.segments(torch.tensor([[4, 4, 7, 7]])) & Mask.lengths(key=torch.tensor([3]))
        >>> starts, lengths = documents_of(mask, torch.arange(4)[None], None)
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


def _begins(segments: Segments, positions: Tensor) -> Tensor:
    """Return which tokens are the first of their segments."""
    ids = torch.atleast_2d(segments.query).to(positions.device)
    # The first token of a sequence finds an empty state in any case.
    differs = ids[:, 1:] != ids[:, :-1]
    begins = functional.pad(differs, (1, 0))
    begins = begins.expand(len(positions), -1)
    return begins.gather(1, positions.clamp(0, ids.shape[1] - 1))


def _fewer(lengths: RowLengths, count: Count, positions: Tensor) -> Tensor:
    """Return how many of the tokens that are real stand before the `count` of their sequence."""
    b, t = positions.shape
    counts = torch.as_tensor(count, device=positions.device).expand(b)
    inside = positions < counts[:, None]
    lengths = torch.as_tensor(t if lengths is None else lengths, device=positions.device)
    return torch.minimum(inside.sum(dim=1), lengths)
