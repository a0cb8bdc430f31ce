"""Measure what a start costs, ours and transformers': python tools/startup.py [--quick].

Processes of their own load a checkpoint of GPT-2 small with random weights, make tokens, and end.
`--quick` takes a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from rich.console import Console

from flax_attn.bench import models, tasks
from flax_attn.bench.tasks import TaskResult

PROMPT, NEW = 128, 64
# Of starts, which take turns.
ROUNDS = 2
_TAIL = """
rate = (len(times) - 2) / (times[-1] - times[1])
status = open("/proc/self/status").read() if sys.platform == "linux" else "VmHWM: 0 kB"
# Of this process alone: getrusage counts its parent, too.
peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
print(json.dumps({"load": loaded - began, "compile": sum(compiling), "rate": rate, "peak": peak}))
"""
_OURS = """
import json, sys, time
times, compiling = [], []
import jax
from flax_attn.models import from_pretrained, generate
def add(event, seconds, **_):
    if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
        compiling.append(seconds)
jax.monitoring.register_event_duration_secs_listener(add)
began = time.perf_counter()
model = from_pretrained(folder, dropout=0.0)
loaded = time.perf_counter()
def note(row, token):
    times.append(time.perf_counter())
    if len(times) == 1:
        print("first", flush=True)
generate(model, list(range(prompt)), new, callback=note)
"""
_THEIRS = """
import json, sys, time
times, compiling = [], []
import torch
from transformers import GPT2LMHeadModel
from transformers.generation.streamers import BaseStreamer
class Note(BaseStreamer):
    prompt = True
    def put(self, tokens):
        if self.prompt:
            self.prompt = False
            return
        times.append(time.perf_counter())
        if len(times) == 1:
            print("first", flush=True)
    def end(self):
        pass
began = time.perf_counter()
model = GPT2LMHeadModel.from_pretrained(folder).eval()
loaded = time.perf_counter()
options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "streamer": Note()}
model.generate(torch.arange(prompt)[None], attention_mask=torch.ones(1, prompt), **options)
"""


def measure(folder: str) -> Iterator[TaskResult]:
    """Measure our first and second start and that of transformers, from process to last token."""
    # A start is disturbed by whatever else the machine does: the best of each figure counts.
    rounds = [_round(folder) for _ in range(ROUNDS)]
    cold = least_disturbed([one["cold"] for one in rounds])
    second = least_disturbed([one["second start"] for one in rounds])
    theirs = least_disturbed([one["theirs"] for one in rounds])
    yield TaskResult("load", "s", cold["load"], theirs["load"])
    first = theirs["first"]
    note = f"{cold['compile']:.1f} s of it compile"
    yield TaskResult("first token, cold", "s", cold["first"], first, cold["compile"], note)
    task = "first token, second start"
    note = "programs are loaded from JAX's cache"
    yield TaskResult(task, "s", second["first"], first, second["compile"], note)
    yield TaskResult("rate after the second token", "tokens/s", cold["rate"], theirs["rate"])
    # Only Linux tells the peak of a process.
    if cold["peak"]:
        note = f"the weights are {_weights(folder):.2f} GiB"
        peaks = cold["peak"], theirs["peak"]
        yield TaskResult("load and generate", "GiB at peak", *peaks, note=note)


def _weights(folder: str) -> float:
    """Return the size of the weights in GiB."""
    files = Path(folder).glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 2**30


def least_disturbed(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the best figure of each kind: the least, and of a rate the most.

    Example:
        >>> least_disturbed([{"load": 2.0, "rate": 30.0}, {"load": 3.0, "rate": 40.0}])
        {'load': 2.0, 'rate': 40.0}
    """
    found = {}
    for name in runs[0]:
        figures = [run[name] for run in runs]
        found[name] = max(figures) if name == "rate" else min(figures)
    return found


def _round(folder: str) -> dict[str, dict[str, float]]:
    # The cache is new in each round, so that the first start in it is a cold one.
    with TemporaryDirectory() as cache:
        cold = _run(_OURS, folder, cache)
        second = _run(_OURS, folder, cache)
    return {"cold": cold, "second start": second, "theirs": _run(_THEIRS, folder, "")}


def _run(code: str, folder: str, cache: str) -> dict[str, float]:
    """Return what a process measured, and after how many seconds its first token was there.

    Raises:
        RuntimeError: if the process fails.
    """
    start = time.perf_counter()
    settings = f"folder, prompt, new = {folder!r}, {PROMPT}, {NEW}"
    command = [sys.executable, "-c", f"{settings}\n{code}{_TAIL}"]
    # Errors go to a file: a pipe that nobody reads while the other one is waited for could fill up.
    with TemporaryFile("w+") as errors:
        environment = _environment(cache)
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        with process:
            assert process.stdout is not None, "it is a pipe"
            first = process.stdout.readline()
            seconds = time.perf_counter() - start
            rest, _ = process.communicate()
        errors.seek(0)
        said = errors.read()
        if process.returncode or first != "first\n":
            raise RuntimeError(f"a process that loads {folder} and makes tokens failed:\n{said}")
    *_, figures = rest.splitlines()
    return {**json.loads(figures), "first": seconds}


def _environment(cache: str) -> dict[str, str]:
    # Every program is kept, however soon it was compiled, and nothing is asked of a server.
    own = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **own}


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="take a model of two narrow layers")
    options = parser.parse_args(arguments)
    config = models.config(options.quick)
    with TemporaryDirectory() as folder:
        # Random weights are loaded as trained ones are.
        models.make_checkpoint(config, folder)
        found = list(measure(folder))
    table = tasks.table(found, "Starts of GPT-2 small in float32")
    # As wide as the table needs it, where there is no terminal.
    width = None if sys.stdout.isatty() else 150
    console = Console(width=width)
    console.print(table)


if __name__ == "__main__":
    main()
