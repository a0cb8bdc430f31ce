"""`flax-attn bench`: time, memory and growth beside the rivals; and what TPU chips would take."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flax_attn.cli import common


def add(commands: Any) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure time, memory and growth beside PyTorch, jax.nn, Flax and attnax",
        description="Time every rival on the same inputs in turns, after its results agree. It judges no time.",
    )
    bench.add_argument("--quick", action="store_true", help="small shapes, in a minute")
    shape = {"action": "append", "default": [], "metavar": "B,N,T,H"}
    bench.add_argument("--shape", type=common.sizes("b,n,t,h"), help="only this one; may be repeated", **shape)
    bench.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one of ours; may be repeated, and ratios are about the first",
    )
    bench.add_argument("--rounds", type=common.count, default=7, help="turns of each rival (default 7)")
    bench.add_argument("--json", metavar="FILE", help="write all that was measured to FILE")
    bench.add_argument("--plot", metavar="FILE", help="draw time and memory over T to FILE (.png, .svg, .pdf)")
    bench.add_argument("--models", action="store_true", help="measure GPT-2 small beside transformers instead")
    bench.add_argument("--tpu", action="store_true", help="compile for TPU chips instead, without one")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    if options.tpu:
        return _tpu()
    if options.models:
        return _models(options)
    _check_backends(options.backend)
    common.check_writable(options.json)
    common.check_writable(options.plot)
    if options.plot and options.shape:
        raise common.UsageError("--plot shows the growth over T, which --shape leaves out: give one of them")
    report = _measure(options)
    _print(report)
    if options.json:
        report.write(options.json)
    if options.plot:
        _plot(report, options.plot)
    return 0


def _check_backends(names: list[str]) -> None:
    from flax_attn.backends.registry import check_backend

    try:
        for name in names:
            check_backend(name)
    except ValueError as error:
        raise common.UsageError(str(error)) from None


def _measure(options: argparse.Namespace) -> Any:
    from flax_attn.bench import command

    with common.progress() as progress:
        task = progress.add_task("preparing")

        def tell(contests, contest):
            progress.update(task, total=len(contests), completed=contests.index(contest), description=contest.title)
            if not sys.stderr.isatty():  # where no bar is drawn
                print(f"{contests.index(contest) + 1}/{len(contests)} {contest.title}", file=sys.stderr, flush=True)

        return command.run(options.shape, options.backend, options.rounds, options.quick, tell)


def _print(report: Any) -> None:
    from flax_attn.bench.report import LEGEND
    from flax_attn.bench.tables import notes, tables

    console = common.console(120)
    for table in tables(report):
        console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    for line in notes(report):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _plot(report: Any, path: str) -> None:
    from flax_attn.bench.plot import plot_growth

    try:
        plot_growth(report).savefig(path, dpi=150)
    except (ImportError, OSError, ValueError) as error:  # no matplotlib, no such picture format, no way to write
        raise common.UsageError(str(error)) from None
    print(f"wrote {path}")


def _models(options: argparse.Namespace) -> int:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise common.UsageError(f'{error}: it stands beside transformers, pip install "flax-attn[bench]"') from None
    from flax_attn.bench import models

    tell = lambda task: print(task, file=sys.stderr, flush=True)  # noqa: E731
    common.console(150).print(models.table(list(models.rows(options.rounds, options.quick, tell))))
    return 0


def _tpu() -> int:
    from flax_attn.bench import tpu

    try:
        common.console(140).print(tpu.report())
    except ImportError as error:
        raise common.UsageError(str(error)) from None
    return 0
