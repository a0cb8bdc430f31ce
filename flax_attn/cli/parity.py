"""`flax-attn parity`: the proof."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common

if TYPE_CHECKING:
    from flax_attn.parity.cases import Case
    from flax_attn.parity.report import Report


def add(commands: Any) -> None:
    """Add the command."""
    parity = commands.add_parser(
        "parity",
        help="prove that each variant equals its PyTorch twin",
        description="Copy random weights from each PyTorch module to its Flax twin, and compare outputs, gradients and "
        "training. Exits with 1 if any variant differs.",
    )
    parity.add_argument(
        "--variant",
        action="append",
        metavar="NAME",
        help="only this row or class, such as causal or CausalAttention; may be repeated",
    )
    parity.add_argument("--seed", type=common.seed, default=0, help="of the weights and inputs (default 0)")
    parity.add_argument("--json", metavar="FILE", help="write all that was measured to FILE")
    parity.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError:
        raise common.UsageError('parity needs PyTorch: pip install "flax-attn[torch]"') from None
    from flax_attn.parity import console as tables
    from flax_attn.parity.cases import select
    from flax_attn.parity.report import write_json

    try:
        cases = select(options.variant)
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    common.check_writable(options.json)
    torch.set_num_threads(1)  # several cases run at a time, and the matrices are small
    reports = _climb_all(cases, options.seed)
    if options.json:
        try:
            write_json(reports, options.seed, options.json)
        except OSError as error:  # what was measured is still printed
            print(f"flax-attn: cannot write {options.json}: {error}", file=sys.stderr)
    console = common.console(130)
    console.print(tables.variants(reports))
    console.print(tables.LEGEND, style="dim", highlight=False)
    for line in tables.notes(reports):
        console.print(line, style="dim", highlight=False)
    for line in tables.failures(reports):
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    good = sum(report.passed for report in reports)
    console.print(f"\n{good} of {len(reports)} variants equal their PyTorch twin", style="bold", highlight=False)
    return 0 if good == len(reports) else 1


def _climb_all(cases: list[Case], seed: int) -> list[Report]:
    from flax_attn.parity.table import climb

    reports = []
    with common.progress() as progress, ThreadPoolExecutor(2) as pool:
        task = progress.add_task("comparing", total=len(cases))
        for report in pool.map(lambda case: climb(case, seed), cases):
            reports.append(report)
            progress.advance(task)
    return reports
