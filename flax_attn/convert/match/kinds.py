"""The kinds of layers, as data: the role of each attribute, and its axes in each framework.

Axes: `i` input and `o` output channels, `...` any others. A parameter whose axes are named alike on
both sides is the same parameter, whatever their order.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flax_attn.convert.match.tree import PARAMETER, STACKED, Branch, Layer, Tensor, TensorPart
from flax_attn.convert.rules import Shape


class Kind(NamedTuple):
    """A kind of layer in one framework.

    Args:
        name: name of the kind, the same in all frameworks.
        roles: role and axes of each attribute.
        merged: axes of the layer that consist of several axes of the parameter.
        is_flipped: whether PyTorch has the axes of space from the other end.
    """

    name: str
    roles: Mapping[str, tuple[str, str]]
    merged: Mapping[str, str] = {}
    is_flipped: bool = False


def _norm(name: str, weight: str = "weight", bias: str = "bias", *statistics: str) -> Kind:
    roles = {weight: ("weight", "..."), bias: ("bias", "...")}
    for attribute, role in zip(statistics, ("mean", "var"), strict=False):
        roles[attribute] = (role, "...")
    return Kind(name, roles)


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
    inputs = _numbered("i", len(module.in_features))
    outputs = _numbered("o", len(module.out_features))
    # Two axes on one side are heads, and named as in the other layers that have heads.
    heads = ["n", "h"]
    if len(inputs) == 2:
        inputs = heads
    elif len(outputs) == 2:
        outputs = heads
    axes = inputs + outputs
    return _contraction(axes, inputs, outputs)


def _numbered(letter: str, count: int) -> list[str]:
    return [f"{letter}{n}" for n in range(count)]


def _einsum(module: Any) -> Kind | None:
    """Return the kind of an Einsum that is a linear layer, or None.

    In a linear layer each axis of the kernel belongs to the input or the output.
    """
    operands, _, output = module.einsum_str.replace(" ", "").partition("->")
    data, _, kernel = operands.partition(",")
    inputs = [axis for axis in data if axis in kernel]
    outputs = [axis for axis in output if axis in kernel]
    if sorted(inputs + outputs) != sorted(kernel):
        return None
    sizes = dict(zip(kernel, module.kernel_shape, strict=True))
    bias = getattr(module, "bias_shape", None)
    if bias and list(bias) != [sizes[axis] for axis in outputs]:
        return None
    return _contraction(_axis_names(kernel), _axis_names(inputs), _axis_names(outputs))


def _axis_names(letters: Iterable[str]) -> list[str]:
    # Longer names: a letter of an equation must not be taken for an axis of the layer itself.
    return [f"axis{letter}" for letter in letters]


def _contraction(kernel: list[str], inputs: list[str], outputs: list[str]) -> Kind:
    """Return a linear layer from the axes of its kernel, in parentheses if a side has several."""
    sides = {"i": inputs, "o": outputs}
    alone = {names[0]: letter for letter, names in sides.items() if len(names) == 1}
    merged = {letter: f"({' '.join(names)})" for letter, names in sides.items() if len(names) != 1}
    weight = " ".join(alone.get(axis, axis) for axis in kernel)
    bias = " ".join(alone.get(axis, axis) for axis in outputs)
    return Kind("Linear", {"kernel": ("weight", weight), "bias": ("bias", bias)}, merged)


def _conv_transpose(module: Any) -> Kind:
    """Return the kind of a transposed convolution."""
    axes = "... o i" if module.transpose_kernel else "... i o"
    roles = {"kernel": ("weight", axes), "bias": ("bias", "o")}
    return Kind("ConvTranspose", roles, is_flipped=not module.transpose_kernel)


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
    ("equinox", "ConvTranspose"): Kind(
        "ConvTranspose",
        {"weight": ("weight", "o i ..."), "bias": ("bias", "o 1...")},
        is_flipped=True,
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
    ("flax", "LinearGeneral"), ("flax", "Einsum"),
    ("equinox", "GRUCell"), ("equinox", "LSTMCell"),
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
    if kind is None:
        unknown = UNKNOWN.intersection(class_names(branch.module))
        name = _class_name(branch) if unknown else PARAMETER
        return _singles(branch.tensors, path, name)
    parts = _parts(branch.tensors, kind)
    # One axis too many is that of layers stacked along it.
    if parts is None:
        return _singles(branch.tensors, path, f"{STACKED}{kind.name}")
    rest = {name: t for name, t in branch.tensors.items() if name not in kind.roles}
    layers = [Layer(kind.name, path, parts)] if parts else []
    return layers + _singles(rest, path, PARAMETER)


def stacked_count(module: object, shapes: Mapping[str, Shape]) -> int | None:
    """Return how many layers are stacked along a first axis of a layer of a known class, or 0.

    It is None where the class does not tell how many axes a tensor has, as that of a norm.

    Args:
        module: the module.
        shapes: shapes of its own tensors.
    """
    ranks = _ranks(module).items()
    more = {len(shapes[name]) - rank for name, rank in ranks if name in shapes}
    if more == {0}:
        return 0
    firsts = {shape[:1] for shape in shapes.values()}
    if more != {1} or len(firsts) > 1:
        return None
    ((count,),) = firsts
    return count


def _ranks(module: object) -> dict[str, int]:
    """Return how many axes the tensors of a layer have, by attribute, where its class tells."""
    kind = _kind_by_class(module)
    if kind is None:
        return {}
    is_convolution = kind.name == "Conv"
    # A kernel has an axis for each axis of space.
    places = getattr(module, "kernel_size", ())
    ranks = {}
    for name, (_, axes) in kind.roles.items():
        rank = len(_fixed(axes))
        if "..." not in axes:
            ranks[name] = rank
        elif is_convolution:
            ranks[name] = rank + len(places)
    return ranks


def _parts(tensors: Mapping[str, Tensor], kind: Kind) -> dict[str, TensorPart] | None:
    """Return the tensors in the roles of a layer, or None if one has other axes."""
    parts = {}
    for name in kind.roles:
        if name not in tensors:
            continue
        role, axes = kind.roles[name]
        part = _part(tensors[name], axes, kind)
        if part is None:
            return None
        parts[role] = part
    return parts


def _kind_by_class(module: object) -> Kind | None:
    for name in class_names(module):
        if name in KINDS:
            kind = KINDS[name]
            return kind if isinstance(kind, Kind) else kind(module)
    return None


def _kind_of_own_class(branch: Branch) -> Kind | None:
    """Return the kind of a user's own norm or embedding, from its class name and parameters."""
    names = set(branch.tensors)
    if _is_norm(branch):
        return _named_norm(names)
    if _class_name(branch).startswith("Embed") and names in ({"embedding"}, {"weight"}):
        return Kind("Embedding", {min(names): ("weight", "v d")})
    return None


def _is_norm(branch: Branch) -> bool:
    """Whether a user's own module is a norm.

    A scale and a shift of one length are those of a norm, whatever its name; a scale alone may be
    another layer's.
    """
    shapes = {tensor.shape for tensor in branch.tensors.values()}
    flat = all(len(shape) == 1 for shape in shapes)
    if branch.branches or not flat or not _are_of_norm(set(branch.tensors)):
        return False
    both = len(branch.tensors) == 2 and len(shapes) == 1
    return both or re.search("Norm|^RMS|^LN", _class_name(branch)) is not None


def _are_of_norm(names: set[str]) -> bool:
    shifts = names - _SCALES
    return len(names & _SCALES) == 1 and len(shifts) <= 1 and shifts <= _SHIFTS


def _class_name(branch: Branch) -> str:
    return type(branch.module).__name__


def _named_norm(names: set[str]) -> Kind:
    roles = {name: "weight" if name in _SCALES else "bias" for name in names}
    return Kind("Norm", {name: (role, "...") for name, role in roles.items()})


def _kind_by_parameters(
    tensors: Mapping[str, Tensor], path: tuple[str, ...], heads: bool
) -> Kind | None:
    """Return the kind of a module of Linen, from the names and ranks of its parameters alone."""
    names = set(tensors)
    affine = {"scale", "bias"}
    statistics = {"mean", "var"}
    linear = {"kernel", "bias"}
    is_linear = "kernel" in names and names <= linear
    if is_linear:
        is_out = heads and path[-1] == "out"
        return _kind_of_kernel(tensors, heads, is_out)
    if names == {"embedding"}:
        return _FLAX_EMBED
    if statistics <= names <= statistics | affine:
        return _norm("BatchNorm", "scale", "bias", "mean", "var")
    # At the root nothing is known but the parameters, and a scale may be the user's own.
    if path and "scale" in names and names <= affine:
        return _named_norm(names)
    return None


def _kind_of_kernel(tensors: Mapping[str, Tensor], heads: bool, out: bool) -> Kind:
    ranks = {name: len(tensor.shape) for name, tensor in tensors.items()}
    # A kernel of rank 3 is that of a convolution too, whose bias has rank 1.
    if ranks["kernel"] == 3 and (heads or ranks.get("bias") == 2):
        return _FROM_HEADS if out else _TO_HEADS
    return _LINEAR if ranks["kernel"] == 2 else _FLAX_CONV


def _part(tensor: Tensor, axes: str, kind: Kind) -> TensorPart | None:
    """Return a tensor in a role, or None if it has other axes."""
    fixed = _fixed(axes)
    others = len(tensor.shape) - len(fixed)
    if others < 0 or (others > 0 and "..." not in axes):
        return None
    merged = {axis: names for axis, names in kind.merged.items() if _names(names) <= set(fixed)}
    is_flipped = kind.is_flipped and "..." in axes.split()
    flipped = tuple(_places(others)) if is_flipped else ()
    return TensorPart(tensor, _axes(axes, others), merged, flipped=flipped)


def _fixed(axes: str) -> list[str]:
    """Return the axes that every such tensor has."""
    return [axis for axis in axes.split() if "..." not in axis]


def _names(merged: str) -> set[str]:
    return set(merged.strip("()").split())


def _axes(axes: str, others: int) -> str:
    """Return the axes of a parameter with a name for each of those that `...` stands for."""
    # Equinox gives the bias of a convolution an axis of size 1 for each axis of space.
    ones = axes.replace("1...", " ".join("1" * others))
    written = ones.replace("...", " ".join(_places(others)))
    return " ".join(written.split())


def _places(count: int) -> list[str]:
    return _numbered("s", count)


def _singles(tensors: Mapping[str, Tensor], path: tuple[str, ...], kind: str) -> list[Layer]:
    """Return each tensor as a parameter of its own; axes of size 1 do not count."""
    layers = []
    for name, tensor in tensors.items():
        rank = iter(range(len(tensor.shape)))
        axes = " ".join("1" if size == 1 else f"s{next(rank)}" for size in tensor.shape)
        layers.append(Layer(kind, (*path, name), {"value": TensorPart(tensor, axes)}))
    return layers
