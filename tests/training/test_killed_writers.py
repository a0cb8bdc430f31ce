"""A run that is killed again and again while it saves, and two readers that open its folder all the time.

`FLAX_ATTN_KILLS=100 pytest tests/training/test_killed_writers.py` kills it 100 times.
"""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_attn.training import Checkpoints

KILLS = int(os.environ.get("FLAX_ATTN_KILLS", "12"))
KEEP = 2


class Numbers(nnx.Module):
    """Arrays that all hold the number of a step, so that a mix of two checkpoints is seen."""

    def __init__(self):
        self.parts = nnx.List([nnx.Param(jnp.zeros((size, 200))) for size in (50, 60, 70)])

    def fill(self, number):
        for part in self.parts:
            part.set_value(jnp.asarray(np.full(part.shape, number, np.float32)))

    def found(self):
        return set(np.concatenate([np.unique(part[...]) for part in self.parts]).tolist())


def build():
    model = Numbers()
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece, also beside other processes


def write(folder):
    """Save steps after the last one without end, and tell of each that is finished."""
    model, optimizer = build()
    with Checkpoints(folder, keep=KEEP) as checkpoints:
        last = checkpoints.latest
        first = 0 if last is None else last + 1
        tell("ready", first)
        for step in count(first):
            model.fill(step)
            checkpoints.save(step, model, optimizer, number=step)
            checkpoints.wait()
            tell("finished", step)


def read(folder):
    """Open the folder without end, and end with an error unless it holds one whole checkpoint, newer ones later."""
    os.nice(10)
    before = 0
    for turn in count():
        model, optimizer = build()
        with Checkpoints(folder) as checkpoints:
            step, extra = checkpoints.restore(model, optimizer)
        assert step >= before, (step, before)
        assert (model.found(), extra) == ({step}, {"number": step})
        before = step
        tell("read", turn)


def serve(folder):
    """Start writers and readers as asked: forked from here, so that each starts with everything imported."""
    for line in sys.stdin:
        if os.fork() == 0:
            os.setpgid(0, 0)
            tell("pid", os.getpid())
            {"write": write, "read": read}[line.strip()](folder)


class Server:
    def __init__(self, folder):
        command = [sys.executable, __file__, str(folder)]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[2], **options)
        self.heard = {"read": -1, "finished": -1}

    def start(self, what):
        self.process.stdin.write(what + "\n")
        return self.until("pid")

    def until(self, word):
        """Return the number that comes with a word; remember those that come before."""
        while True:
            found, number = self.process.stdout.readline().split()
            self.heard[found] = max(int(number), self.heard.get(found, 0))
            if found == word:
                return int(number)


def alive(pid):
    """Return whether a child of another process runs; one that ended is a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def check(folder):
    """Return the step of the last checkpoint of the folder, which must be whole, and look for leftovers."""
    model, optimizer = build()
    with Checkpoints(folder) as checkpoints:
        step, extra = checkpoints.restore(model, optimizer)
    assert (model.found(), extra) == ({step}, {"number": step})
    there = sorted(path.name for path in folder.iterdir())
    assert len(there) <= KEEP + 4, there  # one more, one half written, what is deleted, the lock
    return step


def test_a_finished_checkpoint_is_never_lost_and_leftovers_do_not_pile_up(tmp_path):
    draw, folder, started = random.Random(0), tmp_path / "run", []
    server = Server(folder)
    try:
        started.append(server.start("write"))
        server.until("ready")
        begin = time.monotonic()
        server.until("finished")
        first_save = time.monotonic() - begin
        started += [server.start("read") for _ in range(2)]
        for kill in range(KILLS):
            if kill % 2:
                server.until("finished")
            time.sleep(draw.uniform(0, first_save))
            os.kill(started[0], signal.SIGKILL)
            assert check(folder) >= server.heard["finished"]
            started[0] = server.start("write")
            assert server.until("ready") > server.heard["finished"]  # of all that the last one told before
            assert all(alive(reader) for reader in started[1:])
        server.until("read")
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        server.process.kill()
        server.process.communicate()


if __name__ == "__main__":
    serve(sys.argv[1])
