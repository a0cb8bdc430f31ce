"""`flax-attn skill`: how to port a module and prove it, for programs that write programs."""

import argparse
from pathlib import Path
from typing import Any

SKILL = Path(__file__).parents[1] / "parity" / "SKILL.md"


def add(commands: Any) -> None:
    """Add the command."""
    help_text = "print how to port a PyTorch module to NNX and prove it; --path prints where it is"
    parser = commands.add_parser("skill", help=help_text, description=help_text)
    parser.add_argument("--path", action="store_true", help="print the path of the file")
    parser.set_defaults(run=_skill)


def _skill(options: argparse.Namespace) -> int:
    print(SKILL if options.path else SKILL.read_text(encoding="utf-8").rstrip())
    return 0
