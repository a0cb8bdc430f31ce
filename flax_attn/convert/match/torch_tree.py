"""The layers of a PyTorch model, read without importing torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from flax_attn.convert.match.kinds import class_names, own_layers
from flax_attn.convert.match.tree import Branch, Group, Layer, Part, Tensor, simplify

STATISTICS = ("running_mean", "running_var")
INPUTS = ("query", "key", "value")


def is_torch_module(module: Any) -> bool:
    """Whether this is an `nn.Module`."""
    return ("torch", "Module") in class_names(module)


def torch_tree(module: Any, without: Collection[str] = (), split: bool = True) -> Group:
    """Return the layers of a PyTorch model, but for the tensors of these names.

    Args:
        module: the model.
        without: names of tensors that are left out.
        split: whether a fused projection of query, key and value counts as three layers.
    """
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    return simplify(_grow(_branch(module, "", names, without), (), split))


def state_names(module: Any) -> tuple[str, ...]:
    """Return the names in the state dict of a PyTorch module."""
    return tuple(module.state_dict())


def _branch(module: Any, prefix: str, names: dict[int, str], without: Collection[str]) -> Branch:
    """Return the branch of a module; a shared parameter has the name of its first place."""
    own = {
        name: Tensor(names[id(p)], tuple(p.shape))
        for name, p in module._parameters.items()
        if p is not None
    }
    buffers = {name: module._buffers.get(name) for name in STATISTICS}
    own |= {
        name: Tensor(prefix + name, tuple(b.shape), False)
        for name, b in buffers.items()
        if b is not None
    }
    tensors = {name: tensor for name, tensor in own.items() if tensor.name not in without}
    inner = {
        name: _branch(child, f"{prefix}{name}.", names, without)
        for name, child in module.named_children()
    }
    return Branch(module, tensors, inner)


def _grow(branch: Branch, path: tuple[str, ...], split: bool) -> Group:
    known = class_names(branch.module)
    inner, own = dict(branch.branches), branch
    fused: list[Layer] = []
    if ("torch", "MultiheadAttention") in known:
        fused, own = _multihead_attention(branch, path, split)
    elif split and ("transformers", "GPT2Attention") in known and _is_three(inner.get("c_attn")):
        fused = _conv1d_inputs(inner.pop("c_attn").tensors, path)
    children = [_grow(child, (*path, name), split) for name, child in inner.items()]
    return Group(path, (*fused, *own_layers(own, path), *children))


def _multihead_attention(
    branch: Branch, path: tuple[str, ...], split: bool
) -> tuple[list[Layer], Branch]:
    """Return query, key and value of torch.nn.MultiheadAttention, packed or not, and the rest."""
    own = dict(branch.tensors)
    weight, bias = own.pop("in_proj_weight", None), own.pop("in_proj_bias", None)
    if not split and weight is not None:
        parts = {"weight": Part(weight, "o i")} | ({"bias": Part(bias, "o")} if bias else {})
        return [Layer("Linear", (*path, "in_proj"), parts)], Branch(branch.module, own)
    layers = []
    for n, name in enumerate(INPUTS):
        apart = own.pop(f"{name[0]}_proj_weight", None)
        parts = {"weight": Part(weight, "o i", {}, n, 3)} if weight else {}
        parts |= {"weight": Part(apart, "o i")} if apart else {}
        parts |= {"bias": Part(bias, "o", {}, n, 3)} if bias else {}
        layers += [Layer("Linear", (*path, name), parts)] if parts else []
    return layers, Branch(branch.module, own)


def _is_three(branch: Branch | None) -> bool:
    """Whether a Conv1D is a fused projection of query, key and value."""
    weight = None if branch is None else branch.tensors.get("weight")
    return weight is not None and weight.shape[1] == 3 * weight.shape[0]


def _conv1d_inputs(tensors: dict[str, Tensor], path: tuple[str, ...]) -> list[Layer]:
    def parts(piece: int) -> Iterator[tuple[str, Part]]:
        yield "weight", Part(tensors["weight"], "i o", {}, piece, 3, 1)
        if "bias" in tensors:
            yield "bias", Part(tensors["bias"], "o", {}, piece, 3)

    return [Layer("Linear", (*path, name), dict(parts(n))) for n, name in enumerate(INPUTS)]
