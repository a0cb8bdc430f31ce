"""Reports and exports as files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common
from flax_attn.convert.replacing import HELD, unfinished

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report


def add(parser: Any) -> None:
    """Add the options for files."""
    written = parser.add_argument_group("files")
    written.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="FILE",
        help=(
            "write the report: .json, .xml (JUnit, for continuous integration) or .html (a page"
            " with pictures; needs flax-attn[report]); may be repeated"
        ),
    )
    written.add_argument(
        "--export",
        metavar="DIR",
        help="write the PyTorch results, to compare with where torch is not",
    )
    parser.add_argument(
        "--against", metavar="DIR", help="compare with an export instead of PyTorch"
    )
    parser.add_argument(
        "--device",
        metavar="PLATFORM",
        help="with --against: run dtypes below float64 there: gpu, tpu (default cpu)",
    )


def check(options: argparse.Namespace) -> None:
    """Raise before any work is done unless all files can be written."""
    for path in options.report:
        common.check_writable(path)
        if Path(path).suffix not in _WRITERS:
            raise common.UsageError(
                f"cannot write {path}: its suffix must be one of {', '.join(_WRITERS)}"
            )
        if Path(path).suffix == ".html":
            from flax_attn.parity.report import page

            with common.usage_errors(ImportError):
                page.check_installed()


def write(reports: list[Report], options: argparse.Namespace, of_a_table: bool) -> list[str]:
    """Write the requested files, and return a line for each that cannot be written."""
    unwritten = []
    # What one format cannot do must not cost the others: an hour may have gone into the reports.
    for path in options.report:
        try:
            _WRITERS[Path(path).suffix](reports, path, of_a_table)
        except (OSError, ImportError) as error:
            unwritten.append(f"cannot write {path}: {error}")
    return unwritten


def _json(reports: list[Report], path: str, of_a_table: bool) -> None:
    from flax_attn.parity.report import document

    (document.write_table if of_a_table else document.write_one)(reports, path)


def _junit(reports: list[Report], path: str, of_a_table: bool) -> None:
    from flax_attn.parity.report.junit import write_junit

    write_junit(reports, path)


def _page(reports: list[Report], path: str, of_a_table: bool) -> None:
    from flax_attn.parity.report.page import write_page

    write_page(reports, path)


_WRITERS = {".json": _json, ".xml": _junit, ".html": _page}


@contextmanager
def whole_export(options: argparse.Namespace) -> Iterator[None]:
    """Export files to a temporary folder, and move all of them to `--export` at the end."""
    if not options.export:
        yield
        return
    # Beside its place, so that it is moved there and not copied.
    folder = Path(options.export).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished(folder.with_name(f".{folder.name}.{os.getpid()}")) as within:
            within.mkdir()
            options.export = str(within)
            yield
            with HELD:
                folder.mkdir(exist_ok=True)
                for path in within.iterdir():
                    os.replace(path, folder / path.name)
    finally:
        options.export = str(folder)
