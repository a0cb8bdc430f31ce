"""The kinds of layers, as data: the role of each attribute, and its axes in each framework.

Axes: `i` input and `o` output channels, `...` any others. A parameter whose axes are named alike on
both sides is the same parameter, whatever their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax_attn.convert.match.tree import PARAMETER, Branch, Layer, Part, Tensor


class Kind(NamedTuple):
    """A kind of layer in one framework.

    Args:
        name: name of the kind, the same in all frameworks.
        roles: role and axes of each attribute.
        merged: axes of the layer that consist of several axes of the parameter.
    """

    name: str
    roles: Mapping[str, tuple[str, str]]
    merged: Mapping[str, str] = {}


def _norm(name: str, weight: str = "weight", bias: str = "bias", *statistics: str) -> Kind:
    roles = {weight: ("weight", "..."), bias: ("bias", "...")}
    return Kind(
        name, roles | {n: (r, "...") for n, r in zip(statistics, ("mean", "var"), strict=False)}
    )


_AFFINE = {"weight": ("weight", "o i"), "bias": ("bias", "o")}
_CONV = {"weight": ("weight", "o i ..."), "bias": ("bias", "o")}
_EMBEDDING = {"weight": ("weight", "v d")}
_LINEAR = Kind("Linear", {"kernel": ("weight", "i o"), "bias": ("bias", "o")})
_FLAX_CONV = Kind("Conv", {"kernel": ("weight", "... i o"), "bias": ("bias", "o")})
_FLAX_EMBED = Kind("Embedding", {"embedding": ("weight", "v d")})
_TO_HEADS = Kind("Linear", {"kernel": ("weight", "i n h"), "bias": ("bias", "n h")}, {"o": "(n h)"})
_FROM_HEADS = Kind("Linear", {"kernel": ("weight", "n h o"), "bias": ("bias", "o")}, {"i": "(n h)"})


def _linear_general(module: Any) -> Kind | None:
    """Return the kind of a LinearGeneral: the inputs come first in its kernel, then the outputs."""
    if module.batch_axis:
        return None
    inputs, outputs = len(module.in_features), len(module.out_features)
    before = ["n", "h"] if inputs == 2 else [f"i{n}" for n in range(inputs)]
    after = ["n", "h"] if outputs == 2 and inputs != 2 else [f"o{n}" for n in range(outputs)]
    return _contraction(before + after, before, after)


def _einsum(module: Any) -> Kind | None:
    """Return the kind of an Einsum that is a linear layer, or None.

    In a linear layer each axis of the kernel belongs to the input or the output.
    """
    operands, _, output = module.einsum_str.replace(" ", "").partition("->")
    data, _, kernel = operands.partition(",")
    sizes = dict(zip(kernel, module.kernel_shape, strict=False))
    inputs, outputs = [a for a in data if a in sizes], [a for a in output if a in sizes]
    bias = getattr(module, "bias_shape", None)
    if sorted(inputs + outputs) != sorted(kernel) or (
        bias and list(bias) != [sizes[a] for a in outputs]
    ):
        return None
    return _contraction(*([f"axis{a}" for a in axes] for axes in (kernel, inputs, outputs)))


def _contraction(kernel: list[str], inputs: list[str], outputs: list[str]) -> Kind:
    """Return a linear layer from the axes of its kernel, in parentheses if a side has several."""
    for letter, names in (("i", inputs), ("o", outputs)):
        if len(names) == 1:
            kernel = [letter if axis == names[0] else axis for axis in kernel]
    several = {axis: names for axis, names in (("i", inputs), ("o", outputs)) if len(names) != 1}
    bias = " ".join(several.get("o", ["o"]))
    roles = {"kernel": ("weight", " ".join(kernel)), "bias": ("bias", bias)}
    return Kind("Linear", roles, {axis: f"({' '.join(names)})" for axis, names in several.items()})


def _conv_transpose(module: Any) -> Kind | None:
    """Return the kind of a transposed convolution; None if its kernel would have to be flipped."""
    if not module.transpose_kernel:
        return None
    return Kind("ConvTranspose", {"kernel": ("weight", "... o i"), "bias": ("bias", "o")})


# By package and class; a subclass is of the kind of its base.
KINDS: dict[tuple[str, str], Kind | Callable[[Any], Kind | None]] = {
    ("torch", "Linear"): Kind("Linear", _AFFINE),
    ("transformers", "Conv1D"): Kind(
        "Linear", {"weight": ("weight", "i o"), "bias": ("bias", "o")}
    ),
    **{("torch", f"Conv{n}d"): Kind("Conv", _CONV) for n in (1, 2, 3)},
    **{
        ("torch", f"ConvTranspose{n}d"): Kind(
            "ConvTranspose", {"weight": ("weight", "i o ..."), "bias": ("bias", "o")}
        )
        for n in (1, 2, 3)
    },
    ("torch", "Embedding"): Kind("Embedding", _EMBEDDING),
    ("torch", "LayerNorm"): _norm("LayerNorm"),
    ("torch", "RMSNorm"): _norm("RMSNorm"),
    ("torch", "GroupNorm"): _norm("GroupNorm"),
    ("torch", "_BatchNorm"): _norm("BatchNorm", "weight", "bias", "running_mean", "running_var"),
    ("flax", "Linear"): _LINEAR,
    ("flax", "LinearGeneral"): _linear_general,
    ("flax", "Einsum"): _einsum,
    ("flax", "Conv"): _FLAX_CONV,
    ("flax", "ConvTranspose"): _conv_transpose,
    ("flax", "Embed"): _FLAX_EMBED,
    ("flax", "LayerNorm"): _norm("LayerNorm", "scale"),
    ("flax", "RMSNorm"): _norm("RMSNorm", "scale"),
    ("flax", "GroupNorm"): _norm("GroupNorm", "scale"),
    ("flax", "BatchNorm"): _norm("BatchNorm", "scale", "bias", "mean", "var"),
    ("equinox", "Linear"): Kind("Linear", _AFFINE),
    ("equinox", "Conv"): Kind(
        "Conv", {"weight": ("weight", "o i ..."), "bias": ("bias", "o 1...")}
    ),
    ("equinox", "Embedding"): Kind("Embedding", _EMBEDDING),
    ("equinox", "LayerNorm"): _norm("LayerNorm"),
    ("equinox", "RMSNorm"): _norm("RMSNorm"),
    ("equinox", "GroupNorm"): _norm("GroupNorm"),
    ("equinox", "BatchNorm"): _norm("BatchNorm"),
}
# Layers of a framework whose parameters are pieced together in a way that no table above says.
UNKNOWN = {
    ("torch", "RNNBase"), ("torch", "RNNCellBase"), ("torch", "Bilinear"),
    ("flax", "LinearGeneral"), ("flax", "Einsum"), ("flax", "ConvTranspose"),
    ("equinox", "ConvTranspose"), ("equinox", "GRUCell"), ("equinox", "LSTMCell"),
}  # fmt: skip
_SCALES, _SHIFTS = {"scale", "weight", "gamma"}, {"bias", "shift", "beta"}


def class_names(module: object) -> list[tuple[str, str]]:
    """Return the package and name of the class of a module and of its bases."""
    return [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__]


def own_layers(branch: Branch, path: tuple[str, ...], heads: bool = False) -> list[Layer]:
    """Return what a module's own tensors are: one layer of a known kind, or a parameter each.

    Args:
        branch: the module.
        path: path of the module, as attributes from the root.
        heads: whether the module is a projection of a Linen attention layer.
    """
    if branch.module is None:
        kind = _kind_by_parameters(branch.tensors, path, heads)
    else:
        kind = _kind_by_class(branch.module) or _kind_of_own_class(branch)
    layers, rest = [], dict(branch.tensors)
    if kind is not None:
        parts = {
            role: _part(rest.pop(name), axes, kind)
            for name, (role, axes) in kind.roles.items()
            if name in rest
        }
        stacked = any(part is None for part in parts.values())
        if stacked:
            return [
                _single(name, t, path, f"stacked {kind.name}") for name, t in branch.tensors.items()
            ]
        layers = [
            Layer(kind.name, path, {role: part for role, part in parts.items() if part is not None})
        ]
    unknown = (
        branch.module is not None
        and kind is None
        and UNKNOWN.intersection(class_names(branch.module))
    )
    name = type(branch.module).__name__ if unknown else PARAMETER
    return [layer for layer in layers if layer.parts] + [
        _single(n, t, path, name) for n, t in rest.items()
    ]


def _kind_by_class(module: object) -> Kind | None:
    found = next((KINDS[name] for name in class_names(module) if name in KINDS), None)
    return found if found is None or isinstance(found, Kind) else found(module)


def _kind_of_own_class(branch: Branch) -> Kind | None:
    """Return the kind of a user's own norm or embedding, from its class name and parameters.

    A scale and a shift of one length are those of a norm, whatever its name; a scale alone may be
    another layer's.
    """
    names, own = set(branch.tensors), type(branch.module).__name__
    flat = all(len(tensor.shape) == 1 for tensor in branch.tensors.values())
    both = len(names) == 2 and len({tensor.shape for tensor in branch.tensors.values()}) == 1
    if (
        flat
        and not branch.branches
        and _is_norm(names)
        and (both or re.search("Norm|^RMS|^LN", own))
    ):
        return _named_norm(names)
    if own.startswith("Embed") and len(names) == 1 and names <= {"embedding", "weight"}:
        return Kind("Embedding", {min(names): ("weight", "v d")})
    return None


def _is_norm(names: set[str]) -> bool:
    return len(names & _SCALES) == 1 and len(names - _SCALES) <= 1 and names - _SCALES <= _SHIFTS


def _named_norm(names: set[str]) -> Kind:
    return Kind("Norm", {name: ("weight" if name in _SCALES else "bias", "...") for name in names})


def _kind_by_parameters(
    tensors: Mapping[str, Tensor], path: tuple[str, ...], heads: bool
) -> Kind | None:
    """Return the kind of a module of Linen, from the names and ranks of its parameters alone."""
    names, kernel, bias = set(tensors), tensors.get("kernel"), tensors.get("bias")
    if kernel is not None and names <= {"kernel", "bias"}:
        if len(kernel.shape) == 3 and (heads or (bias is not None and len(bias.shape) == 2)):
            return _FROM_HEADS if heads and path[-1] == "out" else _TO_HEADS
        return _LINEAR if len(kernel.shape) == 2 else _FLAX_CONV
    if names == {"embedding"}:
        return _FLAX_EMBED
    if {"mean", "var"} <= names <= {"mean", "var", "scale", "bias"}:
        return _norm("BatchNorm", "scale", "bias", "mean", "var")
    return _named_norm(names) if path and "scale" in names and names <= {"scale", "bias"} else None


def _part(tensor: Tensor, axes: str, kind: Kind) -> Part | None:
    """Return a tensor in a role, or None if it has other axes."""
    known = [axis for axis in axes.split() if "..." not in axis]
    others = len(tensor.shape) - len(known)
    if others < 0 or (others > 0 and "..." not in axes):
        return None
    named = " ".join(f"s{n}" for n in range(others))
    written = axes.replace("1...", " ".join("1" * others)).replace("...", named)
    merged = {
        axis: names
        for axis, names in kind.merged.items()
        if set(names.strip("()").split()) <= set(axes.split())
    }
    return Part(tensor, " ".join(written.split()), merged)


def _single(name: str, tensor: Tensor, path: tuple[str, ...], kind: str) -> Layer:
    """Return a parameter of its own; axes of size 1 do not count."""
    rank = iter(range(len(tensor.shape)))
    axes = " ".join("1" if size == 1 else f"s{next(rank)}" for size in tensor.shape)
    return Layer(kind, (*path, name), {"value": Part(tensor, axes)})
