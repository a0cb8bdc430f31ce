"""The command line: `flax-attn parity`, `faults`, `show`, `backends`, `bench`, `generate`, `plan`, `docs`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import flax_attn
from flax_attn.cli import backends, bench, docs, faults, generate, parity, plan, show
from flax_attn.cli.common import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 bad usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        return options.run(options)
    except UsageError as error:
        print(f"flax-attn: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flax-attn", description=flax_attn.__doc__)
    parser.add_argument("--version", action="version", version=f"flax-attn {flax_attn.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (parity, faults, show, backends, bench, generate, plan, docs):
        command.add(commands)
    return parser
