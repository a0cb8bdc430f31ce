"""The layers of a PyTorch model, read without importing torch."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

from flax_attn.convert.match.computed_weights import in_older_names, role_of, weight_functions
from flax_attn.convert.match.kinds import class_names, own_layers
from flax_attn.convert.match.tree import (
    RECURRENT,
    Branch,
    Group,
    Layer,
    Path,
    Tensor,
    TensorPart,
    simplify,
)

# Of norms, and the vectors of spectral norm in PyTorch's newer names and its older ones.
STATISTICS = ("running_mean", "running_var", "_u", "_v", "weight_u", "weight_v")
INPUTS = ("query", "key", "value")
# The gates of recurrent layers, in PyTorch's order and by its letters.
GATES = {"GRU": "rzn", "LSTM": "ifgo"}
# How the weights of a recurrent layer are read: as they are; as one linear layer of the input and
# one of the hidden state; as those of each gate.
Reading = Literal["packed", "sides", "gates"]
READINGS: tuple[Reading, ...] = ("packed", "sides", "gates")


def is_torch_module(module: Any) -> bool:
    """Whether this is an `nn.Module`."""
    return ("torch", "Module") in class_names(module)


def torch_tree(
    module: Any, without: Collection[str] = (), split: bool = True, recurrent: Reading = "packed"
) -> Group:
    """Return the layers of a PyTorch model, except the tensors of these names.

    Args:
        module: the model.
        without: names of tensors that are left out.
        split: whether a fused projection of query, key and value counts as three layers.
        recurrent: how the weights of recurrent layers are read.
    """
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    return simplify(_grow(_branch(module, "", names, without), (), split, recurrent))


def state_names(module: Any) -> tuple[str, ...]:
    """Return the names in the state dict of a PyTorch module."""
    return tuple(module.state_dict())


def _branch(module: Any, prefix: str, names: dict[int, str], without: Collection[str]) -> Branch:
    """Return the branch of a module, except the tensors that are left out."""
    own = _parameters(module, names)
    computed = _originals(module, prefix, names)
    every = {**_by_role(own | computed), **_statistics(module, prefix)}
    tensors = {name: tensor for name, tensor in every.items() if tensor.name not in without}
    # What a weight is computed from is a tensor of the layer, and of no module inside.
    inside = {*without, *(tensor.name for tensor in computed.values())}
    branches = {}
    for name, child in module.named_children():
        branches[name] = _branch(child, f"{prefix}{name}.", names, inside)
    return Branch(module, tensors, branches)


def _by_role(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        # A vector of spectral norm has the name of what weight norm scales.
        role = role_of(name) if tensor.trainable else name
        found[role] = tensor
    return found


def _originals(module: Any, prefix: str, names: dict[int, str]) -> dict[str, Tensor]:
    """Return what the weights of a layer are computed from, as PyTorch's older functions call it.

    Those have it in the layer itself.
    """
    found = {}
    for path, functions in weight_functions(module):
        inside = f"{prefix}{path}.0."
        tensors = _parameters(functions, names) | _statistics(functions[0], inside)
        for tensor in tensors.values():
            name = in_older_names(tensor.name)
            found[name.rpartition(".")[2]] = tensor
    return found


def _parameters(module: Any, names: dict[int, str]) -> dict[str, Tensor]:
    """Return the parameters of a module itself; a shared one has the name of its first place."""
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[name] = Tensor(names[id(parameter)], tuple(parameter.shape))
    return found


def _statistics(module: Any, prefix: str) -> dict[str, Tensor]:
    found = {}
    for name in STATISTICS:
        buffer = module._buffers.get(name)
        if buffer is not None:
            found[name] = Tensor(prefix + name, tuple(buffer.shape), trainable=False)
    return found


def _grow(branch: Branch, path: Path, split: bool, recurrent: Reading) -> Group:
    # What is fused on one side may be apart on the other.
    fused, rest = _fused_inputs(branch, path, split)
    gates, rest = _gates(rest, path, recurrent)
    children = []
    for name, child in rest.branches.items():
        children.append(_grow(child, (*path, name), split, recurrent))
    return Group(path, (*fused, *gates, *own_layers(rest, path), *children))


def _gates(branch: Branch, path: Path, recurrent: Reading) -> tuple[list[Layer], Branch]:
    """Return the linear layers of a recurrent module, and the rest."""
    kind = _recurrent_kind(branch.module)
    if recurrent == "packed" or not kind:
        return [], branch
    letters = ""
    if recurrent == "gates":
        letters = GATES.get(kind.removesuffix("Cell"), "")
    rest = dict(branch.tensors)
    layers = []
    for name in branch.tensors:
        # A projection of the state, `weight_hr`, is no gate, and stays as it is.
        if not name.startswith(("weight_ih", "weight_hh")):
            continue
        place = name.removeprefix("weight_")
        weight = rest.pop(name)
        bias = rest.pop(f"bias_{place}", None)
        layers += _gate_layers(path, place, letters, weight, bias, kind)
    return layers, replace(branch, tensors=rest)


def _recurrent_kind(module: Any) -> str:
    """Return the kind of a recurrent module; empty of any other."""
    names = [name for _, name in class_names(module) if name in RECURRENT]
    return names[0] if names else ""


def _gate_layers(
    path: Path, place: str, letters: str, weight: Tensor, bias: Tensor | None, kind: str
) -> list[Layer]:
    """Return a linear layer for each gate, or one for all of them where there are no letters."""
    side, _, number = place.partition("_")
    # One layer of them needs no number.
    if number not in ("", "l0"):
        path = (*path, number)
    if not letters:
        whole = _whole(weight, "o i"), _whole(bias, "o")
        return _linear((*path, side), *whole, kind)
    weights = _pieces(weight, "o i", len(letters))
    biases = _pieces(bias, "o", len(letters))
    layers = []
    for letter, one, other in zip(letters, weights, biases, strict=True):
        name = f"{side[0]}{letter}"
        layers += _linear((*path, name), one, other, kind)
    return layers


def _fused_inputs(branch: Branch, path: Path, split: bool) -> tuple[list[Layer], Branch]:
    """Return query, key and value of a module that may hold them in one tensor, and the rest."""
    known = class_names(branch.module)
    if ("torch", "MultiheadAttention") in known:
        return _multihead_attention(branch, path, split)
    if ("transformers", "GPT2Attention") in known and split:
        return _gpt2_attention(branch, path)
    return [], branch


def _multihead_attention(branch: Branch, path: Path, split: bool) -> tuple[list[Layer], Branch]:
    own = dict(branch.tensors)
    weight = own.pop("in_proj_weight", None)
    bias = own.pop("in_proj_bias", None)
    # Where the widths differ, each input has a weight of its own, and the bias is packed still.
    apart = [own.pop(f"{name[0]}_proj_weight", None) for name in INPUTS]
    rest = replace(branch, tensors=own)
    if weight is None:
        weights = [_whole(tensor, "o i") for tensor in apart]
    elif split:
        weights = _pieces(weight, "o i")
    else:
        return _linear((*path, "in_proj"), _whole(weight, "o i"), _whole(bias, "o")), rest
    return _input_layers(path, weights, _pieces(bias, "o")), rest


def _gpt2_attention(branch: Branch, path: Path) -> tuple[list[Layer], Branch]:
    inner = dict(branch.branches)
    tensors = inner.pop("c_attn", Branch()).tensors
    weight = tensors.get("weight")
    # In cross-attention the same layer holds key and value alone.
    if weight is None or weight.shape[1] != 3 * weight.shape[0]:
        return [], branch
    weights = _pieces(weight, "i o", axis=1)
    biases = _pieces(tensors.get("bias"), "o")
    return _input_layers(path, weights, biases), replace(branch, branches=inner)


def _pieces(
    tensor: Tensor | None, axes: str, count: int = 3, axis: int = 0
) -> list[TensorPart | None]:
    """Return equal parts of one tensor, cut along an axis, as those of query, key and value."""
    if tensor is None:
        return [None] * count
    return [TensorPart(tensor, axes, {}, n, count, axis) for n in range(count)]


def _whole(tensor: Tensor | None, axes: str) -> TensorPart | None:
    return None if tensor is None else TensorPart(tensor, axes)


def _input_layers(
    path: Path, weights: Iterable[TensorPart | None], biases: Iterable[TensorPart | None]
) -> list[Layer]:
    """Return the projections of query, key and value."""
    layers = []
    for name, weight, bias in zip(INPUTS, weights, biases, strict=True):
        layers += _linear((*path, name), weight, bias)
    return layers


def _linear(
    path: Path, weight: TensorPart | None, bias: TensorPart | None, kind: str = "Linear"
) -> list[Layer]:
    """Return a linear layer of the parts that are there, or nothing without any."""
    both = {"weight": weight, "bias": bias}
    parts = {role: part for role, part in both.items() if part is not None}
    return [Layer(kind, path, parts)] if parts else []
