"""Random calls: `python -m tests.fuzz` runs many, with `--case 1234` one of them again."""

import argparse
import json
import os
import sys
import traceback
from itertools import count, islice
from time import monotonic

from . import workers


def main() -> int:
    """Run cases, and return 1 if one came out wrong."""
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=...", description=__doc__)
    parser.add_argument(
        "--case", type=int, help="print this case, and run it alone, in this process"
    )
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=2000, help="how many at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no case after these")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one case may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _serve()
    if options.case is not None:
        return _show(options.case)
    numbers = islice(count(options.start), options.cases)
    until = monotonic() + 60 * options.minutes
    limits = {"jobs": options.jobs, "seconds": options.seconds, "until": until}
    report = workers.run(numbers, **limits, tell=lambda failure: print(failure, "\n", flush=True))
    print(report)
    return int(bool(report.failures))


def _serve() -> int:
    """Run the case of each number that comes in."""
    from . import cases

    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that a call prints is an answer
    print(workers.READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        number = int(line)
        case = cases.draw(number)
        found = list(cases.outcomes(case))
        failures = [
            f"case {number}, {x.backend}: {_short(x.error)}\n{case}"
            for x in found
            if x.error is not None
        ]
        results = [(x.backend, x.result) for x in found]
        print(json.dumps({"results": results, "failures": failures}), file=answers, flush=True)
    return 0


def _show(number: int) -> int:
    """Print a case and how it comes out."""
    from . import cases

    case = cases.draw(number)
    print(f"case {number}\n{case}")
    wrong = 0
    for outcome in cases.outcomes(case):
        print(f"{outcome.backend}: {outcome.result}")
        if outcome.error is not None:
            traceback.print_exception(outcome.error)
            wrong = 1
    return wrong


def _short(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error)
    return f"{type(error).__name__} at {where.filename}:{where.lineno}: {text[:500]}"


if __name__ == "__main__":
    sys.exit(main())
