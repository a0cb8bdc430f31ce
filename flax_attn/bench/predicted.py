"""The times that are predicted for the attention calls of well-known models, on each chip."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from flax_attn.backends.registry import BACKENDS
from flax_attn.bench.calls import MODEL_CALLS
from flax_attn.sharding.explain import Explanation, explain

CHIPS = ("a100", "h200", "b200", "v5e", "v6e")


class PredictedTimes(NamedTuple):
    """What is predicted for one call on one chip.

    Args:
        call: name of the call.
        backend: backend that `"auto"` takes.
        in_order: backend that it would take by the order of preference alone.
        milliseconds: predicted time of each backend that takes the call, forward.
    """

    call: str
    backend: str
    in_order: str
    milliseconds: dict[str, float]


def predicted_times(chip: str) -> list[PredictedTimes]:
    """Return what is predicted for each call of the models.

    Raises:
        ValueError: if nothing is published about the chip.

    Example:
        >>> found = predicted_times("h200")[1]
        >>> found.call, found.backend
        ('Llama 3.1 8B, 8192 tokens', 'cudnn')
    """
    rows = []
    for call in MODEL_CALLS:
        found = explain(**call.arguments, platform=chip)
        if not found.seconds:
            raise ValueError(
                f'times are predicted for accelerators; got platform "{chip}". Ask about'
                f" {', '.join(CHIPS)}"
            )
        rows.append(_times(call.name, found))
    return rows


def _times(name: str, found: Explanation) -> PredictedTimes:
    assert found.backend is not None, "auto always finds one"
    assert found.in_order is not None, "explained for one device"
    # A backend that refuses the call has a time all the same, which nobody will see.
    taken = {x: 1000 * t for x, t in found.seconds.items() if found.refusals[x] is None}
    return PredictedTimes(name, found.backend, found.in_order, taken)


def columns(rows: Sequence[PredictedTimes]) -> list[str]:
    """Return the names of the backends that take one of the calls, in order of preference."""
    return [name for name in BACKENDS if any(name in row.milliseconds for row in rows)]


def cells(row: PredictedTimes, names: Sequence[str]) -> list[str]:
    """Return a row of a table: the choice, that without the model, and the times."""
    times = [f"{row.milliseconds[x]:.3g}" if x in row.milliseconds else "-" for x in names]
    return [row.call, row.backend, row.in_order, *times]


def table(chip: str) -> Table:
    """Return a table of the times on a chip, in ms."""
    rows = predicted_times(chip)
    names = columns(rows)
    # Upper case, as the makers write their chips.
    found = Table("call", "auto", "in order", title=f"Predicted on {chip.upper()}, ms forward")
    for name in names:
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(*cells(row, names))
    return found
