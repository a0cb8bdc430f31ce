"""The streams of dropout of a model that is read: the only state beside the parameters."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeGuard

from flax import nnx

from flax_attn.models.layer_pattern import stack_modules
from flax_attn.models.stack import Stack
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.initialisation import fork


def fork_streams(model: nnx.Module, rngs: nnx.Rngs | None) -> None:
    """Give each dropout its own stream, in the order of the layers."""
    # To walk over a model takes longer than what is done here.
    modules = [module for _, module in nnx.iter_modules(model)]
    # Streams are made by programs that are compiled: none for a model without dropout.
    if not any(map(_draws, modules)):
        return
    rngs = nnx.Rngs(0) if rngs is None else rngs
    stacked = _in_stacks(modules)
    for module in modules:
        # All layers of a stack draw before what stands behind it.
        if isinstance(module, Stack):
            _fork_stacked(module, rngs)
        elif _draws(module) and id(module) not in stacked:
            module.stream = nnx.data(fork(rngs.dropout))


def _in_stacks(modules: Iterable[nnx.Module]) -> set[int]:
    """Return the ids of the dropouts whose layers are stacked."""
    found = set()
    for module in modules:
        if isinstance(module, Stack):
            found |= set(map(id, _dropouts(module)))
    return found


def _fork_stacked(one: Stack, rngs: nnx.Rngs) -> None:
    streams: dict[int, list[nnx.RngStream]] = defaultdict(list)
    # Drawn in the order of the layers, which is the order without a stack.
    for block in one.of_layers:
        for dropout in _dropouts(block):
            of_layer = fork(rngs.dropout)
            streams[id(dropout)].append(of_layer)
    for dropout in _dropouts(one):
        of_layers = streams[id(dropout)]
        dropout.stream = nnx.data(stack_modules(of_layers))


def _dropouts(model: nnx.Module) -> list[Dropout]:
    return [module for _, module in nnx.iter_modules(model) if _draws(module)]


def _draws(module: nnx.Module) -> TypeGuard[Dropout]:
    return isinstance(module, Dropout) and module.stream is not None
