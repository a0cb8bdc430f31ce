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
        help=(
            "of an input: 3,5,6 is drawn from the normal distribution, int:50:3,5 are integers"
            " below 50; repeated for each input"
        ),
    )
    group.add_argument(
        "--layout",
        metavar="NAME",
        default="auto",
        help=(
            "which parameter is which: auto (the default) pairs them by layers, none keeps the"
            " weights as they are; or the name of a layout, or pkg.mod:TABLE"
        ),
    )
    group.add_argument(
        "--rules",
        metavar="TARGET",
        help="pkg.mod:RULES, for the parameters that auto cannot pair; it pairs the rest",
    )
    for framework in ("flax", "torch"):
        help_text = f"pkg.mod:call, called as call(module, *inputs), {framework}"
        group.add_argument(f"--{framework}-call", metavar="TARGET", help=help_text)
    group.add_argument("--name", help="of the comparison (default: the class of the Flax module)")


def checks(options: argparse.Namespace) -> list[str] | None:
    """Return the requested checks.

    Raises:
        UsageError: if one is unknown.
    """
    from flax_attn.parity import CHECKS

    unknown = [name for name in options.check or () if name not in CHECKS]
    if unknown:
        raise common.UsageError(
            f"no check is called {', '.join(unknown)}. Known are: {', '.join(CHECKS)}"
        )
    return options.check


def compare(options: argparse.Namespace) -> list[Report]:
    """Return the report on two targets, or on one against an export."""
    from flax_attn.parity import CHECKS
    from flax_attn.parity.cpu import on_cpu

    # An export stands for the PyTorch side, which then need not be installed.
    frameworks = ("flax",) if options.against else ("flax", "torch")
    if len(options.target) != len(frameworks):
        wanted = " ".join(f"pkg.mod:{framework}_factory" for framework in frameworks)
        raise common.UsageError(f"give {wanted}; got {' '.join(options.target)}")
    with (
        on_cpu(),
        common.progress() as progress,
    ):  # x64 is on before a factory builds any table or constant
        task = progress.add_task("comparing", total=len(options.check or CHECKS))

        def watch(name: str) -> None:
            progress.update(task, description=name, advance=1)

        return [_compared(options, watch)]


def _compared(options: argparse.Namespace, watch: Callable[[str], None]) -> Report:
    from flax_attn.parity.adapters import recording
    from flax_attn.parity.compare import pair_modules, report_on

    requested, layout = checks(options), _layout(options.layout)
    flax_module = _load(options.target[0])()
    name = options.name or type(flax_module).__name__
    torch_module, inputs = _recorded(options, name) if options.against else _built(options)
    if options.rules:
        layout = _paired(options, flax_module, torch_module)
    flax_call, torch_call = (
        call and _load(call) for call in (options.flax_call, options.torch_call)
    )
    pair = pair_modules(
        *(flax_module, torch_module, inputs),
        layout=layout,
        calls={"flax": (flax_call, None), "torch": (torch_call, None)},
        seed=options.seed,
        record=bool(options.export),
        device=common.device(options.device),
    )
    # A report ends with the command that makes it again.
    command = shlex.join(["flax-attn", *options.arguments])
    report = report_on(pair, name, requested, command=command, watch=watch, mutants=options.count)
    if options.export:
        recording.save(report, options.export)
    return report


def _paired(options: argparse.Namespace, flax_module: Any, torch_module: Any) -> Any:
    from flax_attn import convert

    if options.against or options.layout != "auto":
        raise common.UsageError(
            "--rules is for what auto cannot pair, beside --layout auto, and an export holds its"
            f" layout; got --rules {options.rules} and"
            f" {'--against' if options.against else f'--layout {options.layout}'}"
        )
    return convert.auto(flax_module, torch_module, rules=_load(options.rules))


def _built(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    module = _load(options.target[1])()
    if hasattr(module, "eval"):
        module.eval()  # a module is built in train mode
    if not options.input:
        raise common.UsageError(
            "give the inputs: --input 3,5,6 for floats, --input int:50:3,5 for integers below 50"
        )
    random = np.random.default_rng(options.seed)
    return module, [_input(text, random) for text in options.input]


def _recorded(options: argparse.Namespace, name: str) -> tuple[Any, Any]:
    from flax_attn.parity.adapters import recording

    # Where it holds one alone, the name may be another one than it was exported with.
    found = recording.load(options.against)
    if len(found) > 1:
        found = recording.load(options.against, [name])
    found_one = next(iter(found.values()))
    return found_one, found_one.inputs


def _input(text: str, random: np.random.Generator) -> Any:
    kind, _, shape = text.rpartition(":")
    try:
        sizes = tuple(common.count(size) for size in shape.split(","))
        if not kind:
            return sizes  # drawn from the normal distribution, by the comparison
        if not kind.startswith("int:"):
            raise ValueError(kind)
        return random.integers(0, common.count(kind.removeprefix("int:")), sizes)
    except (ValueError, argparse.ArgumentTypeError):
        raise common.UsageError(
            f"an input is a shape such as 3,5,6, or int:50:3,5; got {text}"
        ) from None


def _layout(text: str) -> Any:
    from flax_attn.convert import LAYOUTS

    if ":" in text:
        return _load(text)
    names = ("auto", "none", *LAYOUTS)
    if text not in names:
        raise common.UsageError(
            f"layout must be one of {', '.join(map(repr, names))}, or pkg.mod:TABLE; got {text!r}"
        )
    return None if text == "none" else text


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
