"""Table of `docs/everywhere.md`: stacks of other libraries' layers, as they are and under it.

python -m tools.stacks                      all, in an environment of `make everywhere`
python -m tools.stacks --only keras --tokens 512
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

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
        print(json.dumps(measure(**json.loads(chosen.worker))))
        return
    print(HEAD, "|---" * 9 + "|", sep="\n")
    for library in chosen.only:
        for tokens in chosen.tokens:
            for kind in KINDS:
                print(row(library, tokens, kind, chosen.blocks, chosen.turns), flush=True)


def row(library: str, tokens: int, kind: str, blocks: int, turns: int) -> str:
    """Return a row: the time of a few blocks, and what twelve, as GPT-2 has, would reserve."""
    asked = {"library": library, "tokens": tokens, "training": KINDS[kind]}
    timed = _in_a_process(asked | {"layers": blocks, "turns": turns})
    whole = _in_a_process(asked | {"layers": 12, "turns": 0})
    without, under, rest = (timed[way]["seconds"] for way in WAYS)
    memory = " | ".join(f"{whole[way]['bytes'] / 2**30:.2f}" for way in WAYS[:2])
    if without is None or under is None:
        return f"| {library} | {tokens:,} | {kind} | not run | | | | {memory} |"
    # What the stack takes beside all the rest is attention.
    share = (under - rest) / (without - rest)
    times = f"{without:.3f} | {under:.3f} | {without / under:.1f} | {share:.2f}"
    return f"| {library} | {tokens:,} | {kind} | {times} | {memory} |"


def _in_a_process(asked: dict) -> dict:
    command = [sys.executable, "-m", "tools.stacks", "--worker", json.dumps(asked)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{asked} failed:\n{finished.stderr[-2000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
