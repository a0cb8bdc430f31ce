"""Processes that run cases: one that dies or hangs takes its case with it, and no other."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from time import monotonic

ROOT = Path(__file__).parents[2]
READY = "ready\n"
COMMAND = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", "--worker"]
RENEW = 250  # cases to a process: what is compiled stays in memory
# Of XLA before 0.11.
FAST = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


@dataclass
class Report:
    """What came out: how often each backend had each result, and what was wrong."""

    results: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    cases: int = 0

    def __str__(self) -> str:
        backends = sorted({backend for backend, _ in self.results})
        kinds = ("equal", "refused", "unsupported", "wrong")
        lines = [f"{'':12}" + "".join(f"{kind:>13}" for kind in kinds)]
        for backend in backends:
            counts = (self.results[backend, kind] for kind in kinds)
            lines.append(f"{backend:12}" + "".join(f"{count:13}" for count in counts))
        return "\n".join([*lines, f"{self.cases} cases, {len(self.failures)} failures"])


class Worker:
    """A process that is given numbers and answers with what came out."""

    def __init__(self):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=_environment(),
        )
        self.answers: Queue[str] = Queue()
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()
        if self.answers.get() != READY:
            self.process.wait()
            log = self._last_words()
            self.stop()
            raise RuntimeError(f"a process for random calls does not start:\n{log}")

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.answers.put(line)
        self.answers.put("")

    def run(self, number: int, seconds: float) -> dict:
        """Return the answer; of a process that dies or does not answer in time, that it did."""
        try:
            print(number, file=self.process.stdin, flush=True)
            line = self.answers.get(timeout=seconds)
        except Empty:
            self.process.kill()
            self.process.wait()
            return _failed(number, f"no answer in {seconds:.0f} s", self._last_words())
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = self.process.wait()
        return _failed(number, f"the process died: exit status {code}", self._last_words())

    def _last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-2000:]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process, and close what was open to it."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with suppress(BrokenPipeError):  # of a number that it did not read
                stream.close()


def run(
    numbers: Iterator[int], *, jobs: int, seconds: float, until: float, tell: Callable[[str], None]
) -> Report:
    """Run cases in several processes until there are no more or time is up.

    Args:
        numbers: numbers of the cases.
        jobs: number of processes at a time.
        seconds: time limit of one case.
        until: time after which no case starts, by `time.monotonic`.
        tell: function that receives each failure as text.
    """
    report, lock = Report(), Lock()

    def next_number() -> int | None:
        with lock:
            return None if monotonic() > until else next(numbers, None)

    def add(answer: dict) -> None:
        with lock:
            report.cases += 1
            report.results.update(map(tuple, answer["results"]))
            for failure in answer["failures"]:
                report.failures.append(failure)
                tell(failure)

    def work() -> None:
        worker, done = None, 0
        while (number := next_number()) is not None:
            if worker is None:
                worker, done = Worker(), 0
            add(worker.run(number, seconds))
            done += 1
            if done == RENEW or not worker.alive:
                worker.stop()
                worker = None
        if worker is not None:
            worker.stop()

    with ThreadPoolExecutor(jobs) as pool:
        for finished in [pool.submit(work) for _ in range(jobs)]:
            finished.result()
    return report


def _environment() -> dict[str, str]:
    import jax

    given = dict(os.environ)
    given.setdefault("JAX_PLATFORMS", "cpu")
    # Compiling takes most of the time.
    given.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if jax.__version_info__ < (0, 11):
        given["XLA_FLAGS"] = f"{given.get('XLA_FLAGS', '')} {FAST}"
    return given


def _failed(number: int, what: str, log: str) -> dict:
    return {"results": [["process", "wrong"]], "failures": [f"case {number}: {what}\n{log}"]}
