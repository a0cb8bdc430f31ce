"""The pytest plugin: a fixture `parity`, which fails a test where two modules differ.

    def test_my_port(parity):
        parity(MyFlaxBlock(rngs=nnx.Rngs(0)), MyTorchBlock().eval(), [(2, 7, 16)])

It takes the arguments of `flax_attn.parity.compare`. With `--parity-report DIR` every comparison
that fails also writes its page there. pytest finds the plugin by itself wherever flax-attn is
installed, so that it is no part of `flax_attn`, and imports it with the first use of the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the pages."""
    help_text = "write a page with pictures for every comparison that fails"
    parser.getgroup("parity").addoption("--parity-report", metavar="DIR", help=help_text)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Compare two modules, and fail the test where they differ."""
    from flax_attn.parity import PairingError, ParityError, compare

    def check(*arguments, **options) -> Report:
        # What failed is the line of the test.
        __tracebackhide__ = True
        try:
            report = compare(*arguments, **{"name": request.node.name, **options})
        except PairingError as error:
            # Without the frames of the comparison.
            raise error.with_traceback(None) from error.__cause__
        report = replace(report, command=f"pytest '{request.node.nodeid}'")
        if not report.passed:
            _write(report, request.config.getoption("--parity-report"))
            raise ParityError(report)
        return report

    return check


def _write(report: Report, folder: str | None) -> None:
    if folder is not None:
        from flax_attn.parity.adapters.recording import file_name
        from flax_attn.parity.report.page import write_page

        Path(folder).mkdir(parents=True, exist_ok=True)
        write_page([report], str(Path(folder) / f"{file_name(report.name)}.html"))
