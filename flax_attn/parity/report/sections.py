"""What a page shows of each report: pictures, and the errors of its tensors. Needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flax_attn.parity.compare import on_cpu
from flax_attn.parity.pair import Pair
from flax_attn.parity.report import figures
from flax_attn.parity.report.figures import Picture
from flax_attn.parity.report.report import Report
from flax_attn.parity.report.wording import times
from flax_attn.parity.trace import activations

TENSORS = 40  # those furthest over their rules, the most that are listed
ROOM = 700_000  # bytes for the attention maps of a page; plotly itself takes 4.8 MB


@dataclass
class Section:
    """One report and what the page makes of it.

    Args:
        report: what was found.
        tensors: how many times its rule the error of each tensor is, by check; the worst tensors first.
        divergence: the errors of every node.
        losses: of both sides.
        heads: attention maps.
        missing: why attention maps are missing.
    """

    report: Report
    tensors: dict[str, dict[str, float]]
    divergence: Picture | None = None
    losses: Picture | None = None
    heads: list[Picture] = field(default_factory=list)
    missing: str = ""

    @property
    def pictures(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.divergence or self.losses or self.heads)


def sections(reports: Sequence[Report]) -> list[Section]:
    """Return a section a report; among several, those that differ alone have attention maps."""
    room = ROOM // max(sum(not report.passed for report in reports), 1)
    return [_section(report, 0 if report.passed and len(reports) > 1 else room) for report in reports]


def _section(report: Report, room: int) -> Section:
    section = Section(report, _tensors(report))
    if report.divergence is not None and report.divergence.nodes:
        section.divergence = figures.divergence(report.divergence)
    training = report.check("training")
    if report.pair is not None and training is not None and training.errors:  # it ran: nothing is trained for a page
        flax, torch = report.pair.trained
        section.losses = figures.losses(flax["loss"], torch["loss"], training.limit)
    if report.pair is not None and room:
        section.heads, section.missing = _attention(report.pair, room)
    return section


def _tensors(report: Report) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for check in report.checks:
        for name, error in check.errors.items() if check.limit else ():
            row = found.setdefault(name.removeprefix("gradient of "), {})
            row[check.name] = max(row.get(check.name, 0.0), times(error, check.limit))
    order = sorted(found, key=lambda name: -max(found[name].values()))
    return {name: found[name] for name in order[:TENSORS]}


def _attention(pair: Pair, room: int) -> tuple[list[Picture], str]:
    """Return as many maps as there is room for, the layers that differ most first, and why others are missing."""
    try:
        with on_cpu():
            layers = activations.record(pair).attention
    except Exception as error:  # a module that cannot be listened to; the rest of the page stands
        return [], f"There are none: {error}"
    drawn = {}
    for name in sorted(layers, key=lambda name: -np.max(np.abs(np.subtract(*layers[name])))):
        heads = figures.attention(name, *layers[name])
        room -= sum(len(head.data) for head in heads)
        if room < 0:
            break
        drawn[name] = heads
    left = len(layers) - len(drawn)
    missing = f"{left} of {len(layers)} layers, those that differ least, are left out: a page stays small."
    return [head for name in layers if name in drawn for head in drawn[name]], missing if left else ""
