"""The short convolution before a recurrent attention, over the last few tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from attn_spec.recurrent_checks import check_short_convolution
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.padding import batched, real_tokens, shape_of
from torch_ref.functional.shapes import ArrayLike


class Convolved(NamedTuple):
    """What a short convolution returns.

    Args:
        output: `(b, t, d)`, in the dtype of x.
        state: `(b, w - 1, d)`, the last inputs of each row; 0 where they belong to another
            document.
    """

    output: Float[Tensor, "*b t d"]
    state: Float[Tensor, "*b before d"]


def short_convolution(
    x: Float[Tensor, "*b t d"],
    kernel: Float[Tensor, "w d"],
    state: Float[Tensor, "*b before d"] | None = None,
    *,
    starts: Bool[Tensor, "*b t"] | None = None,
    lengths: ArrayLike | int | None = None,
) -> Convolved:
    """Return the causal depthwise convolution, and the inputs that the next tokens need.

        y_t = kernel_{w-1} * x_t + kernel_{w-2} * x_{t-1} + ... + kernel_0 * x_{t-w+1}

    Before the first token stand the inputs of `state`, or zeros.

    Args:
        x: `(b, t, d)`.
        kernel: `(w, d)`, the last row for the token itself.
        state: `(b, w - 1, d)`, the inputs before the first token; None is zeros.
        starts: `(b, t)`, True at the first token of a packed document: what stands before it counts
            as 0.
        lengths: how many tokens of each row are real, `(b,)`; the rest is padding, which counts as
            0. None is all.

    Shapes:
        All without b for one sequence.

    Raises:
        ValueError: if shapes do not belong together.

    Example:
        >>> x, kernel = torch.arange(4.0)[:, None], torch.tensor([[10.0], [1.0]])
        >>> short_convolution(x, kernel).output[:, 0]
        tensor([ 0.,  1., 12., 23.])

    References:
        Fu et al. 2022 (arXiv:2212.14052); Gu and Dao 2023 (arXiv:2312.00752).
    """
    check_short_convolution(tuple(x.shape), tuple(kernel.shape), shape_of(state), shape_of(starts))
    if x.ndim == 2:
        found = short_convolution(
            x[None], kernel, batched(state), starts=batched(starts), lengths=lengths
        )
        return Convolved(found.output[0], found.state[0])
    (b, t, d), w, dtype = x.shape, len(kernel), accumulation_dtype(x.dtype)
    real = real_tokens(b, t, lengths, x.device)
    starts = torch.zeros_like(real) if starts is None else starts & real
    before = (
        torch.zeros((b, w - 1, d), dtype=x.dtype, device=x.device)
        if state is None
        else state.to(x.dtype)
    )
    inputs = torch.cat([before, torch.where(real[..., None], x, 0)], dim=1)
    # The document of each input, counted from the one that the state belongs to.
    documents = functional.pad(starts.long().cumsum(dim=1), (w - 1, 0))
    output = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for i in range(w):
        same = documents[:, i : i + t] == documents[:, w - 1 :]
        seen = torch.where(same[..., None], inputs[:, i : i + t], 0).to(dtype)
        output = output + kernel[i].to(dtype) * seen
    last = real.sum(dim=1, keepdim=True) + torch.arange(w - 1, device=x.device)
    rows = torch.arange(b, device=x.device)[:, None]
    same = documents[rows, last] == documents[:, -1:]
    return Convolved(output.to(x.dtype), torch.where(same[..., None], inputs[rows, last], 0))
