import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flax_attn.cli import main, watch
from flax_attn.cli.specs import sha256

pytest.importorskip("torch")

PORT = "import jax.numpy as jnp\n\ndef f(x):\n    return jnp.tanh(x) * {factor}\n"
MODEL = "import torch\n\ndef f(x):\n    return torch.tanh(x)\n"
COMMAND = ["compare", "port.py:f", "model.py:f", "--input", "2,3", "--check", "forward"]


class Watching:
    """A command that goes on until it is ended, and what it has printed so far."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flax_attn", *COMMAND, "--watch"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def report(self) -> str:
        """Return what is printed until files are watched."""
        lines = []
        assert self.process.stdout is not None
        # A comparison that never ends fails, and does not hang.
        timer = threading.Timer(120, self.process.kill)
        timer.start()
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("flax-attn: watching "):
                break
        timer.cancel()
        return "".join(lines)


def write(path: Path, text: str) -> None:
    """Put a file in the place of another, as an editor does."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def watching(tmp_path):
    (tmp_path / "port.py").write_text(PORT.format(factor=1.1))
    (tmp_path / "model.py").write_text(MODEL)
    found = Watching(tmp_path)
    yield found
    found.process.kill()
    found.process.communicate()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")
def test_every_change_is_compared_until_an_interrupt(tmp_path, watching):
    port = tmp_path / "port.py"
    first = watching.report()
    assert "f: DIFFERENT" in first
    assert "flax-attn: watching model.py, port.py" in first
    write(port, "def f(x:\n")
    assert "could not compare: port.py raised SyntaxError" in watching.report()
    write(port, PORT.format(factor=1.0))
    last = watching.report()
    assert "f: equal" in last
    assert "--watch" not in last
    while not (workers := children(watching.process.pid)):
        time.sleep(0.1)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(20) == 128 + signal.SIGINT
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_bad_usage_ends_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "port.py").write_text(PORT.format(factor=1.0))
    assert main(["compare", "port.py:g", "model.py:f", "--input", "2,3", "--watch"]) == 64
    assert "port.py has no g" in capfd.readouterr().err


def test_a_file_is_waited_for_until_its_text_changes(tmp_path, monkeypatch):
    file = tmp_path / "port.py"
    file.write_text("a = 1\n")
    known = {str(file): sha256(file)}
    steps = [
        lambda: os.utime(file),
        lambda: file.unlink(),
        lambda: file.write_text("a ="),
        lambda: file.write_text("a = 2\n"),
        lambda: None,
    ]
    monkeypatch.setattr(watch.time, "sleep", lambda _: steps.pop(0)())
    watch._wait_for_change(known)
    assert steps == []
