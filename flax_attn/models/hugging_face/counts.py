"""How many layers and experts files hold: compared with a config before a model of it is made.

What else a config says is in the shape of a weight, which costs nothing to compare; of layers and
experts each is made.
"""

import re
from collections.abc import Collection, Iterable
from itertools import chain
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
        found = chain.from_iterable(pattern.findall(name) for name in names)
        numbers = set(map(int, found))
        # Experts may be stored in one weight, whose shape has their number.
        if field == "num_experts" and not numbers:
            continue
        missing = sorted(set(range(wanted)) - numbers)
        if missing:
            # All of them could be a hundred.
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
    return {field: _number_behind(parts) for field, parts in found.items()}


def _number_behind(parts: set[str]) -> re.Pattern[str]:
    before = "|".join(sorted(parts))
    # A name may have any prefix; a number longer than nine digits counts no layer.
    return re.compile(rf"(?:^|\.)(?:{before})(\d{{1,9}})(?=\.)")


def _numbered(layout: Layout, base: str) -> Iterable[tuple[str, str]]:
    """Yield the fields that count the parts of a layout, each with what stands before a number."""
    for rule in layout.rules:
        own, _, _ = rule.ours[0].partition(".")
        before, _, behind = rule.theirs.removeprefix(base).partition("{i}.")
        # Some rules are not of layers.
        if own in _STACKS and behind:
            yield _STACKS[own], before
        # A star stands for the number of an expert.
        before_star, star, _ = behind.partition("*")
        if star:
            yield "num_experts", before_star
