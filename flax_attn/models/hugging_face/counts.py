"""How many layers and experts files hold: compared with a config before a model of it is made.

What else a config says is in the shape of a weight, which costs nothing to compare; of layers and
experts each is made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from flax_attn.convert.rules import ConversionError, Layout
from flax_attn.models.hugging_face.family import Family

_STACKS = {
    "trf_blocks": "num_layers",
    "enc_blocks": "num_layers",
    "dec_blocks": "num_decoder_layers",
}


def check_counts(config: Any, family: Family, names: Collection[str], weights: Path) -> None:
    """Raise unless there is a weight of each layer, and of each expert stored alone.

    Args:
        config: the sizes.
        family: family whose layouts the files may have.
        names: names of the weights in the files.
        weights: name of the files in errors.

    Raises:
        ConversionError: if a layer or an expert has none.
    """
    for field, pattern in _patterns(family).items():
        wanted = getattr(config, field, 0)
        numbers = {int(number) for name in names for number in pattern.findall(name)}
        missing = [number for number in range(wanted) if number not in numbers]
        # Experts may be stored in one weight, whose shape has their number.
        if missing and (numbers or field != "num_experts"):
            first = ", ".join(map(str, missing[:3]))
            more = " and more" if len(missing) > 3 else ""
            raise ConversionError(
                f"{weights} must hold the {wanted} parts that config.json asks for by {field}, "
                f"counted from 0; got none of the numbers {first}{more}. "
                "Take the config.json that came with the weights"
            )


def _patterns(family: Family) -> dict[str, re.Pattern[str]]:
    """Return the expressions that find the numbers of parts in names, by config field."""
    found: dict[str, set[str]] = {}
    for layout in (family.layout, *family.others):
        for field, before in _numbered(layout, family.base):
            found.setdefault(field, set()).add(re.escape(before))
    patterns = {}
    for field, parts in found.items():
        before = "|".join(sorted(parts))
        # A name may have any prefix; a number longer than nine digits counts no layer.
        patterns[field] = re.compile(rf"(?:^|\.)(?:{before})(\d{{1,9}})(?=\.)")
    return patterns


def _numbered(layout: Layout, base: str) -> Iterable[tuple[str, str]]:
    """Yield the fields that count the parts of a layout, each with what stands before a number."""
    for rule in layout.rules:
        stack = _STACKS.get(rule.ours[0].partition(".")[0])
        before, _, behind = rule.theirs.removeprefix(base).partition("{i}.")
        if stack and behind:
            yield stack, before
        if "*" in behind:
            yield "num_experts", behind.partition("*")[0]
