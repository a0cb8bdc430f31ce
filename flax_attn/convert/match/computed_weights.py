"""What PyTorch computes a weight from: by weight norm, spectral norm or another function."""

import re
from collections.abc import Iterator
from typing import Any

from flax_attn.convert.match.kinds import class_names

# How PyTorch's older functions call what the newer ones keep in a module inside.
_OLDER = {"original": "", "original0": "_g", "original1": "_v", "0._u": "_u", "0._v": "_v"}
_NEWER = re.compile(r"\bparametrizations\.(\w+)\.(original[01]?|0\._[uv])$")
# What has the shape of the weight itself.
_OF_ITS_SHAPE = {"weight_v", "weight_orig"}


def in_older_names(name: str) -> str:
    """Return a name, as PyTorch's older functions have it for what a weight is computed from.

    Example:
        >>> in_older_names("up.parametrizations.weight.original0"), in_older_names("up.bias")
        ('up.weight_g', 'up.bias')
    """
    found = _NEWER.search(name)
    if not found:
        return name
    weight, original = found.groups()
    return f"{name[: found.start()]}{weight}{_OLDER[original]}"


def role_of(name: str) -> str:
    """Return the attribute that has the place of a parameter in its layer.

    Example:
        >>> role_of("weight_v"), role_of("weight_g"), role_of("bias")
        ('weight', 'weight_g', 'bias')
    """
    return "weight" if name in _OF_ITS_SHAPE else name


def weight_functions(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each module inside that computes a weight by a known function, and it."""
    inside = dict(module.named_children()).get("parametrizations")
    if inside is None:
        return
    for name, functions in inside.named_children():
        if _is_known(functions):
            yield f"parametrizations.{name}", functions


def _is_known(functions: Any) -> bool:
    """Whether it is known what a weight is computed from: of several tensors by weight norm."""
    # A module of the user's own may have this name as well.
    if ("torch", "ParametrizationList") not in class_names(functions):
        return False
    is_weight_norm = ("torch", "_WeightNorm") in class_names(functions[0])
    return is_weight_norm or "original" in functions._parameters
