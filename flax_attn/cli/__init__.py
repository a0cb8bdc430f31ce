"""The command line: `flax-attn` and its commands, such as `parity`, `generate` and `bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flax_attn.cli.guard import BAD_USAGE, end_after_exit_functions, end_on_signals, guarded

if TYPE_CHECKING:
    import argparse


_ABOUT = "Attention for JAX, every variant proven equal to PyTorch, and a judge of ports."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 is done or equal, 1 that a check failed or two modules differ, 2 that they are equal where
    they were tested, 3 that the command cannot go on: something is not installed, or cannot be
    compared or written; 64 that it cannot run as it was called, 130 that it was interrupted, 141
    that nobody reads its output.
    """
    if arguments is not None:
        given = list(arguments)
        return guarded(lambda: _run(given))
    # This process is the command, and not a program that calls it.
    end_on_signals()
    ends_with = end_after_exit_functions()
    code = guarded(lambda: _run(sys.argv[1:]))
    return ends_with(code)


def _run(arguments: list[str]) -> int:
    import argparse

    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return BAD_USAGE
    # A report names the command that makes it again, with the arguments as they were given.
    options = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    import flax_attn

    # Imported here, so that an interrupt meanwhile is one of the command.
    from flax_attn.cli import (
        backends,
        bench,
        compare,
        device_check,
        faults,
        generate,
        mutants,
        parity,
        plan,
        show,
        skill,
        verify,
    )
    from flax_attn.cli.guard import Parser

    parser = Parser(prog="flax-attn", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"flax-attn {flax_attn.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checking = (compare, verify, mutants, skill, parity, faults)
    for command in (*checking, show, backends, bench, device_check, generate, plan):
        command.add(commands)
    return parser
