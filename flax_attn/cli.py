"""The command line: `flax-attn parity`, `flax-attn show`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import flax_attn

if TYPE_CHECKING:
    from flax_attn.parity.cases import Case
    from flax_attn.parity.ladder import Check

JOURNEY = "Your journey starts with one step"


class UsageError(Exception):
    """What the user asked for cannot be done; the message says what can."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a parity failure, 2 bad usage."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UsageError as error:
        print(f"flax-attn: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flax-attn", description=flax_attn.__doc__)
    parser.add_argument("--version", action="version", version=f"flax-attn {flax_attn.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

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
    parity.add_argument("--seed", type=_seed, default=0, help="of the weights and inputs (default 0)")
    parity.add_argument("--json", metavar="FILE", help="write all that was measured to FILE")
    parity.set_defaults(run=_parity)

    show = commands.add_parser(
        "show",
        help="draw attention maps, or print the shape of every step",
        description="Run a text through one layer with random weights and show what it attends to.",
    )
    show.add_argument("--text", default=JOURNEY, help=f"words to attend over (default {JOURNEY!r})")
    show.add_argument("--out", metavar="FILE", help="write the attention maps to FILE (.png, .svg, .pdf)")
    show.add_argument("--shapes", action="store_true", help="print every step of the layer with its shape")
    show.add_argument("--heads", type=int, default=4, help="number of heads (default 4)")
    show.add_argument("--kv-heads", type=int, help="number of key/value heads (default: as many as heads)")
    show.add_argument("--width", type=int, default=32, help="model width (default 32)")
    show.add_argument("--no-causal", action="store_true", help="let tokens see what comes after them")
    show.add_argument("--seed", type=_seed, default=0, help="of the weights and embeddings (default 0)")
    show.set_defaults(run=_show)
    return parser


def _parity(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError:
        raise UsageError('parity needs PyTorch: pip install "flax-attn[torch]"') from None
    from flax_attn.parity import report
    from flax_attn.parity.cases import select

    try:
        cases = select(options.variant)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check_writable(options.json)
    torch.set_num_threads(1)  # several cases run at a time, and the matrices are small
    results = _climb_all(cases, options.seed)
    if options.json:
        try:
            report.write_json(results, options.seed, options.json)
        except OSError as error:  # what was measured is still printed
            print(f"flax-attn: cannot write {options.json}: {error}", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(report.table(results))
    console.print(report.LEGEND, style="dim", highlight=False)
    for line in report.notes(results):
        console.print(line, style="dim", highlight=False)
    for line in report.failures(results):
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    good = sum(all(check.passed for check in checks) for checks in results.values())
    console.print(f"\n{good} of {len(results)} variants equal their PyTorch twin", style="bold", highlight=False)
    return 0 if report.passed(results) else 1


def _climb_all(cases: list[Case], seed: int) -> dict[str, list[Check]]:
    from flax_attn.parity.ladder import climb

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(2) as pool:
        task = progress.add_task("comparing", total=len(cases))
        for case, checks in zip(cases, pool.map(lambda case: climb(case, seed), cases), strict=True):
            results[case.name] = checks
            progress.advance(task)
    return results


def _show(options: argparse.Namespace) -> int:
    if not (options.out or options.shapes):
        raise UsageError("say what to show: --out FILE for the attention maps, --shapes for the steps, or both")
    _check_writable(options.out)
    if options.out and not Path(options.out).suffix:
        raise UsageError(f"cannot write {options.out}: its suffix says the format, such as .png, .svg or .pdf")
    try:
        layer, tokens, embeddings = _example(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.shapes:
        _print_steps(layer, tokens, embeddings)
    if options.out:
        _draw(layer, tokens, embeddings, options)
    return 0


def _example(options: argparse.Namespace) -> tuple[Any, list[str], Any]:
    import jax
    from flax import nnx

    tokens = options.text.split()
    if not tokens:
        raise UsageError("--text must hold at least one word")
    layer = flax_attn.MultiHeadAttention(
        options.width,
        options.width,
        len(tokens),
        0.0,
        options.heads,
        num_kv_heads=options.kv_heads,
        causal=not options.no_causal,
        rngs=nnx.Rngs(options.seed),
    )
    vocabulary = sorted(set(tokens))
    table = 3 * jax.random.normal(jax.random.key(options.seed), (len(vocabulary), options.width))
    return layer, tokens, table[jax.numpy.array([vocabulary.index(token) for token in tokens])]


def _print_steps(layer: Any, tokens: list[str], embeddings: Any) -> None:
    from flax_attn.functional.shapes import AXES
    from flax_attn.steps import steps

    rows = Table("step", "axes", "shape", "what it is", title=f"{type(layer).__name__} on {len(tokens)} tokens")
    rows.add_row("input", "b t d", str((1, *embeddings.shape)), "one vector a token")
    for step in steps(layer, embeddings[None]):
        rows.add_row(step.name, step.axes, str(step.shape), step.meaning)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(rows)
    for letter, meaning in AXES.items():
        console.print(f"{letter}  {meaning}", style="dim", highlight=False)


def _draw(layer: Any, tokens: list[str], embeddings: Any, options: argparse.Namespace) -> None:
    from flax_attn.viz import plot_attention

    _, weights = layer(embeddings, return_weights=True)
    title = f"{type(layer).__name__}, random weights and embeddings (seed {options.seed})"
    try:
        plot_attention(weights, tokens, title=title).savefig(options.out, dpi=150)
    except (ImportError, OSError, ValueError) as error:  # no matplotlib, no such picture format, no way to write
        raise UsageError(str(error)) from None
    print(f"wrote {options.out}")


def _check_writable(path: str | None) -> None:
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: it must name a file in a folder that exists and can be written to")


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**32:
        raise argparse.ArgumentTypeError(f"a seed is at least 0 and below 2**32; got {seed}")
    return seed
