"""Weights that files may hold twice, such as a tied head: the copies must be equal."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from flax_attn.convert.entry import Entry
from flax_attn.convert.headers import Stored
from flax_attn.convert.rules import ConversionError
from flax_attn.models.hugging_face.family import Family

_ROWS = 4096  # compared at once


def check_copies(
    entries: Collection[Entry], family: Family, stored: Mapping[str, Stored], weights: Path
) -> None:
    """Raise if files hold a weight twice with different values: transformers then reads both.

    Args:
        entries: entries of a model, which are not copies.
        family: family that says which names are copies of which parameter.
        stored: contents of the files, by name.
        weights: name of the files in errors.

    Raises:
        ConversionError: if a copy differs.
    """
    own = {entry.ours: entry.theirs for entry in entries}
    # What is an entry is a weight of its own, and no copy: a head that is not tied.
    spare = stored.keys() - set(own.values())
    for copy, parameter in family.copies.items():
        original = own.get((parameter,))
        if original is None:
            continue
        # A model inside another module has a prefix.
        names = [name for name in spare if f".{name}".endswith(f".{copy}")]
        for name in sorted(names):
            if not _equal(stored[name], stored[original]):
                raise ConversionError(
                    f"{weights} holds {name} beside {original}, which config.json says are one"
                    " weight, and their values differ. Set tie_word_embeddings to false in"
                    " config.json, or remove one of them"
                )


def _equal(copy: Stored, original: Stored) -> bool:
    if (copy.shape, copy.dtype) != (original.shape, original.dtype):
        return False
    left, right = copy.read(), original.read()
    starts = range(0, len(left), _ROWS)
    return all(_same(left[i : i + _ROWS], right[i : i + _ROWS]) for i in starts)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()
