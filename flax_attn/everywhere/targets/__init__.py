"""The targets: a file each, loaded when attention is first computed for them."""

from functools import cache
from importlib import import_module

from attn_spec.checks import check_choice
from flax_attn.everywhere.target import Target

NAMES = ("jax.nn", "nnx", "linen", "keras", "equinox", "haiku")


@cache
def load(name: str) -> Target:
    """Return a target; its library is not imported."""
    check_choice("a target", name, NAMES)
    return import_module(f"{__name__}.{name.replace('.', '_')}").TARGET
