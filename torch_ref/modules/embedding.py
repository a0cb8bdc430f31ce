"""Embeddings: of tokens, and of positions where they are learned."""

from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional

from torch_ref.functional.checks import check_ids, check_positive


class Embedding(nn.Embedding):
    """A table of learned vectors: `weight[ids]`: `torch.nn.Embedding`, which draws from a standard normal.

    Args:
        size: how many vectors there are.
        d_model: width of a vector.

    Shapes:
        integers `(...)` to `(..., d_model)`; weight `(size, d_model)`.

    Raises:
        ValueError: if a size is not positive, or if an id is not an integer in `0 ... size - 1`.

    Example:
        >>> import torch
        >>> Embedding(5, 3)(torch.tensor([[0, 4]])).shape
        torch.Size([1, 2, 3])
    """

    def __init__(self, size: int, d_model: int):
        check_positive(size=size, d_model=d_model)
        super().__init__(size, d_model)

    def forward(self, ids: Integer[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        ends = None if ids.is_meta or not ids.numel() else (int(ids.min()), int(ids.max()))
        check_ids(str(ids.dtype).removeprefix("torch."), ends, self.num_embeddings)
        return super().forward(ids)

    def attend(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape size"]:
        """Return `x @ weight^T`: the table as an output head, with weights tied to those of the input."""
        return functional.linear(x, self.weight)
