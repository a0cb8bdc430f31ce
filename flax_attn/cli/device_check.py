"""`flax-attn device-check`: judge and time every backend on the device at hand."""

import argparse
import sys
from typing import Any

from flax_attn.cli import common


def add(commands: Any) -> None:
    """Add the command."""
    check = commands.add_parser(
        "device-check",
        help="judge and time every backend on the GPU or TPU at hand, and try tiles of fused",
        description=(
            "Judge every backend on small calls beside the formula in float64, time the attention"
            " of models beside other libraries, and try tiles of fused. Without an accelerator"
            " fused runs in Pallas's interpreter. It returns 1 if a backend differs or fails."
        ),
    )
    check.add_argument(
        "--minutes", type=_minutes, default=10.0, help="time that it may take (default 10)"
    )
    check.add_argument(
        "--json",
        metavar="FILE",
        default="device-check.json",
        help="write all that was found to FILE, and a page in Markdown beside it (default"
        " device-check.json)",
    )
    check.set_defaults(run=_device_check)


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number; got {text!r}") from None
    # NaN is refused, too.
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite; got {text}")
    return number


def _device_check(options: argparse.Namespace) -> int:
    from flax_attn.device import check
    from flax_attn.device.report import page_beside

    beside = page_beside(options.json)
    for path in (options.json, beside):
        common.check_writable(path)

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    report = check.check(options.minutes, lambda found: found.write(options.json), show)
    print(f"wrote {options.json} and {beside}")
    for one in report.wrong:
        print(f"{one.status}: {one.backend}, {one.call}, {one.dtype} {one.note}".rstrip())
    return 1 if report.wrong else 0
