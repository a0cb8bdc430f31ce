"""What a fault is: a fault that ports are known for, and how it is planted into the PyTorch side alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.proof.faults.formulas import Formula
from flax_attn.proof.variants import Variant, select


class Plant(ExitStack):
    """What a fault is planted with; everything is as before when it closes.

    Args:
        module: of the PyTorch side, with its weights in place: a copy, to be broken freely.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Put a value in the place of an attribute of a module, a class or an object."""
        self.enter_context(mock.patch.object(target, name, value))

    def wrap(self, target: Any, name: str, around: Callable) -> None:
        """Put `around(original, *arguments, **options)` in the place of a function or method."""
        original = getattr(target, name)
        self.replace(target, name, lambda *arguments, **options: around(original, *arguments, **options))


@dataclass(frozen=True)
class Fault:
    """One fault, in one row.

    Args:
        name: of the fault.
        what: goes wrong, in words.
        row: that it is planted in.
        check: that sees it first.
        plant: plants it.
    """

    name: str
    what: str
    row: Variant | Formula
    check: str
    plant: Callable[[Plant], None]

    @contextmanager
    def planted(self, side: TorchAdapter, weights: Arrays) -> Iterator[TorchAdapter]:
        """Yield a copy of a side that has these weights and this fault."""
        faulty = copy(side)
        faulty.module = deepcopy(side.module)
        faulty.load(weights)
        with Plant(faulty.module) as plant:
            self.plant(plant)
            yield faulty


def fault(row: str | Variant | Formula, check: str = "forward") -> Callable[[Callable[[Plant], None]], Fault]:
    """Make a fault of a function that plants a fault: it is called as the function is, its docstring says what it is.

    Args:
        row: that it is planted in; a name is one of `variants.VARIANTS`.
        check: that sees it first.

    Example:
        >>> @fault("layer_norm")
        ... def forgotten_epsilon(plant):
        ...     '''The epsilon is forgotten.'''
        ...     plant.module.eps = 0.0
        >>> forgotten_epsilon.name, forgotten_epsilon.what
        ('forgotten_epsilon', 'The epsilon is forgotten.')
    """
    planted_in = select([row])[0] if isinstance(row, str) else row
    return lambda plant: Fault(plant.__name__, plant.__doc__ or "", planted_in, check, plant)
