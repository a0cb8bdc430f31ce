"""`flax-attn compare`: any JAX module against any PyTorch module, from a shell."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common, inputs, reports
from flax_attn.cli.request import Request, read
from flax_attn.cli.specs import CannotCompareError, Loader
from flax_attn.cli.watch import at_changes, stand_by
from flax_attn.convert.replacing import unfinished

if TYPE_CHECKING:
    from flax_attn.parity.journal import Journal
    from flax_attn.parity.report.report import Report

DESCRIPTION = (
    "Give both modules the same random weights, and compare outputs, gradients, dtypes and training"
    " in every check that\napplies. A side is FILE.py:NAME or pkg.mod:NAME: a module, a class or"
    " function that returns one, or a function of\narrays; the PyTorch side may be hf:TYPE, a small"
    " model of that type from transformers.\n\nExit codes: 0 equal, 1 different, 2 equal where"
    " tested, 3 could not compare, 64 bad usage."
)


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="say whether a JAX module and a PyTorch module are the same function",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    reports.add(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="compare again whenever one of the files changes, until Ctrl-C",
    )
    # A process of --watch, which waits for a line of input, and writes the files that it read.
    parser.add_argument("--standby", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(run=_command_of, mutants=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which modules are compared, and how."""
    parser.add_argument("flax", metavar="FLAX", help="spec of the JAX side, such as port.py:Model")
    parser.add_argument("torch", metavar="TORCH", nargs="?", help="spec of the PyTorch side")
    parser.add_argument("--input", action="append", default=[], metavar="SPEC", help=inputs.HELP)
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of both calls that is no array, such as causal=True; may be repeated",
    )
    for framework in ("flax", "torch"):
        help_text = f"spec of call(module, *inputs), which calls the {framework} side"
        parser.add_argument(f"--{framework}-call", metavar="SPEC", help=help_text)
    parser.add_argument(
        "--layout",
        metavar="NAME",
        default="auto",
        help=(
            "which parameter is which: auto (the default) pairs them by layers, none keeps the"
            " weights as they are; or the name of a layout, or the spec of a table"
        ),
    )
    parser.add_argument(
        "--rules",
        metavar="SPEC",
        help="spec of rules for the parameters that auto cannot pair; it pairs the rest",
    )
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="only this check; may be repeated"
    )
    parser.add_argument(
        "--seed", type=common.seed, default=0, help="of the weights and inputs (default 0)"
    )
    parser.add_argument("--name", help="of the comparison (default: the name in FLAX)")
    parser.add_argument("--full", action="store_true", help="print more than 60 lines")
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text"
    )


def _command_of(options: argparse.Namespace) -> int:
    if options.standby:
        own = {"--watch", "--standby", options.standby}
        # A report names the command that makes it again, once.
        options.arguments = [one for one in options.arguments if one not in own]
        return _compare(options) if stand_by() else 0
    if options.watch:
        specs = (options.flax, options.torch or "")
        homes = (spec.rpartition(":")[0] for spec in specs)
        files = [home for home in homes if home.endswith(".py")]
        return at_changes(options.arguments, files)
    return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    if not options.against:
        common.need_torch("compare")
    reports.check(options)
    if options.json != "-":
        common.check_writable(options.json)
    request = read(options)
    from flax_attn.parity.cpu import on_cpu
    from flax_attn.parity.report.state import EXIT_CODES

    # x64 is on before a factory builds any table or constant.
    with on_cpu(), reports.whole_export(options):
        report = make_report(request, options)
    unwritten = reports.write([report], options, of_a_table=False)
    if options.standby:
        assert report.request is not None, "the command sets it"
        Path(options.standby).write_text(json.dumps(report.request["files"]))
    _show(report, options)
    for line in unwritten:
        print(f"flax-attn: {line}", file=sys.stderr)
    return EXIT_CODES["not compared" if unwritten else report.state]


def make_report(request: Request, options: argparse.Namespace) -> Report:
    """Return the report, or one that says what stopped the comparison."""
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError
    from flax_attn.parity.adapters.quick_jit import quick_operations

    with Loader() as loader, quick_operations():
        try:
            return _report(request, loader, options)
        except (CannotCompareError, PairingError, ConversionError) as error:
            reason = str(error)
        except common.UsageError:
            raise
        # Who reads the report must not mistake it for a difference.
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            reason = f"the comparison itself raised {type(error).__name__}: {error}"
        print(f"flax-attn: could not compare: {reason}", file=sys.stderr)
        return _refused(reason, replace(request, files=loader.files()), options)


def _report(request: Request, loader: Loader, options: argparse.Namespace) -> Report:
    from flax_attn.parity import CHECKS
    from flax_attn.parity.adapters import recording
    from flax_attn.parity.compare import report_on

    with common.progress() as progress:
        task = progress.add_task("comparing", total=len(request.checks or CHECKS))

        def watch(name: str) -> None:
            progress.update(task, description=name, advance=1)

        pair = request.pair(
            loader,
            request.seed,
            _name(request, options),
            record=bool(options.export),
            device=common.device(options.device),
        )
        request = replace(request, files=loader.files())
        with _journal(request) as journal:
            report = report_on(
                *(pair, _name(request, options), request.checks),
                command=_command(options),
                watch=watch,
                journal=journal,
                mutants=options.mutants,
            )
    report = replace(report, request=asdict(request))
    if options.export:
        recording.save(report, options.export)
    return report


@contextmanager
def _journal(request: Request) -> Iterator[Journal | None]:
    """Yield the journal of a comparison; another source, version or option has another one."""
    from flax_attn.parity.journal import Journal
    from flax_attn.parity.report.report import environment

    # After an update, or a change of the code, the check may pass: it is another comparison.
    asked = json.dumps([asdict(request), environment()], sort_keys=True)
    key = hashlib.sha256(asked.encode()).hexdigest()[:16]
    try:
        journal = Journal(common.cache_folder() / "journals" / f"{key}.json")
        journal.path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
        print(
            f"flax-attn: a check that ends the process will not be known: {error}. Set"
            " XDG_CACHE_HOME",
            file=sys.stderr,
        )
        yield None
        return
    for name in journal.left_out:
        print(f"flax-attn: {name}: {journal.reason()}", file=sys.stderr)
    with unfinished(journal.path):
        yield journal


def _command(options: argparse.Namespace) -> str:
    # A report names the command that makes it again.
    return shlex.join(["flax-attn", *options.arguments])


def _name(request: Request, options: argparse.Namespace) -> str:
    return options.name or request.flax.rpartition(":")[2]


def _refused(reason: str, request: Request, options: argparse.Namespace) -> Report:
    from flax_attn.parity.report.report import Report, environment

    return Report(
        _name(request, options),
        [],
        seed=request.seed,
        environment=environment(),
        command=_command(options),
        request=asdict(request),
        error=reason,
    )


def _show(report: Report, options: argparse.Namespace) -> None:
    from flax_attn.parity.report import console, document

    # Nothing else on stdout: a program reads it.
    if options.json == "-":
        print(document.text(document.document(report)), end="")
        return
    if options.json:
        document.write(document.document(report), options.json)
    if report.error:  # it was said
        return
    shown = common.console(145)
    if options.full:
        shown.print(console.verdict(report))
    else:
        print(console.short(report, shown))
