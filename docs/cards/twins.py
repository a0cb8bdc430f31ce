"""Helpers for the twins of several cards: conversion from JAX, masks and rotary angles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flax import nnx
from torch.nn.functional import scaled_dot_product_attention

from flax_attn import convert
from flax_attn.convert.layouts import LayoutLike

Names = Mapping[str, Any]


def tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor."""
    return torch.from_numpy(np.array(array))


def heads_first(names: Names, *wanted: str) -> list[torch.Tensor]:
    """Return arrays `(t, n, h)` as PyTorch has them, `(1, n, t, h)`."""
    return [tensor(names[name]).transpose(0, 1)[None] for name in wanted or ("q", "k", "v")]


def sdpa(names: Names, seen: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Return `scaled_dot_product_attention` of the example's q, k and v."""
    output = scaled_dot_product_attention(*heads_first(names), attn_mask=seen, **options)
    return output[0].transpose(0, 1)


def by_index(function: Callable, offset: int = 0) -> Callable[[Names], torch.Tensor]:
    """Return a twin whose mask is a function of `(b, n, i, j)`, as in FlexAttention."""

    def twin(names: Names) -> torch.Tensor:
        t, s = len(names["q"]), len(names["k"])
        seen = function(
            torch.tensor(0),
            torch.tensor(0),
            offset + torch.arange(t)[:, None],
            torch.arange(s)[None],
        )
        return sdpa(names, seen.expand(t, s))

    return twin


def causal(t: int) -> torch.Tensor:
    """Return the mask to add for causal attention, `(1, 1, t, t)`."""
    return torch.full((t, t), -torch.inf).triu(1)[None, None]


def angles(t: int, width: int, base: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `(1, t, width)`, in the order of Hugging Face's Llama."""
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    turned = torch.outer(torch.arange(t, dtype=torch.float64), frequencies).repeat(1, 2)[None]
    return turned.cos(), turned.sin()


def loaded(module: torch.nn.Module, layer: Any, layout: LayoutLike) -> torch.nn.Module:
    """Return a module, in eval mode, with the weights of our layer."""
    weights = convert.state_dict(layer, layout)
    module.load_state_dict({name: tensor(array) for name, array in weights.items()})
    return module.eval()


class _Part(nnx.Module):
    """A module that holds a layer under the name that a model has for it."""

    def __init__(self, name: str, layer: Any):
        setattr(self, name, layer)


def loaded_as(
    layout: LayoutLike, part: str, theirs: str, module: torch.nn.Module, layer: Any
) -> torch.nn.Module:
    """Return a module of transformers, in eval mode, with the weights of our layer.

    Args:
        layout: layout of a family of models.
        part: name of the layer in our block, such as "att"; "" is the block itself.
        theirs: name of the module in the first block of transformers.
        module: module of transformers.
        layer: our layer.
    """
    block = _Part(part, layer) if part else layer
    weights = convert.state_dict(_Part("trf_blocks", nnx.List([block])), layout)
    module.load_state_dict(
        {name.removeprefix(f"{theirs}."): tensor(array) for name, array in weights.items()}
    )
    return module.eval()
