"""The next token from its logits: greedy, or drawn by temperature, top-k and top-p."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.checks import check_number, check_positive
from torch_ref.functional.dropout import threefry_2x32
from torch_ref.functional.dtypes import accumulation_dtype

_SMALLEST = 2.0**-126  # the smallest normal number of float32


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

        softmax(logits / temperature)

    It is taken over the top_k most likely tokens, and over the fewest of these that reach top_p.

    Args:
        temperature: divisor of the logits. 0 is greedy, the most likely token, and so is less than
            the smallest normal number of float32; 1 draws from the model's own distribution.
        top_k: number of most likely tokens that may be drawn; None is all.
        top_p: smallest total probability of the tokens that may be drawn, in (0, 1]; None is all.

    Raises:
        ValueError: if a number lies outside its range, or if `top_k` or `top_p` is given to greedy
            decoding.

    Example:
        >>> Sampling(0.8, top_k=50).top_k
        50

    References:
        Fan et al. 2018, top-k (arXiv:1805.04833); Holtzman et al. 2019, top-p (arXiv:1904.09751).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        check_number(temperature=self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be at least 0, and finite; got {self.temperature}. For greedy"
                " pass 0"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "temperature=0 takes the most likely token, and top_k and top_p choose among"
                f" several; got top_k={self.top_k}, top_p={self.top_p}. Leave them out or pass a"
                " temperature, such as 1.0"
            )
        if self.top_k is not None:
            check_positive(top_k=self.top_k)
        if self.top_p is not None:
            check_number(top_p=self.top_p)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is a probability in (0, 1]; got top_p={self.top_p}. For all tokens pass"
                " None"
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: no logits can be divided by so small a temperature."""
        return self.temperature < _SMALLEST


def keep_most_likely(logits: Float[Tensor, "b v"], sampling: Sampling) -> Float[Tensor, "b v"]:
    """Return `(logits - largest) / temperature`, and -inf where a token is not to be drawn.

    Ties of the last one stay.

    Example:
        >>> keep_most_likely(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), Sampling(1.0, top_p=0.6))
        tensor([[ 0.0000, -0.5108,    -inf]])
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    largest = logits.amax(dim=-1, keepdim=True)
    # Divided first, several could be infinite, and the most likely would be lost among them.
    logits = (logits - torch.where(largest.isfinite(), largest, 0)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = _from(logits, logits.topk(sampling.top_k).values[:, -1:])
    if sampling.top_p is not None:
        ordered = logits.sort(dim=-1, descending=True).values
        chances = ordered.softmax(dim=-1)
        inside = (
            chances.cumsum(dim=-1) - chances < sampling.top_p
        )  # the more likely ones have less together
        inside = inside | (
            torch.arange(inside.shape[-1]) == 0
        )  # a top_p below float32's numbers is 0
        logits = _from(logits, torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True))
    return logits


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
    if sampling.greedy:
        return logits.argmax(dim=-1)
    kept = keep_most_likely(logits, sampling)
    rows, words = (torch.arange(size) for size in logits.shape)
    own = threefry_2x32((key[0], key[1]), (torch.as_tensor(step), rows[:, None]))
    bits, _ = threefry_2x32(own, (words[None], torch.tensor(0)))
    uniform = ((bits >> 8).to(kept.dtype) + 0.5) / 2**24
    return (kept - torch.log(-torch.log(uniform))).argmax(dim=-1)


def _from(logits: Tensor, least: Tensor) -> Tensor:
    return torch.where(logits >= least, logits, -torch.inf)
