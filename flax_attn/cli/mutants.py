"""`flax-attn mutants`: which edits of the JAX side a comparison detects."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from flax_attn.cli import common, compare
from flax_attn.cli.request import read

if TYPE_CHECKING:
    from rich.table import Table

    from flax_attn.parity.mutants import Mutants

DESCRIPTION = (
    "Compare two modules; if they are equal, edit one operation of the JAX side after another, as"
    " porters get it wrong,\nand name the check that detects each. Exits with 0 if all are"
    " detected that change anything, 1 if one is not or the\nmodules differ."
)


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "mutants", help="say how much a pass of two modules is worth", description=DESCRIPTION
    )
    compare.add_arguments(parser)
    parser.add_argument(
        "--count",
        dest="mutants",
        type=common.count,
        default=50,
        help="number of edits (default 50)",
    )
    parser.set_defaults(run=_mutants, against=None, export=None, device=None)


def _mutants(options: argparse.Namespace) -> int:
    common.need_torch("mutants")
    request = read(options)
    from flax_attn.parity.cpu import on_cpu
    from flax_attn.parity.report.state import EXIT_CODES

    with on_cpu():
        report = compare.make_report(request, options)
    if report.mutants is None:
        print(report.explain(), file=sys.stderr)
        return EXIT_CODES[report.state]
    console = common.console(145)
    console.print(table(report.mutants))
    console.print(next(report.mutants.lines()), style="bold", highlight=False)
    return 1 if report.mutants.undetected else 0


def table(found: Mutants) -> Table:
    """Return the table of mutants, those that were not detected first."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False)
    for column in ("kind", "line", "edit", "detected by"):
        rows.add_column(column, overflow="fold")
    for mutant in sorted(found.mutants, key=lambda one: bool(one.detected_by or one.equivalent)):
        verdict = mutant.detected_by or ("changes nothing" if mutant.equivalent else "NO CHECK")
        cells = (mutant.kind, str(mutant.place), mutant.sentence, verdict)
        rows.add_row(*map(Text, cells))
    return rows
