"""Modules named on the command line, `pkg.mod:factory`, and how they are called and compared."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.cli import common

if TYPE_CHECKING:
    from flax_attn.parity.report import Report


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
    import jax

    from flax_attn import parity

    jax.config.update("jax_enable_x64", True)  # before a factory builds anything: tables and constants in float64
    wanted = 1 if options.against else 2
    if len(options.target) != wanted:
        raise common.UsageError(
            f"{'one target, the Flax side, is compared against an export' if options.against else 'two targets'}: "
            f"pkg.mod:flax_factory{'' if options.against else ' pkg.mod:torch_factory'}; got {options.target}"
        )
    flax_module = _load(options.target[0])()
    torch_module, inputs = _recorded(options, type(flax_module).__name__) if options.against else _built(options)
    with common.progress() as progress:
        task = progress.add_task("comparing", total=len(options.check or parity.CHECKS))

        def watch(name: str) -> None:
            progress.update(task, description=name, advance=1)

        report = parity.compare(
            flax_module,
            torch_module,
            inputs,
            layout=_layout(options.layout),
            checks=checks(options),
            flax_call=_load(options.flax_call) if options.flax_call else None,
            torch_call=_load(options.torch_call) if options.torch_call else None,
            seed=options.seed,
            name=options.name or type(flax_module).__name__,
            command=shlex.join(["flax-attn", *sys.argv[1:]]),
            record=bool(options.export),
            device=common.device(options.device),
            watch=watch,
        )
    return [report]


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
        found = export.load(options.against, [options.name or name])
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
