"""Reports as one page of HTML that needs nothing else. Needs jinja2 and plotly."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.convert.replacing import replacing
from flax_attn.parity import tolerance
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.padding import GRADIENT_OF
from flax_attn.parity.report import scale, wording
from flax_attn.parity.report.findings import Findings

if TYPE_CHECKING:
    from flax_attn.parity.report.figures import Picture

# The most that are listed, those furthest over their rules first.
TENSORS = 40
SAVE = 'Pictures are on the page that report.save("report.html") writes.'
# For the attention maps of a page; plotly itself takes 4.8 MB.
MAP_BYTES = 700_000


@dataclass
class Section:
    """One report and what the page shows of it.

    Args:
        report: the findings of the comparison.
        tensors: ratio of the error of each tensor to its limit, by check, the worst tensors first.
        difference: picture of the errors of every operation.
        losses: picture of the losses of both sides.
        heads: attention maps.
        missing: reason why pictures are missing.
    """

    report: Findings
    tensors: dict[str, dict[str, float]]
    difference: Picture | None = None
    losses: Picture | None = None
    heads: list[Picture] = field(default_factory=list)
    missing: str = ""

    @property
    def pictures(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.difference or self.losses or self.heads)


def write_page(reports: Sequence[Findings], path: str) -> None:
    """Write reports as one page of HTML with everything in it: it asks the network for nothing.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    text = page(reports)
    with replacing(path) as whole:
        whole.write_text(text, encoding="utf-8")


def page(reports: Sequence[Findings], pictures: bool = True) -> str:
    """Return the page, with pictures or, in a hundredth of the size, without.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    check_installed()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"wording": wording, "tolerance": tolerance, "share": scale.share}
    if pictures:
        parts = sections(reports)
    else:
        parts = [Section(report, _tensors(report), missing=SAVE) for report in reports]
    # Where nothing is drawn, plotly is left out.
    script = get_plotlyjs() if any(part.pictures for part in parts) else ""
    template = templates.get_template("page.html.j2")
    return template.render(sections=parts, plotly=script, legend=scale.legend())


def check_installed() -> None:
    """Raise before a long run whose page could not be written.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    try:
        for package in ("jinja2", "plotly"):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError("a page needs jinja2 and plotly: pip install jinja2 plotly") from error


def sections(reports: Sequence[Findings]) -> list[Section]:
    """Return a section for each report; of several, only those that differ have attention maps."""
    alone = len(reports) == 1
    share = MAP_BYTES // max(sum(not report.passed for report in reports), 1)
    return [_section(report, share if alone or not report.passed else 0) for report in reports]


def _section(report: Findings, size: int) -> Section:
    from flax_attn.parity.report import figures

    section = Section(report, _tensors(report))
    if report.difference is not None and report.difference.steps:
        section.difference = figures.difference(report.difference)
    if report.pair is None:
        return section
    training = report.check("training")
    # Where the check has run, both are trained; nothing is trained for a page.
    if training is not None and training.errors:
        flax, torch = report.pair.trained
        section.losses = figures.losses(flax["loss"], torch["loss"], training.limit)
    if size:
        section.heads, section.missing = _attention(report, size)
    return section


def _tensors(report: Findings) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    # A rule of 0 is that of a count, which has no ratio to show.
    checks = [check for check in report.checks if check.limit]
    for check in checks:
        for name, error in check.errors.items():
            tensor = name.removeprefix(GRADIENT_OF)
            row = found[tensor]
            ratio = wording.times(error, check.limit)
            # A tensor and its gradient share a row, which shows the worse.
            row[check.name] = max(row.get(check.name, 0.0), ratio)
    return _worst_rows(found)


def _worst_rows(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    worst = {name: max(ratios.values()) for name, ratios in rows.items()}
    order = sorted(rows, key=lambda name: -worst[name])
    return {name: rows[name] for name in order[:TENSORS]}


def _attention(report: Findings, size: int) -> tuple[list[Any], str]:
    """Return as many maps as fit, the layers that differ most first, and why others are missing."""
    from flax_attn.parity.report import figures

    try:
        layers = _layers(report)
    # A module may be one that cannot be observed; the rest of the page stands.
    except Exception as error:
        return [], f"There are none: {error}"
    drawn = {}
    for name in sorted(layers, key=lambda name: -_apart(*layers[name])):
        heads = figures.attention(name, *layers[name])
        size -= sum(len(head.data) for head in heads)
        if size < 0:
            break
        drawn[name] = heads
    shown = []
    for name in layers:
        shown += drawn.get(name, [])
    left = len(layers) - len(drawn)
    if not left:
        return shown, ""
    return shown, (
        f"{left} of {len(layers)} layers, those that differ least, are left out to keep the page"
        " small."
    )


def _layers(report: Findings) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    if report.difference is not None:
        return report.difference.attention
    assert report.pair is not None
    from flax_attn.parity.trace.difference import difference

    with on_cpu():
        return difference(report.pair).attention


def _apart(flax: np.ndarray, torch: np.ndarray) -> float:
    return float(np.max(np.abs(flax - torch)))
