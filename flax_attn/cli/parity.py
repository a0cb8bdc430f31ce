"""`flax-attn parity`: the proof, of our variants or of any two modules."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common, targets
from flax_attn.cli.guard import CANNOT_RUN
from flax_attn.convert.replacing import HELD, unfinished

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report
    from flax_attn.proof.variants import Variant

DESCRIPTION = (
    "Without targets: give each PyTorch module of this package and its Flax twin the same random"
    " weights, and compare\noutputs, gradients, dropout and caches; --full adds eager against"
    " compiled, and training runs. With two targets,\npkg.mod:factory each: compare the modules"
    " that these functions return, in every check there is. Exits with 0 if all are\nequal, 1 if"
    " anything differs, 2 on bad usage. On a mesh, variants that it cannot split are not compared,"
    " and are named\napart."
)


def add(commands: Any) -> None:
    """Add the command."""
    parity = commands.add_parser(
        "parity", help="prove that modules equal their PyTorch twins", description=DESCRIPTION
    )
    parity.add_argument(
        "target", nargs="*", metavar="TARGET", help="pkg.mod:flax_factory pkg.mod:torch_factory"
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
    targets.add(parity)
    written = parity.add_argument_group("files")
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
    parity.add_argument(
        "--against", metavar="DIR", help="compare with an export instead of PyTorch"
    )
    parity.add_argument(
        "--device",
        metavar="PLATFORM",
        help="with --against: run dtypes below float64 there: gpu, tpu (default cpu)",
    )
    parity.set_defaults(run=_parity, count=0)


def _parity(options: argparse.Namespace) -> int:
    if not options.against:
        need_torch()
    if options.mesh is not None and (options.target or options.against or options.device):
        raise common.UsageError(
            "--mesh runs our own table against PyTorch; got it with targets, --against or --device"
        )
    for path in options.report:
        _check_report(path)
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError

    try:
        with whole_export(options):
            reports = targets.compare(options) if options.target else _variants(options)
    except (PairingError, ConversionError) as error:
        raise common.UsageError(str(error)) from error
    unwritten = _write(reports, options)
    _show(reports, in_full=bool(options.target or options.check), full=options.full)
    for line in unwritten:
        print(f"flax-attn: {line}", file=sys.stderr)
    # That nothing was compared is no proof.
    judged = _judged(reports)
    if not judged or not all(report.passed for report in judged):
        return 1
    return CANNOT_RUN if unwritten else 0


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


def need_torch() -> None:
    """Raise unless PyTorch is installed; it runs on one thread, since the matrices are small."""
    try:
        import torch
    except ImportError:
        raise common.UsageError(
            'parity needs PyTorch: pip install "flax-attn[torch]", or compare with an export:'
            " --against DIR"
        ) from None
    # The processes that compare share the cores, and would wait for one another's threads.
    torch.set_num_threads(1)


def _check_report(path: str) -> None:
    common.check_writable(path)
    if Path(path).suffix not in _WRITERS:
        raise common.UsageError(
            f"cannot write {path}: its suffix must be one of {', '.join(_WRITERS)}"
        )
    if Path(path).suffix == ".html":
        from flax_attn.parity.report import page

        try:
            page.check_installed()
        except ImportError as error:
            raise common.UsageError(str(error)) from None


def _variants(options: argparse.Namespace) -> list[Report]:
    """Return the reports of the variants that were asked for."""
    from flax_attn.aot.simulated import simulated
    from flax_attn.plan.job import parse_mesh
    from flax_attn.proof.run import ProofRun

    try:
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        files = options.export, options.against
        run = ProofRun(options.seed, targets.checks(options), options.full, *files, mesh)
        variants = run.select(options.variant)
        simulated(math.prod((mesh or {}).values()))
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    if options.against:
        variants = _recorded(variants, options)
    device = common.device(options.device)
    workers = min(os.cpu_count() or 1, _WORKERS)
    # A page draws from the modules, and a difference is located in them: both need them in this
    # process.
    alone = run.checks or device or workers == 1 or len(variants) <= workers
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


def _write(reports: list[Report], options: argparse.Namespace) -> list[str]:
    """Write the requested files, and return a line for each that cannot be written."""
    unwritten = []
    # What one format cannot do must not cost the others: an hour may have gone into the reports.
    for path in options.report:
        try:
            _WRITERS[Path(path).suffix](reports, path)
        except (OSError, ImportError) as error:
            unwritten.append(f"cannot write {path}: {error}")
    return unwritten


def _json(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.report import write_json

    write_json(reports, path)


def _junit(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.junit import write_junit

    write_junit(reports, path)


def _page(reports: list[Report], path: str) -> None:
    from flax_attn.parity.report.page import write_page

    write_page(reports, path)


_WRITERS = {".json": _json, ".xml": _junit, ".html": _page}


def _judged(reports: list[Report]) -> list[Report]:
    """Return the reports of what was compared: not of variants that a mesh cannot split."""
    return [report for report in reports if report.check("mesh") is None]


def _show(reports: list[Report], in_full: bool, full: bool) -> None:
    from flax_attn.parity.report import console as tables

    console = common.console(145)
    if in_full:
        for report in reports:
            console.print(tables.verdict(report))
        return
    console.print(tables.variants(reports))
    console.print(tables.legend(reports), style="dim", highlight=False)
    for line in tables.notes(reports):
        console.print(line, style="dim", highlight=False)
    for line in tables.failures(reports):
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    # A variant that a mesh cannot split is neither equal nor different.
    judged = _judged(reports)
    good = sum(report.passed for report in judged)
    console.print(
        f"\n{good} of {len(judged)} variants equal their PyTorch twin",
        style="bold",
        highlight=False,
    )
    if len(judged) < len(reports):
        console.print(
            f"{len(reports) - len(judged)} cannot be split over this mesh, and were not compared:"
        )
    for report in reports:
        if report not in judged:
            console.print(
                f"  {report.name}: {report.checks[0].skipped}", highlight=False, soft_wrap=True
            )
    if not full:
        console.print(
            "Training, and eager against compiled: flax-attn parity --full",
            style="dim",
            highlight=False,
        )
