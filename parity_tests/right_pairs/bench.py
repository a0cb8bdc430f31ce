"""Run the bench: every pair at every size and seed, a line each, and what was called different."""

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product

from flax_attn.parity import compare
from flax_attn.parity.report.report import Report
from parity_tests.right_pairs import (
    dense,
    equinox_layers,
    image_blocks,
    images,
    models,
    token_blocks,
    tokens,
)
from parity_tests.right_pairs.pairs import SIZES, Build

TABLES = (dense, equinox_layers, images, image_blocks, tokens, token_blocks, models)
PAIRS: dict[str, Build] = {}
for _table in TABLES:
    PAIRS.update(_table.PAIRS)


def judged(name: str, size: str, seed: int) -> Report:
    """Return the report of a right pair, with all checks."""
    sides = PAIRS[name](SIZES[size])
    # Where sides differ first is of no use here, and takes long to find.
    options = {"seed": seed, "name": name, "locate": False, **sides.options}
    return compare(sides.flax, sides.torch, sides.inputs, **options)


def alarm(name: str, size: str, seed: int) -> str:
    """Return why a right pair was not called equal; empty if it was."""
    try:
        report = judged(name, size, seed)
    # Whatever stops the harness is an alarm, too.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if report.passed else report.explain()


def run(names: Sequence[str], cases: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Print a line for each pair, and yield the alarms of its sizes and seeds."""
    for name in names:
        start = time.perf_counter()
        found = list(alarms_of(name, cases))
        seconds = time.perf_counter() - start
        # Flushed, as the bench takes long and its output is often in a pipe.
        print(f"{name}: {len(found)} alarms in {len(cases)} runs, {seconds:.0f} s", flush=True)
        yield from found


def alarms_of(name: str, cases: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield why a pair was not called equal, and in which run."""
    for size, seed in cases:
        why = alarm(name, size, seed)
        if why:
            yield f"{name}, {size}, seed {seed}: {why}"


def main() -> int:
    """Run what the command line asks for; return 1 if there is an alarm."""
    chosen = arguments()
    names = chosen.only
    cases = list(product(chosen.sizes, range(chosen.seeds)))
    alarms = 0
    for text in run(names, cases):
        print(f"  {text}", flush=True)
        alarms += 1
    runs = len(names) * len(cases)
    print(f"{len(names)} pairs, {runs} runs, {alarms} alarms")
    return 1 if alarms else 0


def arguments() -> argparse.Namespace:
    """Return which pairs are run, at which sizes and how often."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.right_pairs", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=PAIRS, metavar="NAME")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    return parser.parse_args()
