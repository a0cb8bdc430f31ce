"""`flax-attn faults`: patch every known porting fault into the PyTorch side, and detect it."""

import argparse
import sys
from typing import Any

from flax_attn.cli import common

DESCRIPTION = (
    "Patch known porting faults into the PyTorch modules one by one, and name the check that"
    " detects each, and the lines\nof both sides that a report shows. Exits with 0 if all are"
    " detected and shown, 1 if one is not or a check fails\nwithout a fault."
)


def add(commands: Any) -> None:
    """Add the command."""
    faults = commands.add_parser(
        "faults", help="show that known porting faults are detected", description=DESCRIPTION
    )
    faults.add_argument(
        "--seed", type=common.seed, default=0, help="of the weights and inputs (default 0)"
    )
    faults.set_defaults(run=_faults)


def _faults(options: argparse.Namespace) -> int:
    common.need_torch("faults")
    # Imported behind the check: the faults are patches of torch_ref.
    from flax_attn.proof.faults import detect

    try:
        with common.progress() as progress:
            task = progress.add_task("patching", total=len(detect.FAULTS))

            def watch(name: str) -> None:
                progress.update(task, description=name, advance=1)

            found = detect.detect(seed=options.seed, watch=watch, explain=True)
    except detect.FailsWithoutFaultError as error:
        print(f"flax-attn: {error}", file=sys.stderr)
        return 1
    # As wide as the names of faults and the lines need it.
    console = common.console(180)
    console.print(detect.table(found))
    console.print(detect.LEGEND, style="dim", highlight=False)
    console.print(detect.summary(found), style="bold", highlight=False)
    return 0 if all(one.detected and one.shown for one in found) else 1
