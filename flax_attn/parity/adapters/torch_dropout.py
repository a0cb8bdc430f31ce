"""Train mode of PyTorch without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
)


class WithoutDropout(TorchFunctionMode):
    """A context in which the functions of dropout drop nothing, those of attention too.

    Example:
        >>> import torch
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
        if func is functional.scaled_dot_product_attention:
            # The fifth argument, or by its name.
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            options.pop("dropout_p", None)
        return func(*args, **options)
