"""Attention functions that a module was given by its user."""

import inspect
from functools import partial
from typing import Any

from flax_attn.everywhere import reports
from flax_attn.everywhere.dispatch import PLACE, leave_alone

# Their functions are counted, or left alone, where they are called.
_KNOWN = ("flax", "flax_attn")


def note(function: Any) -> None:
    """Count a function that is neither Flax's nor ours, and that called none of theirs.

    Raises:
        ValueError: if there is one under `strict=True`.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    # An object that is called has no `__qualname__`, and its class defines `__module__`.
    module = getattr(function, "__module__", None) or ""
    if reports.package_of(module) in _KNOWN:
        return
    name = getattr(function, "__qualname__", type(function).__name__)
    reason = f"attention_fn={name} is not Flax's; pass attention_fn=flax_attn.adapters.flax"
    # Whether it calls Flax's attention is known after its call only.
    leave_alone(PLACE.get(), reason, remedy=", or strict=False to let it run")
