"""Tensors as PyTorch takes them: from arrays, cast, and copied for each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from flax_attn.parity.adapters.adapter import RunSpec, is_floating, rounding_factors

Tensors = dict[str, torch.Tensor]


def copy_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module, in which no tensor has a history.

    PyTorch itself copies no tensor that has one, such as the weight that its older weight norm
    keeps beside the parameters, and computes again in each call.
    """
    memo = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)


def as_tensors(arrays: Mapping[str, np.ndarray], dtype: str) -> Tensors:
    """Return arrays as tensors, floating ones in a dtype."""
    kind = getattr(torch, dtype)
    found = {}
    for name, array in arrays.items():
        found[name] = torch.tensor(array, dtype=kind if is_floating(array) else None)
    return found


def round_stochastically(tensors: Iterable[torch.Tensor], spec: RunSpec) -> None:
    """Round floating tensors up or down at random once they are cast, in place."""
    eps = torch.finfo(getattr(torch, spec.dtype)).eps
    multiply(tensors, rounding_factors(spec.rounding_seed, eps))


@torch.no_grad()
def multiply(tensors: Iterable[torch.Tensor], factors: Callable) -> None:
    """Multiply floating tensors by factors that are drawn for each shape, in place."""
    for tensor in tensors:
        if tensor.is_floating_point():
            drawn = factors(tuple(tensor.shape))
            tensor.mul_(torch.from_numpy(drawn))


@torch.no_grad()
def move(tensors: Mapping[str, torch.Tensor], spec: RunSpec) -> None:
    """Move tensors by some of their tangents, in place."""
    tangents = spec.tangents or {}
    for name in tensors.keys() & tangents:
        step = torch.tensor(spec.step * tangents[name])
        tensors[name].add_(step)


def cast(inputs: Tensors, kind: torch.dtype) -> Tensors:
    """Return tensors with the floating ones in a dtype."""
    return {name: x.to(kind) if x.is_floating_point() else x for name, x in inputs.items()}


def copied(inputs: Tensors) -> Tensors:
    """Return copies for one call."""
    # A module may write into what it is given, which PyTorch refuses for what is differentiated.
    return {name: tensor.clone() for name, tensor in inputs.items()}


def as_extras(extras: Mapping[str, np.ndarray]) -> Tensors:
    """Return the arguments of a call beside its inputs, in their own dtypes."""
    arrays = {name: np.asarray(value, order="C") for name, value in extras.items()}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
