"""`flax-attn mutants`: which edits of the JAX side a comparison detects."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from flax_attn.cli import common, targets
from flax_attn.cli.parity import need_torch

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
    parser.add_argument(
        "target", nargs=2, metavar="TARGET", help="pkg.mod:flax_factory pkg.mod:torch_factory"
    )
    parser.add_argument(
        "--count", type=common.count, default=50, help="number of edits (default 50)"
    )
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="only this check; may be repeated"
    )
    parser.add_argument(
        "--seed", type=common.seed, default=0, help="of weights, inputs and edits (default 0)"
    )
    targets.add(parser)
    parser.set_defaults(run=_mutants, against=None, export=None, device=None)


def _mutants(options: argparse.Namespace) -> int:
    need_torch()
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError

    try:
        (report,) = targets.compare(options)
    except (PairingError, ConversionError) as error:
        raise common.UsageError(str(error)) from error
    if report.mutants is None:
        print(report.explain(), file=sys.stderr)
        return 1
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
