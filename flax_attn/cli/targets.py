"""Modules named on the command line, `pkg.mod:factory`, and how they are called and compared."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.cli import common

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison of two targets."""
    group = parser.add_argument_group("with targets")
    group.add_argument(
        "--input",
        action="append",
        metavar="SHAPE",
        help="of an input: 3,5,6 is drawn from the normal distribution, int:50:3,5 are integers below 50; "
        "repeated for each input",
    )
    group.add_argument("--layout", metavar="NAME", help="which parameter is which: a name, or pkg.mod:TABLE")
    for side in ("flax", "torch"):
        group.add_argument(
            f"--{side}-call", metavar="TARGET", help=f"pkg.mod:call, called as call(module, *inputs), {side}"
        )
    group.add_argument("--name", help="of the comparison (default: the class of the Flax module)")


def checks(options: argparse.Namespace) -> list[str] | None:
    """Return the checks that were asked for.

    Raises:
        UsageError: if one is unknown.
    """
    from flax_attn.parity import CHECKS

    unknown = [name for name in options.check or () if name not in CHECKS]
    if unknown:
        raise common.UsageError(f"no check is called {', '.join(unknown)}. Known are: {', '.join(CHECKS)}")
    return options.check


def compare(options: argparse.Namespace) -> list[Report]:
    """Return the report on two targets, or on one against an export."""
    from flax_attn.parity import CHECKS
    from flax_attn.parity.compare import on_cpu

    sides = ("flax",) if options.against else ("flax", "torch")
    if len(options.target) != len(sides):
        wanted = " ".join(f"pkg.mod:{side}_factory" for side in sides)
        raise common.UsageError(f"give {wanted}; got {' '.join(options.target)}")
    with on_cpu(), common.progress() as progress:  # x64 is on before a factory builds any table or constant
        task = progress.add_task("comparing", total=len(options.check or CHECKS))

        def watch(name: str) -> None:
            progress.update(task, description=name, advance=1)

        return [_compared(options, watch)]


def _compared(options: argparse.Namespace, watch: Callable[[str], None]) -> Report:
    from flax_attn import parity

    asked, layout = checks(options), _layout(options.layout)
    flax_module = _load(options.target[0])()
    name = options.name or type(flax_module).__name__
    torch_module, inputs = _recorded(options, name) if options.against else _built(options)
    return parity.compare(
        flax_module,
        torch_module,
        inputs,
        layout=layout,
        checks=asked,
        flax_call=options.flax_call and _load(options.flax_call),
        torch_call=options.torch_call and _load(options.torch_call),
        seed=options.seed,
        name=name,
        command=shlex.join(["flax-attn", *options.arguments]),
        record=bool(options.export),
        device=common.device(options.device),
        watch=watch,
    )


def _built(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    module = _load(options.target[1])()
    if hasattr(module, "eval"):
        module.eval()  # a module is built in train mode
    if not options.input:
        raise common.UsageError("say what goes in: --input 3,5,6 for floats, --input int:50:3,5 for integers below 50")
    random = np.random.default_rng(options.seed)
    return module, [_input(text, random) for text in options.input]


def _recorded(options: argparse.Namespace, name: str) -> tuple[Any, Any]:
    from flax_attn.parity import export

    found = export.load(options.against)
    if len(found) > 1:
        found = export.load(options.against, [name])
    recording = next(iter(found.values()))
    return recording, recording.inputs


def _input(text: str, random: np.random.Generator) -> Any:
    below, _, shape = text.removeprefix("int:").rpartition(":")
    try:
        sizes = tuple(common.count(size) for size in shape.split(","))
        return random.integers(0, common.count(below), sizes) if text.startswith("int:") else sizes
    except (ValueError, argparse.ArgumentTypeError):
        raise common.UsageError(f"an input is a shape such as 3,5,6, or int:50:3,5; got {text}") from None


def _layout(text: str | None) -> Any:
    return _load(text) if text and ":" in text else text


def _load(target: str) -> Any:
    module, colon, name = target.partition(":")
    if not colon or not name:
        raise common.UsageError(f"a target is pkg.mod:name; got {target}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise common.UsageError(f"cannot import {module}: {error}") from error
    except AttributeError:
        raise common.UsageError(f"{module} has no {name}") from None
