"""Table of `docs/everywhere.md`: stacks of other libraries' layers, as they are and under it.

python -m tools.stacks                      all, in an environment of `make everywhere`
python -m tools.stacks --only keras --tokens 512
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product

from tools.stacks.measure import WAYS, measure
from tools.stacks.models import MODELS

KINDS = {"inference": False, "training step": True}
HEAD = (
    "| layers of | tokens | | seconds | under `everywhere` | times | attention, of its own time"
    " | GiB of 12 blocks | under it |"
)


def main(arguments: list[str] | None = None) -> None:
    """Measure the stacks, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="tools.stacks")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 1024, 4096])
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a stack that is timed")
    parser.add_argument("--turns", type=int, default=5, help="runs of each, of which the least is")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        asked = json.loads(chosen.worker)
        print(json.dumps(measure(**asked)))
        return
    print(HEAD, "|---" * 9 + "|", sep="\n")
    for library, tokens, kind in product(chosen.only, chosen.tokens, KINDS):
        line = row(library, tokens, kind, chosen.blocks, chosen.turns)
        # As soon as it is there: some take minutes.
        print(line, flush=True)


def row(library: str, tokens: int, kind: str, blocks: int, turns: int) -> str:
    """Return a row: the time of a few blocks, and what twelve, as GPT-2 has, would reserve."""
    asked = {"library": library, "tokens": tokens, "training": KINDS[kind]}
    timed = _in_a_process(asked, layers=blocks, turns=turns)
    # Without turns it is compiled, which tells its memory, and not run.
    whole = _in_a_process(asked, layers=12, turns=0)
    memory = [f"{whole[way]['bytes'] / 2**30:.2f}" for way in WAYS[:2]]
    cells = [library, f"{tokens:,}", kind, _times(timed), *memory]
    return f"| {' | '.join(cells)} |"


def _times(timed: dict) -> str:
    without, under, rest = (timed[way]["seconds"] for way in WAYS)
    if without is None or under is None:
        return "not run | | |"
    # What the stack takes beside all the rest is attention.
    share = (under - rest) / (without - rest)
    faster = without / under
    return f"{without:.3f} | {under:.3f} | {faster:.1f} | {share:.2f}"


def _in_a_process(asked: dict, **sizes: int) -> dict:
    command = [sys.executable, "-m", "tools.stacks", "--worker", json.dumps(asked | sizes)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{asked | sizes} failed:\n{finished.stderr[-2000:]}")
    # Libraries may print before it.
    *_, last = finished.stdout.splitlines()
    return json.loads(last)


if __name__ == "__main__":
    main()
