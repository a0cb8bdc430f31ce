"""Attention functions that a module was given by its user."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from flax_attn.everywhere import reports
from flax_attn.everywhere.dispatch import PLACE


def note(function: Any) -> None:
    """Count a function that is neither Flax's nor ours, and that called none of theirs."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    module = getattr(function, "__module__", None) or ""
    package = module.partition(".")[0]
    if package in ("flax", "flax_attn"):
        return
    name = getattr(function, "__qualname__", type(function).__name__)
    reason = f"attention_fn={name} is not Flax's; pass attention_fn=flax_attn.adapters.flax"
    line = reports.user_place()
    reports.add(reports.Entry(line, PLACE.get(), reason=reason))
