"""Reports as one page of HTML that needs nothing else. Needs `pip install "flax-attn[report]"`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.report import wording
from flax_attn.parity.report.report import Report

LOWEST, HIGHEST = 1e-6, 1e12  # error over rule, at both ends of a bar


def write_page(reports: Sequence[Report], path: str) -> None:
    """Write reports as one page of HTML with everything in it: it asks the network for nothing.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    Path(path).write_text(page(reports), encoding="utf-8")


def page(reports: Sequence[Report]) -> str:
    """Return the page.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    check_installed()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    from flax_attn.parity.report import figures
    from flax_attn.parity.report.sections import sections

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"wording": wording, "tolerance": tolerance, "share": share}
    template = templates.get_template("page.html.j2")
    return template.render(sections=sections(reports), plotly=get_plotlyjs(), legend=figures.legend())


def check_installed() -> None:
    """Say what is missing, before a long run whose page could not be written.

    Raises:
        ImportError: if jinja2 or plotly is not installed.
    """
    try:
        for package in ("jinja2", "plotly"):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError('a page needs jinja2 and plotly: pip install "flax-attn[report]"') from error


def share(times: float) -> float:
    """Return how long the bar is of an error that is some times its rule, in percent, on a logarithmic scale.

    Example:
        >>> [round(share(times), 1) for times in (0.0, 1e-6, 1.0, 1e3, float("inf"))]
        [0.0, 0.0, 33.3, 50.0, 100.0]
    """
    inside = np.clip(times, LOWEST, HIGHEST)
    return float(100 * np.log10(inside / LOWEST) / np.log10(HIGHEST / LOWEST))
