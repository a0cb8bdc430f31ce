"""Train mode of PyTorch without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# The functions that drop in train mode. Each returns its first argument where it drops nothing.
DROPPING = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
# Those that drop among other things. What one of them calls is not seen here. The probability is
# the only float that they take by position.
CONTAINING = (
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
)
PROBABILITY = {"dropout_p", "dropout"}


class WithoutDropout(TorchFunctionMode):
    """A context in which the functions of dropout drop nothing, those of attention too.

    Example:
        >>> with WithoutDropout():
        ...     torch.nn.functional.dropout(torch.ones(2), 0.5)
        tensor([1., 1.])
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or leave out what it drops."""
        options = dict(kwargs or {})
        if func in DROPPING:
            return args[0] if args else options["input"]
        if func in CONTAINING:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
            given = options.keys() & PROBABILITY
            options.update(dict.fromkeys(given, 0.0))
        return func(*args, **options)
