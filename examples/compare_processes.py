"""Train the same small GPT-2 on one process, on 2 and on 4, and compare the losses.

    python examples/compare_processes.py

All are processes of this machine, each with one simulated device, in float64. The exit status is 1
if a loss differs from that of one process by more than 1e-12 of it.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

FILE = Path(__file__).with_name("train_multihost.py")
MESHES = ("data=1", "data=2", "tensor=2", "data=2,tensor=2", "fsdp=2,context=2")
RULE = 1e-12


def processes_of(mesh: str) -> int:
    """Return how many processes a mesh takes: one for each device."""
    return prod(int(part.split("=")[1]) for part in mesh.split(","))


def free_address() -> str:
    """Return an address of this machine that nothing listens on."""
    # The system chooses a free port; another process may take it before ours does.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def train(mesh: str, steps: int, limit: float) -> list[float]:
    """Train on as many processes as the mesh has devices; return the losses.

    Raises:
        RuntimeError: if a process fails, or has not ended after so many seconds.
    """
    count, address = processes_of(mesh), free_address()
    with TemporaryDirectory() as folder:
        arguments = ["--float64", "--mesh", mesh, "--steps", str(steps)]
        arguments += ["--checkpoints", f"{folder}/checkpoints"]
        arguments += ["--coordinator", address, "--processes", str(count), "--process"]
        files = [Path(folder, str(i)) for i in range(count)]
        started = [start([*arguments, str(i)], file) for i, file in enumerate(files)]
        try:
            failed = wait(started, limit)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{mesh}: a process has not ended after {limit:g} seconds"
            ) from error
        finally:
            # One that waits for another that has failed would not end by itself.
            for process in started:
                process.kill()
                process.wait()
        texts = [file.read_text() for file in files]
    if failed:
        raise RuntimeError(f"{mesh}: process {failed[0]} of {count} failed:\n{texts[failed[0]]}")
    return losses_in(texts[0])


def wait(processes: list[subprocess.Popen], limit: float) -> list[int]:
    """Return which processes failed, after all have ended within so many seconds together."""
    end = time.monotonic() + limit
    statuses = [process.wait(max(0, end - time.monotonic())) for process in processes]
    return [i for i, status in enumerate(statuses) if status]


def losses_in(text: str) -> list[float]:
    """Return the losses that process 0 has printed, among whatever else."""
    lines = [line for line in text.splitlines() if line.startswith('{"step"')]
    return [json.loads(line)["loss"] for line in lines]


def start(arguments: list[str], output: Path) -> subprocess.Popen:
    """Start a process with one device that writes all it prints to a file."""
    # The package need not be installed; what else the user has on the path stays.
    paths = [str(FILE.parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(FILE), *arguments]
    # A file, and no pipe: nobody reads while the others are waited for.
    with output.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | own
        )


def largest_error(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two runs."""
    return float(np.max(np.abs(np.array(losses) / np.array(expected) - 1)))  # NaN where a loss is


def main(arguments: list[str] | None = None) -> int:
    """Compare, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Compare training on several processes with training on one."
    )
    parser.add_argument("--steps", type=int, default=8, help="of each run (default 8)")
    parser.add_argument(
        "--mesh",
        action="append",
        help=f"to train on; may be repeated (default: {' '.join(MESHES)})",
    )
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds that a run may take (default 600)"
    )
    options = parser.parse_args(arguments)
    table = Table(
        "processes",
        "mesh",
        "last loss",
        "largest error",
        title="losses beside those of one process",
    )
    expected, errors = train(MESHES[0], options.steps, options.limit), []
    for mesh in options.mesh or MESHES[1:]:
        losses = train(mesh, options.steps, options.limit)
        errors.append(largest_error(losses, expected))
        verdict = f"[{'green' if errors[-1] <= RULE else 'red'}]{errors[-1]:.1e}[/]"
        table.add_row(str(processes_of(mesh)), mesh, f"{losses[-1]:.12f}", verdict)
    Console().print(
        table,
        f"rule: {RULE} of the losses on one process, {expected[0]:.12f} to {expected[-1]:.12f}",
    )
    return int(not all(error <= RULE for error in errors))


if __name__ == "__main__":
    sys.exit(main())
