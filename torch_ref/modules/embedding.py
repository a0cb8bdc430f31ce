"""Embeddings: of tokens, and of positions where they are learned."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional

from attn_spec.checks import check_positive
from attn_spec.generation_checks import check_ids
from torch_ref.functional.dtypes import dtype_name
from torch_ref.functional.integers import clipped
from torch_ref.modules.typed import TypedModule


class Embedding(TypedModule, nn.Embedding):
    """A table of learned vectors: `weight[ids]`.

    The table is drawn from a standard normal distribution, as in `torch.nn.Embedding`. An id
    outside `0 ... size - 1` gives NaN: ids are not read on the host, so that a call does not wait
    for the device.

    Shapes:
        integers `(...)` to `(..., d_model)`; weight `(size, d_model)`.

    Example:
        >>> Embedding(5, 3)(torch.tensor([[0, 4]])).shape
        torch.Size([1, 2, 3])
    """

    def __init__(self, size: int, d_model: int):
        check_positive(size=size, d_model=d_model)
        super().__init__(size, d_model)

    def forward(self, ids: Integer[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        # A float that is rounded down would look up a row without a word.
        check_ids(dtype_name(ids.dtype))
        ids = clipped(ids, self.num_embeddings)
        # Where torch would raise on a CPU, and abort the process on a GPU, JAX gives NaN.
        inside = (ids >= 0) & (ids < self.num_embeddings)
        found = super().forward(torch.where(inside, ids, 0))
        return torch.where(inside[..., None], found, torch.nan)

    def attend(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape size"]:
        """Return `x @ weight^T`: the table as an output head, with tied weights."""
        return functional.linear(x, self.weight)
