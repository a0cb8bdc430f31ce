"""Print what attention takes on absent devices: python -m tools.aot {tpu,gpu} [--quick]."""

import argparse
import sys

from rich.console import Console

from flax_attn.bench.calls import MODEL_CALLS
from tools.aot import masks, models
from tools.aot.report import tables


def main(arguments: list[str] | None = None) -> None:
    """Compile for the devices of a platform, and print a table for each.

    Raises:
        SystemExit: if something that this needs is not installed.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.aot", description=__doc__)
    parser.add_argument("platform", choices=("tpu", "gpu"), help="platform to compile for")
    parser.add_argument("--quick", action="store_true", help="compile few calls: in a minute")
    parser.add_argument(
        "--models",
        action="store_true",
        help="compile the calls of models with fused for every chip, and print Markdown",
    )
    parser.add_argument(
        "--masks",
        action="store_true",
        help="compile a long call with each kind of mask with blocked for an H200",
    )
    options = parser.parse_args(arguments)
    if options.masks:
        if options.platform != "gpu":
            parser.error(f"--masks compiles for an H200; got platform {options.platform!r}")
        _masks(options.quick)
        return
    if options.models:
        _models(options.platform, options.quick)
        return
    # As wide as the tables need it, where there is no terminal.
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        # A table is printed as soon as its device is done: the next one takes minutes.
        for table in tables(options.platform, options.quick):
            console.print(table)
    except ImportError as error:
        sys.exit(str(error))


def _masks(quick: bool) -> None:
    try:
        for line in masks.table(masks.CALLS[:2] if quick else masks.CALLS):
            print(line, flush=True)
    except ImportError as error:
        sys.exit(str(error))


def _models(platform: str, quick: bool) -> None:
    calls = MODEL_CALLS[:2] if quick else MODEL_CALLS
    try:
        print(models.markdown(models.programs(platform, calls)))
    except ImportError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
