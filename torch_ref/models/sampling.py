"""The next token from its logits: greedy, or drawn by temperature, top-k and top-p."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.sampling import Sampling
from torch_ref.functional.dropout import threefry_2x32
from torch_ref.functional.dtypes import accumulation_dtype


def keep_most_likely(logits: Float[Tensor, "b v"], sampling: Sampling) -> Float[Tensor, "b v"]:
    """Return `(logits - largest) / temperature`, and -inf where a token is not to be drawn.

    Ties of the last one stay.

    Example:
        >>> keep_most_likely(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), Sampling(1.0, top_p=0.6))
        tensor([[ 0.0000, -0.5108,    -inf]])
    """
    logits = _scaled(logits, sampling.temperature)
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k is not None and top_k < logits.shape[-1]:
        largest = logits.topk(top_k).values
        logits = _from(logits, largest[:, -1:])
    # Chances are those among the words that top-k leaves.
    if top_p is not None:
        least = _least_inside(logits, top_p)
        logits = _from(logits, least)
    return logits


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return `(logits - largest) / temperature`, in at least float32."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    # Only differences count, and those of the likely words stay exact.
    largest = logits.amax(dim=-1, keepdim=True)
    # Infinity less itself is no number.
    finite = torch.where(largest.isfinite(), largest, 0)
    # Divided first, several could be infinite, and the most likely would be lost among them.
    return (logits - finite) / temperature


def _least_inside(logits: Tensor, top_p: float) -> Tensor:
    """Return the least logit of each row whose more likely ones have a chance below `top_p`."""
    ordered = logits.sort(dim=-1, descending=True).values
    chances = ordered.softmax(dim=-1)
    # The most likely first: what stands before a word has at least its chance.
    before = chances.cumsum(dim=-1) - chances
    inside = before < top_p
    # The first always, as a `top_p` below the numbers of float32 is 0.
    inside[:, 0] = True
    kept = torch.where(inside, ordered, torch.inf)
    return kept.amin(dim=-1, keepdim=True)


def sample(
    logits: Float[Tensor, "b v"],
    sampling: Sampling,
    key: Integer[Tensor, "2"],
    step: Integer[Tensor, ""] | int,
) -> Integer[Tensor, " b"]:
    """Return a token for every row, decided by (key, step, row) alone: the same in both frameworks.

    Drawn with Gumbel noise: `argmax(logits / temperature - log(-log(u)))`.

    Example:
        >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(), torch.tensor([0, 0]), 0)
        tensor([1])
    """
    # No number is drawn: the seed has no say.
    if sampling.greedy:
        return logits.argmax(dim=-1)
    kept = keep_most_likely(logits, sampling)
    bits = _bits(logits.shape, key, step) >> 8
    # Half a step from 0 and from 1, whose logarithms are no numbers.
    uniform = (bits.to(kept.dtype) + 0.5) / 2**24
    gumbel = -torch.log(-torch.log(uniform))
    return (kept + gumbel).argmax(dim=-1)


def _bits(shape: tuple[int, ...], key: Tensor, step: Tensor | int) -> Tensor:
    """Return random bits that depend on the key, the step, the row and the word alone."""
    b, v = shape
    rows = torch.arange(b)[:, None]
    words = torch.arange(v)[None]
    # Each row has a key of its own, so that a row does not depend on the others.
    row_keys = threefry_2x32((key[0], key[1]), (torch.as_tensor(step), rows))
    bits, _ = threefry_2x32(row_keys, (words, torch.tensor(0)))
    return bits


def _from(logits: Tensor, least: Tensor) -> Tensor:
    # Words as likely as the least one are kept as well, on both sides.
    return torch.where(logits >= least, logits, -torch.inf)
