"""Names and parameters of ATen operations in plain notation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# The same numbers, in memory of their own.
SAME = {"clone", "contiguous", "detach", "alias", "lift_fresh", "lift"}
NAMES: dict[str, str] = {
    "mm": "dot",
    "bmm": "dot",
    "mv": "dot",
    "native_dropout": "dropout",
    "convolution": "conv",
    "convolution_overrideable": "conv",
    "cat": "concat",
    "permute": "transpose",
    "t": "transpose",
    "view": "reshape",
    "_unsafe_view": "reshape",
    "_reshape_alias": "reshape",
    "_to_copy": "cast",
    "to": "cast",
    "unsqueeze": "expand_dims",
    "expand": "broadcast",
    "select": "element",
    "split_with_sizes": "split",
    "unbind": "split",
    "unsafe_split": "split",
    "unsafe_split_with_sizes": "split",
    "constant_pad_nd": "pad",
    "linalg_vector_norm": "norm",
    "maximum": "max",
    "minimum": "min",
    "clamp_min": "max",
    "clamp_max": "min",
    "index_select": "gather",
    "embedding": "gather",
    "index": "gather",
    "logical_not": "not",
    "bitwise_not": "not",
    "bitwise_and": "and",
    "logical_and": "and",
    "bitwise_or": "or",
    "logical_or": "or",
    "arange": "iota",
}
# Arguments that say how and not what.
SETTINGS = {
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "implicit",
    "generator",
    "correction",
}
HIDDEN = {
    *SETTINGS,
    "keepdim",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
    "benchmark",
    "deterministic",
    "cudnn_enabled",
    "allow_tf32",
    "half_to_float",
}
# Operations that take all axes where none are given.
REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "all", "any")
# Operations that JAX describes by the shape of the result.
SHAPED = ("reshape", "broadcast", "iota", "zeros_like", "ones_like")


def name_of(func: Any) -> str:
    """Return the name of an operation in plain notation.

    Example:
        >>> name_of(torch.ops.aten.bmm.default), name_of(torch.ops.aten.add_.Tensor)
        ('dot', 'add')
    """
    name: str = func._schema.name.partition("::")[2]
    # Operations in place end in an underscore, private ones begin with one.
    plain = name if name.startswith("__") else name.rstrip("_")
    return NAMES.get(plain, plain.lstrip("_"))


def parameters_of(
    func: Any, args: tuple, kwargs: dict, operand: Any, result: Any
) -> dict[str, Any]:
    """Return what an operation depends on beside its operands, in the words of JAX.

    Args:
        func: ATen operation.
        args: its arguments by position.
        kwargs: its arguments by name.
        operand: first tensor that it is given; None if there is none.
        result: first tensor that it returns.
    """
    name = name_of(func)
    given = _settings(func, args, kwargs)
    rank = 0 if operand is None else operand.ndim
    if name == "transpose":
        return {"axes": _permutation(given, rank)}
    if name in SHAPED:
        return {"shape": tuple(result.shape)}
    if name == "cast":
        return {"dtype": _plain(result.dtype)}
    found = {}
    for key, value in given.items():
        if key in ("dim", "dims") and rank:
            axes = value if isinstance(value, tuple | list) else (value,)
            found["axes"] = _positive(axes, rank)
        else:
            found[key] = _plain(value)
    if name in REDUCTIONS:
        found.setdefault("axes", tuple(range(rank)))
    if name == "embedding_dense_backward":
        found |= _padding(args, kwargs)
    return found


def _padding(args: tuple, kwargs: dict) -> dict[str, int]:
    """Return the row of a table that has no gradient; nothing where each has one."""
    _, _, _, padding, *_ = (*args, *kwargs.values())
    return {"padding_idx": padding} if padding >= 0 else {}


def _permutation(given: dict[str, Any], rank: int) -> tuple[int, ...]:
    if "dims" in given:
        return _positive(given["dims"], rank)
    axes = list(range(rank))
    # `t` takes no axes.
    swapped = given.get("dim0", 0), given.get("dim1", -1)
    first, second = _positive(swapped, max(rank, 1))
    axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


def _positive(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return axes counted from the first."""
    return tuple(axis % rank for axis in axes)


def _settings(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments that are neither tensors nor numbers to compute with, by name."""
    found = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in HIDDEN or takes_number(argument):
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if value is not None and not _holds_tensors(value):
            found[argument.name] = value
    return found


def takes_number(argument: Any) -> bool:
    """Whether an operation computes with an argument that may be a number."""
    # A number is taken where a tensor is, too.
    return str(argument.type) in ("number", "Scalar", "Tensor")


def _holds_tensors(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(inner, torch.Tensor) for inner in values)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value
