"""`flax-attn parity`: the proof of our own table of variants."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common, reports
from flax_attn.cli.guard import CANNOT_RUN

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report
    from flax_attn.proof.variants import Variant

DESCRIPTION = (
    "Give each PyTorch module of this package and its Flax twin the same random weights, and"
    " compare outputs, gradients,\ndropout and caches; --full adds eager against compiled, and"
    " training runs. Exits with 0 if all are equal, 1 if anything\ndiffers, 64 on bad usage. On a"
    " mesh, variants that it cannot split are not compared, and are named apart. Two modules of\n"
    "your own are compared by flax-attn compare."
)


def add(commands: Any) -> None:
    """Add the command."""
    parity = commands.add_parser(
        "parity", help="prove that modules equal their PyTorch twins", description=DESCRIPTION
    )
    parity.add_argument(
        "--variant",
        action="append",
        metavar="NAME",
        help="only this variant or class, such as causal or CausalAttention; may be repeated",
    )
    parity.add_argument(
        "--check", action="append", metavar="NAME", help="only this check; may be repeated"
    )
    parity.add_argument(
        "--full", action="store_true", help="compare eager with compiled, and training runs, too"
    )
    parity.add_argument(
        "--sizes",
        choices=("small", "real"),
        default="small",
        help=(
            "real: layers as wide as those of models, on 2,048 tokens and more, in float64 and in"
            " all lower dtypes (default small)"
        ),
    )
    parity.add_argument(
        "--seed", type=common.seed, default=0, help="of the weights and inputs (default 0)"
    )
    parity.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help=(
            "run the Flax modules on a mesh of simulated devices, of data, fsdp, tensor, context"
            " and expert: data=2,tensor=2,context=2"
        ),
    )
    reports.add(parity)
    # Only to say which command compares them.
    parity.add_argument("modules", nargs="*", help=argparse.SUPPRESS)
    parity.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    if options.modules:
        given = " ".join(options.modules)
        raise common.UsageError(
            f"parity compares the variants of this package; got {given}. Compare two modules of"
            f" your own by flax-attn compare {given}, and a variant by --variant NAME"
        )
    if not options.against:
        common.need_torch("parity")
    if options.mesh is not None and (options.against or options.device):
        raise common.UsageError(
            "--mesh runs our own table against PyTorch; got it with --against or --device"
        )
    real = options.sizes == "real"
    if real and (options.mesh is not None or options.full):
        raise common.UsageError(
            "--sizes real has rows and checks of its own; got it with --mesh or --full"
        )
    reports.check(options)
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError

    with common.usage_errors(PairingError, ConversionError), reports.whole_export(options):
        found = _variants(options)
    unwritten = reports.write(found, options, of_a_table=True)
    _show(found, in_full=bool(options.check), full=options.full or real)
    for line in unwritten:
        print(f"flax-attn: {line}", file=sys.stderr)
    # That nothing was compared is no proof.
    judged = _judged(found)
    if not judged or not all(report.passed for report in judged):
        return 1
    return CANNOT_RUN if unwritten else 0


def _variants(options: argparse.Namespace) -> list[Report]:
    """Return the reports of the variants that were asked for."""
    from flax_attn.aot.simulated import simulated
    from flax_attn.plan.job import parse_mesh
    from flax_attn.proof.run import ProofRun

    with common.usage_errors(ValueError):
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        files = options.export, options.against
        real = options.sizes == "real"
        checks = common.known_checks(options.check)
        run = ProofRun(options.seed, checks, options.full, *files, mesh, real)
        variants = run.select(options.variant)
        simulated(math.prod((mesh or {}).values()))
    if options.against:
        variants = _recorded(variants, options)
    device = common.device(options.device)
    workers = min(os.cpu_count() or 1, _WORKERS)
    # A page draws from the modules, and a difference is located in them: both need them in this
    # process. Rows of real sizes take several GB.
    alone = run.checks or device or workers == 1 or len(variants) <= workers or real
    with common.progress() as progress:
        if alone or any(Path(path).suffix == ".html" for path in options.report):
            return [
                run.report(variant, device)
                for variant in progress.track(variants, description="comparing")
            ]
        task = progress.add_task("comparing", total=len(variants))
        return run.reports(
            [variant.name for variant in variants], workers, lambda: progress.advance(task)
        )


_WORKERS = 4  # the most processes, of about 1 GB each


def _recorded(variants: list[Variant], options: argparse.Namespace) -> list[Variant]:
    """Return the variants that an export holds; raise if one requested by name is missing."""
    from flax_attn.parity.adapters import recording

    # Asked for by name, one that is missing is an error.
    recordings = recording.load(
        options.against, [v.name for v in variants] if options.variant else None
    )
    found = [variant for variant in variants if variant.name in recordings]
    if not found:
        raise common.UsageError(
            f"{options.against} holds no variant of the table; it holds {', '.join(recordings)}"
        )
    return found


def _judged(reports: list[Report]) -> list[Report]:
    """Return the reports of what was compared: not of variants that a mesh cannot split."""
    return [report for report in reports if report.check("mesh") is None]


def _show(found: list[Report], in_full: bool, full: bool) -> None:
    from flax_attn.parity.report import console as tables

    console = common.console(145)
    if in_full:
        for report in found:
            console.print(tables.verdict(report))
        return
    console.print(tables.variants(found))
    console.print(tables.legend(found), style="dim", highlight=False)
    for line in tables.notes(found):
        console.print(line, style="dim", highlight=False)
    for line in tables.failures(found):
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    # A variant that a mesh cannot split is neither equal nor different.
    judged = _judged(found)
    good = sum(report.passed for report in judged)
    console.print(
        f"\n{good} of {len(judged)} variants equal their PyTorch twin",
        style="bold",
        highlight=False,
    )
    if len(judged) < len(found):
        console.print(
            f"{len(found) - len(judged)} cannot be split over this mesh, and were not compared:"
        )
    for report in found:
        if report not in judged:
            console.print(
                f"  {report.name}: {report.checks[0].skipped}", highlight=False, soft_wrap=True
            )
    if not full:
        console.print(
            "Training, and eager against compiled for each row: flax-attn parity --full",
            style="dim",
            highlight=False,
        )
