"""Compare Keras layers on the JAX and PyTorch backends; weights cross by their own paths."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from field.by_hand.both import Case, placed, random_values

SHAPE = (3, 7, 12)


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    heads, groups = ("MultiHeadAttention", 3, 4), ("GroupQueryAttention", 3, 4, 2)
    rows = {
        "MultiHeadAttention/self": partial(_attention, heads, {"use_bias": False}, {}),
        "MultiHeadAttention/scores": partial(
            _attention, heads, {}, {"return_attention_scores": True}
        ),
        "MultiHeadAttention/causal": partial(
            _attention, heads, {"use_bias": False}, {"use_causal_mask": True}
        ),
        "GroupQueryAttention/default": partial(_attention, groups, {"use_bias": False}, {}),
        "Attention/scale": partial(_scores, "Attention", use_scale=True),
        "Attention/concat": partial(_scores, "Attention", score_mode="concat"),
        "AdditiveAttention/default": partial(_scores, "AdditiveAttention"),
        "LayerNormalization/default": partial(_plain, ("LayerNormalization",)),
        "RMSNormalization/default": partial(_plain, ("RMSNormalization",)),
        "GroupNormalization/groups": partial(_plain, ("GroupNormalization",), groups=3),
        "EinsumDense/default": partial(
            _plain, ("EinsumDense", "abc,cd->abd"), output_shape=(None, 5)
        ),
    }
    yield from ((f"keras/{name}", make) for name, make in rows.items())


class Swapped:
    """One of two copies of the keras modules; inside a `with` block, imports use `copy`."""

    def __init__(self, copy: dict[str, ModuleType]):
        self.copy = copy

    def __enter__(self) -> None:
        self.before = _taken()
        sys.modules.update(self.copy)

    def __exit__(self, *_: Any) -> None:
        self.copy.update(_taken())
        sys.modules.update(self.before)


def _taken() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "keras"]
    return {name: sys.modules.pop(name) for name in names}


@cache
def _copy(backend: str) -> Swapped:
    copy = Swapped({})
    with copy:
        os.environ["KERAS_BACKEND"] = backend  # read on import
        importlib.import_module("keras")
    return copy


def _both(
    kind: tuple,
    options: Mapping[str, Any],
    build: Callable,
    call: Callable,
    inputs: tuple,
    padded: bool,
) -> Case:
    layers = {}
    for backend in ("jax", "torch"):
        with _copy(backend):
            layers[backend] = getattr(sys.modules["keras"].layers, kind[0])(
                *kind[1:], dtype="float64", **options
            )
            build(layers[backend])
    own, shapes = (
        {variable.path: variable.shape for variable in layers[backend].trainable_variables}
        for backend in layers
    )
    paths = list(placed(own, random_values(shapes)))

    def run(backend: str, v: Mapping[str, Any], mask: Any) -> Any:
        with _copy(backend):
            rest = [variable.value for variable in layers[backend].non_trainable_variables]
            arguments, named = call([v[name] for name in inputs], mask)
            return layers[backend].stateless_call(
                [v[path] for path in paths], rest, *arguments, **named
            )[0]

    random = np.random.default_rng(3)
    values = random_values(shapes) | {name: random.normal(size=SHAPE) for name in inputs}
    return Case(
        partial(run, "jax"), partial(run, "torch"), values, inputs, SHAPE[:2] if padded else None
    )


def _attention(kind, options, called):
    def call(inputs, mask):
        return (inputs[0], inputs[0]), {"key_mask": mask, "value_mask": mask, **called}

    # With biases a gradient of the key's is rounding alone, but for weights that are returned.
    return _both(
        kind,
        {"name": "layer", **options},
        lambda layer: layer.build(SHAPE, SHAPE),
        call,
        ("x",),
        True,
    )


def _scores(name, **options):
    def call(inputs, mask):
        return (inputs,), {"mask": None if mask is None else [None, mask]}

    def build(layer):
        layer.build([SHAPE, SHAPE])

    return _both((name,), {"name": "layer", **options}, build, call, ("query", "value"), True)


def _plain(kind, **options):
    def build(layer):
        layer.build(SHAPE)

    return _both(
        kind, {"name": "layer", **options}, build, lambda inputs, mask: (inputs, {}), ("x",), False
    )
