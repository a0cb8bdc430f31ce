"""The streams of dropout of a model that is read: the only state beside the parameters."""

from __future__ import annotations

from typing import TypeGuard

from flax import nnx

from flax_attn.models.layer_pattern import stack_modules
from flax_attn.models.stack import Stack
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.initialisation import fork


def fork_streams(model: nnx.Module, rngs: nnx.Rngs | None) -> None:
    """Give each dropout its own stream, in the order of the layers."""
    modules = [module for _, module in nnx.iter_modules(model)]
    dropouts = [module for module in modules if _draws(module)]
    if not dropouts:  # streams are made by programs that are compiled
        return
    rngs = nnx.Rngs(0) if rngs is None else rngs
    stacks = [module for module in modules if isinstance(module, Stack)]
    stack_of = {id(dropout): one for one in stacks for dropout in _dropouts(one)}
    for dropout in dropouts:
        if id(dropout) not in stack_of:
            dropout.stream = nnx.data(fork(rngs.dropout))
        elif (
            one := stack_of[id(dropout)]
        ) in stacks:  # the layers of a stack where the first of them comes
            stacks.remove(one)
            _fork_stacked(one, rngs)


def _fork_stacked(one: Stack, rngs: nnx.Rngs) -> None:
    dropouts = [_dropouts(block) for block in one.blocks]
    forks = [[] for _ in dropouts]
    for m, _ in one.layers:
        forks[m].append([fork(rngs.dropout) for _ in dropouts[m]])
    for own, of_layers in zip(dropouts, forks, strict=True):
        for dropout, streams in zip(own, zip(*of_layers, strict=True), strict=True):
            dropout.stream = nnx.data(stack_modules(streams))


def _dropouts(model: nnx.Module) -> list[Dropout]:
    return [module for _, module in nnx.iter_modules(model) if _draws(module)]


def _draws(module: nnx.Module) -> TypeGuard[Dropout]:
    return isinstance(module, Dropout) and module.stream is not None
