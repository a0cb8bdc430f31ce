"""Kill a run again and again while it saves, and keep two readers opening its folder.

The same for two processes that save models into one folder.
`FLAX_ATTN_KILLS=100 pytest tests/training/test_killed_writers.py` kills 100 times.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_attn import GPT2, GPT2Config, convert, from_pretrained
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
    # Written in one piece, also beside other processes.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


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
    """Open the folder repeatedly; fail unless it holds one whole checkpoint, never an older one."""
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


def filled(d_model):
    """Return a model whose weights all are its width."""
    config = GPT2Config(d_model, 2, 1, context_length=8, vocab_size=11)
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    weights = nnx.state(model, nnx.Param)
    nnx.update(
        model, jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, d_model, x.dtype)), weights)
    )
    return model


def store(folder):
    """Save two models into the folder in turn, without end, one of them in shards."""
    models = [(filled(6), 2000), (filled(8), 10**9)]
    for turn in count():
        model, size = models[turn % 2]
        model.save_pretrained(folder, max_shard_size=size)
        tell("finished", turn)


def serve(folder):
    """Start writers and readers on request, forked so that everything is already imported."""
    for line in sys.stdin:
        if os.fork() == 0:
            os.setpgid(0, 0)
            tell("pid", os.getpid())
            try:
                {"write": write, "read": read, "store": store}[line.strip()](folder)
            finally:
                traceback.print_exc()
                tell("failed", 0)
                os._exit(1)


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
            assert found != "failed"
            self.heard[found] = max(int(number), self.heard.get(found, 0))
            if found == word:
                return int(number)


def check(folder):
    """Return the last checkpoint's step; assert that it is whole and that nothing is left over."""
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
            # Later than all that the previous writer reported.
            assert server.until("ready") > server.heard["finished"]
        server.until("read")
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        server.process.kill()
        server.process.communicate()


def test_a_folder_holds_one_whole_model(tmp_path):
    draw, folder, started = random.Random(0), tmp_path / "model", []
    server = Server(folder)
    try:
        started += [server.start("store") for _ in range(2)]
        server.until("finished")
        begin = time.monotonic()
        server.until("finished")
        duration = time.monotonic() - begin
        for _ in range(KILLS // 2):
            server.until("finished")
            time.sleep(draw.uniform(0, duration))
            for pid in started:
                os.kill(pid, signal.SIGKILL)
            model = from_pretrained(folder)
            assert all(
                (weight == model.config.d_model).all()
                for weight in convert.state_dict(model).values()
            )
            there = sorted(path.name for path in folder.iterdir())
            assert len(there) < 25, there  # one save in progress, what the last one left, the lock
            started = [server.start("store") for _ in range(2)]
        server.until("finished")
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        server.process.kill()
        server.process.communicate()


if __name__ == "__main__":
    serve(sys.argv[1])
