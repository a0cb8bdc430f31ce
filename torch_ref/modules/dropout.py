"""Dropout as a module, with its rate and a source of keys."""

from torch import Tensor

from attn_spec.checks import check_rate, check_tokens
from torch_ref.functional.dropout import KeyedDropout, draw_key, drop, keep_grid
from torch_ref.functional.shapes import Tokens
from torch_ref.modules.typed import TypedModule


class Dropout(TypedModule):
    """Zero elements with probability `rate` and divide the rest by `1 - rate`.

    In eval mode, and at rate 0, it is the identity. It starts in train mode; `.train()` and
    `.eval()` switch it.

    Each call draws a new key from torch's generator, unless it is given one. The same key drops the
    same elements here and in `flax_attn`.

    Shapes:
        `(t, d)` or `(b, t, d)`, kept.

    Raises:
        ValueError: if `rate` lies outside [0, 1).

    Example:
        >>> import torch
        >>> Dropout(0.5)(torch.ones((2, 6)), dropout_key=torch.tensor([0, 0]))
        tensor([[2., 0., 2., 2., 0., 0.],
                [0., 2., 0., 2., 0., 0.]])
    """

    def __init__(self, rate: float):
        super().__init__()
        check_rate(rate)
        self.rate = rate

    def keyed(self, dropout_key: Tensor | None = None) -> KeyedDropout | None:
        """Return the dropout of this call, or None where nothing is dropped."""
        if not self.training or self.rate == 0:
            return None
        # Drawn from torch's generator, so that `torch.manual_seed` decides.
        return KeyedDropout(self.rate, draw_key() if dropout_key is None else dropout_key)

    def forward(self, x: Tokens, *, dropout_key: Tensor | None = None) -> Tokens:
        dropout = self.keyed(dropout_key)
        if dropout is None:
            return x
        check_tokens("x", x, "d", x.shape[-1], None)
        # The same places as of weights `(b, n, t, s)`: features stand for keys, and one head for n.
        *batch, t, d = x.shape
        b = batch[0] if batch else 1
        keep = keep_grid(dropout, (b, 1, t, d), x.device)
        return drop(x, keep.reshape(x.shape), self.rate)
