"""The embeddings of PyTorch that are called with an input of the module."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from flax_attn.parity.adapters.adapter import Adapter, Arrays, RunSpec


def tables_of(adapter: Adapter, spec: RunSpec, ids: Arrays) -> dict[str, tuple[int, int | None]]:
    """Return rows and `padding_idx` of the smallest `nn.Embedding` that each input is passed to.

    Args:
        adapter: adapter of PyTorch.
        spec: run on the inputs.
        ids: inputs of integers, by name.

    Raises:
        Exception: what the module raises.
    """
    found: dict[str, tuple[int, int | None]] = {}
    tensors = {name: torch.as_tensor(array) for name, array in ids.items()}

    def look(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if not isinstance(module, torch.nn.Embedding) or not arguments:
            return
        table = module.num_embeddings, module.padding_idx
        for name, tensor in tensors.items():
            if _are_equal(arguments[0], tensor):
                # Ids that are passed to several tables have to be rows of each.
                found[name] = min(found.get(name, table), table, key=itemgetter(0))

    hook = register_module_forward_pre_hook(look)
    try:
        adapter.run(spec)
    finally:
        hook.remove()
    return found


def _are_equal(ours: Any, theirs: torch.Tensor) -> bool:
    same = isinstance(ours, torch.Tensor) and ours.numel() == theirs.numel()
    return same and torch.equal(ours.reshape(-1).long(), theirs.reshape(-1).long())
