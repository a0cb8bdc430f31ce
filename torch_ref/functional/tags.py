"""Names for intermediate values, so that a tool can observe them while a module runs.

Only in torch_ref: JAX has `checkpoint_name`.
"""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Return `x` under a name; the counterpart of `jax.ad_checkpoint.checkpoint_name`.

    Any `torch.overrides.TorchFunctionMode` sees the call, with the name among its arguments, and
    may return another tensor. Without one the call returns `x` itself.

    Example:
        >>> import torch
        >>> from torch.overrides import TorchFunctionMode
        >>> class Names(TorchFunctionMode):
        ...     def __torch_function__(self, func, types, args=(), kwargs=None):
        ...         if func is checkpoint_name:
        ...             print(args[1])
        ...         return func(*args, **(kwargs or {}))
        >>> x = torch.ones(2)
        >>> with Names():
        ...     y = checkpoint_name(x, "scores")
        scores
        >>> y is x
        True
    """
    if has_torch_function_unary(x):
        return handle_torch_function(checkpoint_name, (x,), x, name)
    return x
