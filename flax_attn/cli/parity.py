"""`flax-attn parity`: the proof, of our variants or of any two modules."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common, targets

if TYPE_CHECKING:
    from flax_attn.parity.pair import Pair
    from flax_attn.parity.report.report import Report

DESCRIPTION = """\
Without targets: copy random weights from each PyTorch module to its Flax twin, and compare outputs, gradients and
training. With two targets, pkg.mod:factory each, compare the modules that these functions return. With `mutate`, patch
in known porting faults and see each detected. Exits with 0 if all are equal, 1 if anything differs, 2 on bad usage."""


def add(commands: Any) -> None:
    """Add the command."""
    parity = commands.add_parser("parity", help="prove that modules equal their PyTorch twins", description=DESCRIPTION)
    parity.add_argument("target", nargs="*", metavar="TARGET", help="pkg.mod:flax_factory pkg.mod:torch_factory")
    parity.add_argument(
        "--variant",
        action="append",
        metavar="NAME",
        help="only this row or class, such as causal or CausalAttention; may be repeated",
    )
    parity.add_argument("--check", action="append", metavar="NAME", help="only this check; may be repeated")
    parity.add_argument("--seed", type=common.seed, default=0, help="of the weights and inputs (default 0)")
    targets.add(parity)
    written = parity.add_argument_group("what is written")
    written.add_argument("--json", metavar="FILE", help="all that was measured")
    written.add_argument("--junit", metavar="FILE", help="the checks as JUnit XML, for continuous integration")
    written.add_argument("--html", metavar="FILE", help="one page with pictures; needs flax-attn[report]")
    written.add_argument("--export", metavar="DIR", help="what PyTorch computed, to be compared against without torch")
    parity.add_argument("--against", metavar="DIR", help="compare against an export instead of PyTorch")
    parity.add_argument(
        "--device", metavar="PLATFORM", help="with --against: run dtypes below float64 there: gpu, tpu (default cpu)"
    )
    parity.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    if not options.against:
        _need_torch()
    for path in (options.json, options.junit, options.html):
        common.check_writable(path)
    if options.html:
        _need_page()
    if options.target == ["mutate"]:
        return _mutate(options)
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError

    try:
        reports = targets.compare(options) if options.target else _table(options)
        _write(reports, options)
    except (PairingError, ConversionError) as error:
        raise common.UsageError(str(error)) from error
    _show(reports, in_full=bool(options.target or options.check))
    return 0 if all(report.passed for report in reports) else 1


def _need_torch() -> None:
    try:
        import torch
    except ImportError:
        raise common.UsageError(
            'parity needs PyTorch: pip install "flax-attn[torch]", or compare with an export: --against DIR'
        ) from None
    torch.set_num_threads(1)  # several variants run at a time, and the matrices are small


def _need_page() -> None:
    from flax_attn.parity.report import page

    try:
        page.check_installed()
    except ImportError as error:
        raise common.UsageError(str(error)) from None


def _table(options: argparse.Namespace) -> list[Report]:
    """Return the reports of the rows of the table."""
    from flax_attn.proof.table import climb

    pairs, reports = _pairs(options), []
    checks = targets.checks(options)
    # Two at a time, but for checks that are asked for: where they fail and part is found by listening to the process.
    with common.progress() as progress, ThreadPoolExecutor(1 if checks else 2) as pool:
        task = progress.add_task("comparing", total=len(pairs))
        for report in pool.map(lambda row: climb(row[0], options.seed, checks, row[1]()), pairs):
            reports.append(report)
            progress.advance(task)
    return reports


def _pairs(options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Return each row with a function that makes its pair."""
    from flax_attn.parity import export
    from flax_attn.parity.compare import on_cpu
    from flax_attn.proof import table
    from flax_attn.proof.variants import select

    try:
        variants = select(options.variant)
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    recordings, device = {}, common.device(options.device)
    if options.against:
        recordings = export.load(options.against, [variant.name for variant in variants] if options.variant else None)
        variants = [variant for variant in variants if variant.name in recordings]
        if not variants:
            raise common.UsageError(
                f"{options.against} holds no variant of the table; it holds {', '.join(recordings)}"
            )

    def pair(variant: Any) -> Pair:
        with on_cpu():
            if options.against:
                return table.replayed(variant, recordings[variant.name], device)
            return table.pair_of(variant, options.seed, record=bool(options.export))

    return [(variant, lambda variant=variant: pair(variant)) for variant in variants]


def _mutate(options: argparse.Namespace) -> int:
    from flax_attn.proof.faults import detect

    try:
        with common.progress() as progress:
            task = progress.add_task("patching in faults", total=len(detect.FAULTS))
            detections = detect.detect(
                seed=options.seed, watch=lambda name: progress.update(task, description=name, advance=1)
            )
    except detect.FailsWithoutFaultError as error:
        print(f"flax-attn: {error}", file=sys.stderr)
        return 1
    console = common.console(145)
    console.print(detect.table(detections))
    console.print(detect.LEGEND, style="dim", highlight=False)
    console.print(detect.summary(detections), style="bold", highlight=False)
    return 0 if all(found.detected for found in detections) else 1


def _write(reports: list[Report], options: argparse.Namespace) -> None:
    """Write the files that were asked for; what cannot be written is said, and the rest still printed."""
    for path, write in ((options.json, _json), (options.junit, _junit), (options.html, _page)):
        try:
            if path:
                write(reports, path)
        except (OSError, ImportError) as error:
            print(f"flax-attn: cannot write {path}: {error}", file=sys.stderr)
    if options.export:
        from flax_attn.parity import export

        Path(options.export).mkdir(parents=True, exist_ok=True)
        for report in reports:
            export.save(report, options.export)


def _json(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.report import write_json

    write_json(reports, path)


def _junit(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.junit import write_junit

    write_junit(reports, path)


def _page(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.page import write_page

    write_page(reports, path)


def _show(reports: list[Report], in_full: bool) -> None:
    from flax_attn.parity.report import console as tables

    console = common.console(145)
    if in_full:
        for report in reports:
            console.print(tables.verdict(report))
        return
    console.print(tables.variants(reports))
    console.print(tables.LEGEND, style="dim", highlight=False)
    for line in tables.notes(reports):
        console.print(line, style="dim", highlight=False)
    for line in tables.failures(reports):
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    good = sum(report.passed for report in reports)
    console.print(f"\n{good} of {len(reports)} variants equal their PyTorch twin", style="bold", highlight=False)
