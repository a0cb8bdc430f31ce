"""`flax-attn bench`: measure time and memory beside other implementations."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common

if TYPE_CHECKING:
    from flax_attn.bench.report import BenchmarkReport


def add(commands: Any) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure time, memory and growth beside PyTorch, jax.nn, Flax and attnax",
        description=(
            "Time implementations on the same inputs, in turns, after a check that their results"
            " agree."
        ),
    )
    bench.add_argument("--quick", action="store_true", help="small shapes: in a minute")
    shape = {"action": "append", "default": [], "metavar": "B,T,N,H"}
    bench.add_argument(
        "--shape",
        type=common.sizes("b,t,n,h"),
        help="only this one, in the order of the arrays: batch, tokens, heads, width of a head; may"
        " be repeated",
        **shape,
    )
    bench.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one of ours; may be repeated, and ratios are about the first",
    )
    bench.add_argument(
        "--rounds", type=common.count, default=7, help="turns of each implementation (default 7)"
    )
    bench.add_argument("--json", metavar="FILE", help="write all that was measured to FILE")
    bench.add_argument(
        "--plot", metavar="FILE", help="draw time and memory over T to FILE (.png, .svg, .pdf)"
    )
    bench.add_argument(
        "--models", action="store_true", help="measure GPT-2 small beside transformers instead"
    )
    bench.add_argument(
        "--families",
        action="store_true",
        help="measure models with experts, latents or states instead, likewise",
    )
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    if options.models or options.families:
        return _models(options)
    # What can be refused is, before a run of minutes.
    _check_backends(options.backend)
    common.check_writable(options.json)
    common.check_writable(options.plot)
    if options.plot:
        common.need("matplotlib", "--plot")
    # A curve over T needs several of them.
    if options.plot and options.shape:
        raise common.UsageError(
            "--plot shows the growth over T, which --shape leaves out: give one of them"
        )
    report = _run(options)
    _print(report)
    if options.json:
        report.write(options.json)
    if options.plot:
        _plot(report, options.plot)
    return 0


def _check_backends(names: list[str]) -> None:
    from flax_attn.backends.registry import check_backend

    with common.usage_errors(ValueError):
        for name in names:
            check_backend(name)


def _run(options: argparse.Namespace) -> BenchmarkReport:
    from flax_attn.bench import suite

    with common.progress() as progress:
        task = progress.add_task("preparing")

        def show(benchmarks, benchmark):
            # A benchmark takes seconds to minutes, so that the bar moves in uneven steps.
            done = benchmarks.index(benchmark)
            progress.update(
                task, total=len(benchmarks), completed=done, description=benchmark.title
            )
            if not sys.stderr.isatty():  # where no bar is drawn
                print(
                    f"{done + 1}/{len(benchmarks)} {benchmark.title}", file=sys.stderr, flush=True
                )

        shapes = [(b, n, t, h) for b, t, n, h in options.shape]
        return suite.run(shapes, options.backend, options.rounds, options.quick, show)


def _print(report: BenchmarkReport) -> None:
    from flax_attn.bench.report import LEGEND
    from flax_attn.bench.tables import notes, tables

    console = common.console(120)
    for table in tables(report):
        console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    for line in notes(report):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _plot(report: BenchmarkReport, path: str) -> None:
    from flax_attn.bench.plot import plot_growth

    common.save_figure(lambda: plot_growth(report), path)


_FAMILIES = "models of 4 layers, 512 wide: experts, latents, states"


def _models(options: argparse.Namespace) -> int:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise common.UsageError(
            f"{error}. --models and --families need: pip install torch transformers"
        ) from None
    from flax_attn.bench import families, models, tasks

    what, title = (families, _FAMILIES) if options.families else (models, "GPT-2 small")
    show = lambda task: print(task, file=sys.stderr, flush=True)  # noqa: E731
    results = list(what.run(options.rounds, options.quick, show))
    common.console(150).print(tasks.table(results, f"{title}, float32 unless a row says otherwise"))
    return 0
