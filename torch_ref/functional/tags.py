"""Names for intermediate values, so that they can be looked at from outside while a module runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_LISTENER: ContextVar[Callable[[Tensor, str], Tensor] | None] = ContextVar("listener", default=None)


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Return `x`, and say its name to whoever listens; the counterpart of `jax.ad_checkpoint.checkpoint_name`.

    Example:
        >>> import torch
        >>> checkpoint_name(torch.ones(2), "scores")
        tensor([1., 1.])
    """
    listener = _LISTENER.get()
    return x if listener is None else listener(x, name)


@contextmanager
def listening(listener: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """Hand every named value to `listener(value, name)`, and go on with what it returns.

    Example:
        >>> import torch
        >>> names = []
        >>> with listening(lambda x, name: names.append(name) or x):
        ...     _ = checkpoint_name(torch.ones(2), "scores")
        >>> names
        ['scores']
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
