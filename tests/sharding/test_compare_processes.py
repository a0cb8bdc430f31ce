"""The example that compares runs on several processes: verdicts, processes that fail or hang."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / "examples" / "compare_processes.py"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(FILE)))


@pytest.fixture
def replace(monkeypatch):
    return lambda name, value: monkeypatch.setitem(EXAMPLE.main.__globals__, name, value)


@pytest.fixture
def processes_run(replace):
    """Let processes run a text of Python instead of the training."""

    def run(code):
        def start(arguments, output):
            with output.open("w") as file:
                return subprocess.Popen(
                    [sys.executable, "-c", code, *arguments], stdout=file, stderr=file
                )

        replace("start", start)

    return run


@pytest.mark.parametrize(("error", "status"), [(0, 0), (4e-13, 0), (4e-12, 1), (float("nan"), 1)])
def test_a_run_with_another_loss_fails(error, status, replace, capsys):
    replace("train", lambda mesh, steps, limit: [2.0, 1.0 + (error if mesh == "tensor=2" else 0)])
    assert EXAMPLE.main([]) == status
    assert re.search(r"4 +. fsdp=2,context=2 +. 1\.0+ +. 0\.0e\+00", capsys.readouterr().out)


def test_every_mesh_gets_a_process_a_device(processes_run):
    processes_run("import sys; print('gloo'); print('{\"step\": 1, \"loss\": %s}' % sys.argv[-3])")
    assert EXAMPLE.train("data=2,tensor=2", 1, 60) == [4.0]


def test_a_process_that_fails_is_shown(processes_run):
    processes_run("import sys; sys.exit(sys.argv[-1] == '1' and 'no devices')")
    with pytest.raises(RuntimeError, match=r"data=2: process 1 of 2 failed:\nno devices"):
        EXAMPLE.train("data=2", 1, 60)


def test_a_process_that_hangs_is_ended(processes_run):
    processes_run("import time; time.sleep(600)")
    with pytest.raises(RuntimeError, match=r"data=2: a process has not ended after 0\.1 seconds"):
        EXAMPLE.train("data=2", 1, 0.1)
