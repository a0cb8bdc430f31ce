"""The gated delta rule: attention with a matrix as memory, which every token rewrites."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_spec.checks import check_dtype
from attn_spec.recurrent_checks import check_delta_rule
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.padding import batched, real_tokens, shape_of
from torch_ref.functional.shapes import RowLengths


class Recurrence(NamedTuple):
    """What a recurrent attention returns."""

    output: Float[Tensor, "*b t n v"]
    state: Float[Tensor, "*b n v h"]


def gated_delta_rule(
    query: Float[Tensor, "*b t k h"],
    key: Float[Tensor, "*b t k h"],
    value: Float[Tensor, "*b t n v"],
    decay: Float[Tensor, "*b t n"] | Float[Tensor, "*b t n h"],
    beta: Float[Tensor, "*b t n"] | None = None,
    *,
    state: Float[Tensor, "*b n v h"] | None = None,
    starts: Bool[Tensor, "*b t"] | None = None,
    lengths: RowLengths = None,
    scale: float | None = None,
) -> Recurrence:
    """Return what every token reads from the state, and the state after the last one.

        S_t = S_{t-1} diag(exp(decay_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
        o_t = scale * S_t q_t

    The state is decayed, what it holds under the key is replaced by the value to the part `beta`,
    then the query reads. Without `beta` nothing is replaced: `S_t = S_{t-1} diag(exp(decay_t)) +
    v_t k_t^T`, as in lightning attention.

    The formula, token by token. Sums are taken in at least float32.

    Shapes:
        All without b for one sequence.

    Example:
        >>> q = k = torch.ones((2, 5, 1, 4)) / 2
        >>> v, decay = torch.ones((2, 5, 3, 6)), torch.full((2, 5, 3), -0.1)
        >>> beta = torch.full((2, 5, 3), 0.5)
        >>> output, state = gated_delta_rule(q, k, v, decay, beta)
        >>> output.shape, state.shape
        (torch.Size([2, 5, 3, 6]), torch.Size([2, 3, 6, 4]))
    """
    given = [x for x in (query, key, value, decay, beta, state) if x is not None]
    check_dtype("all but starts", *given)
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape), tuple(decay.shape)
    check_delta_rule(*shapes, shape_of(beta), shape_of(state), shape_of(starts))
    if query.ndim == 3:
        found = gated_delta_rule(
            query[None],
            key[None],
            value[None],
            decay[None],
            batched(beta),
            state=batched(state),
            starts=batched(starts),
            lengths=lengths,
            scale=scale,
        )
        return Recurrence(found.output[0], found.state[0])
    dtype = accumulation_dtype(query.dtype)
    b, t, n, v = value.shape
    k, h = key.shape[2:]
    factor: float = h**-0.5 if scale is None else scale
    real = real_tokens(b, t, lengths, query.device)
    # Padding begins no document.
    starts = torch.zeros_like(real) if starts is None else starts & real
    # One decay may serve all features of a key.
    if decay.ndim == 3:
        decay = decay[..., None]
    if state is None:
        state = torch.zeros((b, n, v, h), device=query.device)

    def steps(x: Tensor, groups: int = 1) -> tuple[Tensor, ...]:
        """Hide padding: it adds nothing, under no key, and lets all of the state remain."""
        hidden = torch.where(real[..., None, None], x, 0)
        # The gradient of an index is as large as the whole; that of `unbind` is one `stack`.
        return hidden.to(dtype).repeat_interleave(groups, dim=2).unbind(1)

    queries = steps(query, n // k)
    keys = steps(key, n // k)
    values = steps(value)
    decays = steps(decay)
    betas = None if beta is None else steps(beta[..., None])
    fresh = starts[..., None, None, None].unbind(1)
    now = state.to(dtype)
    outputs = []
    for i in range(t):
        # A token that begins a document finds an empty state.
        kept = torch.where(fresh[i], 0, now)
        now = kept * decays[i][:, :, None].exp()
        new = values[i]
        if betas is not None:
            held = torch.einsum("bnvh,bnh->bnv", now, keys[i])
            new = betas[i] * (new - held)
        now = now + torch.einsum("bnv,bnh->bnvh", new, keys[i])
        read = torch.einsum("bnvh,bnh->bnv", now, queries[i])
        outputs.append(factor * read)
    output = torch.stack(outputs, dim=1)
    return Recurrence(output.to(value.dtype), now)
