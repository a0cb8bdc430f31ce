"""The call of attention that all replacements and adapters make."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from flax_attn.attention import attend as attend_here
from flax_attn.everywhere import report
from flax_attn.everywhere.dispatch import PLACE
from flax_attn.everywhere.target import LeftAlone
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.sharding.explain import explain


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    asked: str = "",
    return_weights: bool = False,
    **options: Any,
) -> Outputs[Cache]:
    """Return `flax_attn.attend` of a call, and count it; `asked` says what it is, in a few words.

    Raises:
        LeftAlone: if this library refuses the call, before any work.
    """
    try:
        found = explain(query, key, value, bias, mask, **options)
    except ValueError as error:
        raise LeftAlone(str(error)) from error
    options["return_weights"] = return_weights
    output = attend_here(query, key, value, bias, mask, **options)
    shape = f"q{list(query.shape)} k{list(key.shape)} {query.dtype}"
    memory = found.memory
    entry = report.Entry(
        report.user_place(),
        PLACE.get(),
        f"{shape}, {asked}" if asked else shape,
        found.backend,
        memory["reference"],
        memory[found.backend or "reference"],
    )
    report.add(entry)
    return output
