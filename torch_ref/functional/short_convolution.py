"""The short convolution before a recurrent attention, over the last few tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from attn_spec.recurrent_checks import check_short_convolution
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.padding import batched, real_tokens, shape_of
from torch_ref.functional.shapes import RowLengths


class Convolved(NamedTuple):
    """What a short convolution returns."""

    output: Float[Tensor, "*b t d"]
    state: Float[Tensor, "*b before d"]


def short_convolution(
    x: Float[Tensor, "*b t d"],
    kernel: Float[Tensor, "w d"],
    state: Float[Tensor, "*b before d"] | None = None,
    *,
    starts: Bool[Tensor, "*b t"] | None = None,
    lengths: RowLengths = None,
) -> Convolved:
    """Return the causal depthwise convolution, and the inputs that the next tokens need.

        y_t = kernel_{w-1} * x_t + kernel_{w-2} * x_{t-1} + ... + kernel_0 * x_{t-w+1}

    Before the first token stand the inputs of `state`, or zeros.

    Shapes:
        All without b for one sequence.

    Example:
        >>> x, kernel = torch.arange(4.0)[:, None], torch.tensor([[10.0], [1.0]])
        >>> short_convolution(x, kernel).output[:, 0]
        tensor([ 0.,  1., 12., 23.])
    """
    # Before anything is computed: shapes that do not fit would broadcast.
    check_short_convolution(tuple(x.shape), tuple(kernel.shape), shape_of(state), shape_of(starts))
    if x.ndim == 2:
        found = short_convolution(
            x[None], kernel, batched(state), starts=batched(starts), lengths=lengths
        )
        return Convolved(found.output[0], found.state[0])
    b, t, d = x.shape
    before = len(kernel) - 1
    real = real_tokens(b, t, lengths, x.device)
    # Padding begins no document.
    starts = torch.zeros_like(real) if starts is None else starts & real
    if state is None:
        state = torch.zeros((b, before, d), device=x.device)
    # Padding may hold anything, also NaN, which a weight of 0 would let through.
    tokens = torch.where(real[..., None], x, 0)
    inputs = torch.cat([state.to(x.dtype), tokens], dim=1)
    # The document of each input, counted from the one that the state belongs to.
    documents = functional.pad(starts.long().cumsum(dim=1), (before, 0))
    # In float32 for lower dtypes: each input is added to the sum.
    output = _weighted_sums(inputs, documents, kernel.to(accumulation_dtype(x.dtype)))
    return Convolved(output.to(x.dtype), _last_inputs(inputs, documents, real, before))


def _weighted_sums(inputs: Tensor, documents: Tensor, kernel: Tensor) -> Tensor:
    """Return the sums over the inputs of the same document, in the dtype of the kernel."""
    own = documents[:, len(kernel) - 1 :]
    output = kernel.new_zeros((*own.shape, kernel.shape[1]))
    for i in range(len(kernel)):
        seen = _seen(inputs, documents, own, i)
        output = output + kernel[i] * seen.to(kernel.dtype)
    return output


def _seen(inputs: Tensor, documents: Tensor, own: Tensor, i: int) -> Tensor:
    """Return input i of those that each token sees: 0 where another document has it."""
    window = slice(i, i + own.shape[1])
    same = documents[:, window] == own
    return torch.where(same[..., None], inputs[:, window], 0)


def _last_inputs(inputs: Tensor, documents: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the last inputs of each row; 0 where they belong to another document."""
    rows = torch.arange(len(inputs), device=inputs.device)[:, None]
    # Before the tokens stand as many inputs of the state: the last ones of n begin at n.
    tokens = real.sum(dim=1, keepdim=True)
    last = tokens + torch.arange(count, device=inputs.device)
    same = documents[rows, last] == documents[:, -1:]
    return torch.where(same[..., None], inputs[rows, last], 0)
