"""The check of ids: every row of the tables that they index is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flax_attn.parity.adapters.adapter import (
    AdapterError,
    Arrays,
    BothRaise,
    NotRun,
    Untested,
    error_text,
)
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter
from flax_attn.parity.check import Check, Situation, worst_of
from flax_attn.parity.pair import Pair
from flax_attn.parity.variations import excesses

# Inputs that are drawn, at most: a vocabulary may be larger than what they hold.
DRAWS = 4


@dataclass(frozen=True)
class Table:
    """An embedding of PyTorch that an input indexes.

    Args:
        rows: how many ids it has.
        padding: its `padding_idx`, which gets no gradient; None is none.
    """

    rows: int
    padding: int | None = None


# By the name of the input that indexes it.
Tables = dict[str, Table]


def ids(pair: Pair) -> Check:
    """Outputs and gradients on ids that cover the tables they index, `padding_idx` included."""
    found = tables(pair)
    if not found:
        raise NotRun("no input is what an nn.Embedding of PyTorch is called with")
    missing = {}
    for name, table in found.items():
        missing[name] = np.setdiff1d(np.arange(table.rows), pair.inputs[name])
    errors = {}
    seen: dict[str, Situation] = {}
    for draw in range(DRAWS):
        inputs = _drawn(pair, found, missing, draw)
        excess = _judged(pair, f"ids {draw}", inputs)
        errors |= excess
        seen |= dict.fromkeys(excess, Situation(inputs, pair.extras))
        if not any(len(rows) for rows in missing.values()):
            break
    covers = []
    untested = []
    for name, table in found.items():
        rows, left = table.rows, len(missing[name])
        covers.append(f"{rows - left} of {rows} ids of {name}")
        if left:
            untested.append(f"{left} of {rows} ids of {name} never occurred")
    check = worst_of("ids", errors, 1.0, "; ".join(_notes(found)))
    return replace(check.with_coverage(covers, untested), seen=seen.get(check.worst))


def _notes(found: Tables) -> Iterator[str]:
    for table in found.values():
        if table.padding is not None:
            yield f"the row {table.padding}, padding_idx, gets no gradient"


def _drawn(pair: Pair, found: Tables, missing: Arrays, draw: int) -> Arrays:
    """Return inputs with other ids, and take these out of what is missing."""
    random = np.random.default_rng([pair.seed, draw])
    inputs = dict(pair.inputs)
    for name, table in found.items():
        inputs[name] = _covering(inputs[name], table, missing[name], random)
        # The next draw begins with what this one has no room for.
        missing[name] = np.setdiff1d(missing[name], inputs[name])
    return inputs


def _covering(
    given: np.ndarray, table: Table, missing: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Return ids of a shape, the missing ones among them as far as they fit."""
    order = _in_order(table, missing)[: given.size]
    drawn = random.integers(0, table.rows, given.size)
    drawn[: len(order)] = order
    return random.permutation(drawn).reshape(given.shape).astype(given.dtype)


def _in_order(table: Table, missing: np.ndarray) -> np.ndarray:
    # Those at which ports differ come first: the first, the last, those of padding.
    special = [table.padding or 0, table.rows - 1]
    first = np.intersect1d(special, missing)
    rest = np.setdiff1d(missing, special)
    return np.concatenate([first, rest])


def _judged(pair: Pair, name: str, inputs: Arrays) -> dict[str, float]:
    try:
        pair.run("torch", replace(pair.float64, name=name, inputs=inputs))
        return excesses(pair, name, inputs)
    except BothRaise as error:
        raise Untested(str(error)) from None


def tables(pair: Pair) -> Tables:
    """Return the table that each input of ids indexes, by the name of the input."""
    whole = {name: x for name, x in pair.inputs.items() if x.dtype.kind in "iu" and x.size}
    if not whole:
        return {}
    found = _indexed(pair, whole)
    return {name: Table(*values) for name, values in found.items()}


def _indexed(pair: Pair, ids: Arrays) -> Mapping[str, Sequence[Any]]:
    """Return rows and padding of the table that each input indexes."""
    torch = pair.own_torch
    if torch is None:
        assert isinstance(pair.torch, Recording), "else it runs PyTorch"
        return pair.torch.about["tables"]
    from flax_attn.parity.adapters.torch_tables import tables_of

    try:
        found = tables_of(torch, pair.uncompiled, ids)
    except Exception as error:
        raise AdapterError(f"torch raised {error_text(error)}") from error
    # A recording takes them along, since only a run of PyTorch shows them.
    if isinstance(pair.torch, RecordingAdapter):
        pair.torch.tables = found
    return found
