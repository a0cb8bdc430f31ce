"""Run the bench: every pair at every size and seed, a line each, and what was called different."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

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


def run(names: Sequence[str], sizes: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """Print a line for each pair, and yield the alarms."""
    for name in names:
        start = time.perf_counter()
        found = []
        for size in sizes:
            for seed in seeds:
                if why := alarm(name, size, seed):
                    found.append(f"{name}, {size}, seed {seed}: {why}")
        seconds = time.perf_counter() - start
        runs = len(sizes) * len(seeds)
        print(f"{name}: {len(found)} alarms in {runs} runs, {seconds:.0f} s", flush=True)
        yield from found


def main() -> int:
    """Run what the command line asks for; return 1 if there is an alarm."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.right_pairs", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(PAIRS), choices=PAIRS, metavar="NAME")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    chosen = parser.parse_args()
    alarms = []
    for text in run(chosen.only, chosen.sizes, range(chosen.seeds)):
        print(f"  {text}", flush=True)
        alarms.append(text)
    runs = len(chosen.only) * len(chosen.sizes) * chosen.seeds
    print(f"{len(chosen.only)} pairs, {runs} runs, {len(alarms)} alarms")
    return 1 if alarms else 0
