"""All ports by name, and how the case of each is made."""

from __future__ import annotations

from collections.abc import Callable

from field.by_hand import (
    attnax_layers,
    diffusers_models,
    equimo_layers,
    equinox_layers,
    flax_cells,
    flax_layers,
    haiku_layers,
    jax_functions,
    keras_layers,
    transformers_models,
)
from field.by_hand.both import Case

KINDS = (
    attnax_layers,
    diffusers_models,
    equimo_layers,
    equinox_layers,
    flax_cells,
    flax_layers,
    haiku_layers,
    jax_functions,
    keras_layers,
    transformers_models,
)


def all_cases() -> dict[str, Callable[[], Case]]:
    """Return every port by name."""
    return {name: make for kind in KINDS for name, make in kind.cases()}
