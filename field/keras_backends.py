"""Load Keras twice in one process: one copy of its modules for JAX and one for PyTorch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import jax
import torch


class Keras:
    """One copy of Keras. What it imports while it runs is looked up among its own modules.

    Args:
        backend: name of the backend, which Keras reads when it is imported.
    """

    def __init__(self, backend: str):
        self.modules: dict[str, ModuleType] = {}
        with self.active():
            os.environ["KERAS_BACKEND"] = backend
            self.keras: Any = importlib.import_module("keras")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this copy the one that is imported as `keras`."""
        before = _loaded()
        _load(self.modules)
        try:
            yield
        finally:
            self.modules = _loaded()
            _load(before)


@cache
def on(backend: str) -> Keras:
    """Return the copy on a backend, imported once."""
    return Keras(backend)


def _loaded() -> dict[str, ModuleType]:
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"
    }


def _load(modules: Mapping[str, ModuleType]) -> None:
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(modules)


def layers(make: Callable[[Any], Any], build: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return a layer on both backends: a callable JAX tree with weights, and a PyTorch module.

    Args:
        make: function from the module `keras` to the layer.
        build: function that creates the weights of the layer.
    """
    made = {}
    for backend in ("jax", "torch"):
        with on(backend).active():
            made[backend] = make(on(backend).keras)
            build(made[backend])
    return jax.tree_util.Partial(_stateless("jax", made["jax"]), _values(made["jax"])), TorchLayer(
        made["torch"]
    )


class TorchLayer(torch.nn.Module):
    """The weights of a Keras layer as parameters of PyTorch, and its call."""

    def __init__(self, layer: Any):
        super().__init__()
        values = {name: value.detach().clone() for name, value in _values(layer).items()}
        self.values = torch.nn.ParameterDict(values)
        self.run = _stateless("torch", layer)  # a function, which copies of this module share

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the layer with these parameters."""
        return self.run(dict(self.values), *inputs, **options)


def _values(layer: Any) -> dict[str, Any]:
    return {variable.path: variable.value for variable in layer.trainable_variables}


def _stateless(backend: str, layer: Any) -> Callable[..., Any]:
    names = [variable.path for variable in layer.trainable_variables]

    def run(values: Mapping[str, Any], *inputs: Any, **options: Any) -> Any:
        with on(backend).active():
            rest = [variable.value for variable in layer.non_trainable_variables]
            return layer.stateless_call([values[name] for name in names], rest, *inputs, **options)[
                0
            ]

    return run
