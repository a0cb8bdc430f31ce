"""How the next token is taken from its logits: greedy, or by temperature, top-k and top-p."""

from dataclasses import dataclass

from attn_spec.checks import check_number, check_positive

# The smallest normal number of float32: no logits can be divided by less.
_SMALLEST = 2.0**-126


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
        # They would be ignored silently.
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
