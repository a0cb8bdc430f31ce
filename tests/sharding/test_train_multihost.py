"""The example that trains on several processes: losses, killed processes, other arguments."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "train_multihost.py"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(FILE)))
SHARED = ["--float64", "--model", "gpt2", "--text", "text", "--steps", "5", "--every", "2"]
RESUME = "they resume from the last complete checkpoint"

# Both wait for what they are to interrupt: a step after a complete checkpoint, and a save that has
# written its arrays.
KILLED = """
import os, runpy, signal, sys, time
import orbax.checkpoint as ocp
import flax_attn.training as training

where = sys.argv.pop(1)

def end(*_):
    while where == "step" and not os.path.isdir("killed/2"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

steps = iter([training.train_step] * 3)
if where == "step":
    training.train_step = lambda *call: next(steps, end)(*call)
else:
    ocp.PyTreeCheckpointHandler.finalize = end
sys.argv[0] = FILE
runpy.run_path(sys.argv[0], run_name="__main__")
""".replace("FILE", repr(str(FILE)))


@pytest.fixture
def here(checkpoint_here):
    text = checkpoint_here.parent / "text"
    text.write_text("".join(f"The square of {i} is {i * i}. " for i in range(100)))
    return text.parent


def run(*processes):
    """Run commands as the processes of one run; return the status, output and errors of each."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    small = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(ROOT),
    }
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | small,
    }
    command = [
        "--coordinator",
        address,
        "--processes",
        str(len(processes)),
        "--timeout",
        "30",
        "--process",
    ]
    started = [
        subprocess.Popen([sys.executable, *process, *command, str(i)], **options)
        for i, process in enumerate(processes)
    ]
    try:
        found = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(started, found, strict=True)]


def arguments(folder, *more):
    return [*SHARED, "--mesh", "data=2", "--checkpoints", folder, *more]


def losses(output):
    """Return the loss of each step; gloo prints as well."""
    lines = map(json.loads, (line for line in output.splitlines() if line.startswith("{")))
    return {line["step"]: line["loss"] for line in lines}


def arrays(folder):
    """Return what the checkpoint of the last step holds, on one device."""
    reader, path = ocp.StandardCheckpointer(), Path(folder).absolute() / "5" / "arrays"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with jax.enable_x64(True):
        found = reader.metadata(path).item_metadata.tree
        return reader.restore(
            path,
            {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in found.items()},
        )


def alone(*arguments):
    """Train in this process."""
    options = EXAMPLE.parse([*SHARED, *arguments])
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        EXAMPLE.check_processes(options)
        return EXAMPLE.train(options)


def test_killed_processes_end_the_run_and_another_start_goes_on_to_the_same_bits(here):
    command = [str(FILE), *arguments("whole")]
    (status, output, errors), other = run(command, command)
    assert (status, other[0]) == (0, 0), errors
    expected = losses(output)
    assert list(expected) == [1, 2, 3, 4, 5]
    assert not losses(other[1])
    for step, loss in alone("--mesh", "data=2,fsdp=2,tensor=2", "--checkpoints", "alone").items():
        assert abs(loss - expected[step]) <= 1e-12 * loss

    command = arguments("killed")
    (status, output, errors), killed = run([str(FILE), *command], ["-c", KILLED, "step", *command])
    assert killed[0] == -signal.SIGKILL
    assert (status, RESUME in errors) == (1, True), errors
    assert losses(output) == {step: expected[step] for step in (1, 2, 3)}

    killed, (status, _, errors) = run(["-c", KILLED, "save", *command], [str(FILE), *command])
    assert killed[0] == -signal.SIGKILL
    # The process that all are connected to: whichever is first, the error of the step or the end
    # that JAX puts to it.
    assert status != 0
    assert RESUME in errors or "another task died" in errors, errors
    assert sorted(path.name[:4] for path in Path("killed").iterdir()) == [".loc", "2", "4.or"]

    (status, output, errors), other = run([str(FILE), *command], [str(FILE), *command])
    assert (status, other[0]) == (0, 0), errors
    assert losses(output) == {step: expected[step] for step in (3, 4, 5)}
    left, whole = arrays("killed"), arrays("whole")
    assert left.keys() == whole.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)


def test_processes_with_other_arguments_all_end(here):
    command = [str(FILE), *arguments("other")]
    message = (
        "must be started with the same arguments; got on process 0 and on process 1: steps 5 and 6."
        " Start every"
    )
    for status, output, errors in run(command, [*command, "--steps", "6"]):
        assert status == 1
        assert message in errors
        assert not losses(output)
    assert not Path("other").exists()


def test_processes_must_have_as_many_devices():
    EXAMPLE.check_devices({0: 4, 1: 4})
    with pytest.raises(
        ValueError,
        match=r"as many devices; got 4 on process 0, 2 on process 1\. Start them on hosts",
    ):
        EXAMPLE.check_devices({0: 4, 1: 2})


def test_the_mesh_has_all_devices():
    with pytest.raises(
        ValueError,
        match=r"multiply to the number of devices, 8 on 1 process\(es\); got {'data': 4}",
    ):
        EXAMPLE.make_mesh({"data": 4})


def test_the_mesh_divides_the_batch():
    mesh = EXAMPLE.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    EXAMPLE.check_divides("batch", 12, "batch", mesh)
    message = (
        r"multiple of what the mesh splits it into; got batch=6 and {'data': 2, 'fsdp': 2}\. Change"
        r" either"
    )
    with pytest.raises(ValueError, match=message):
        EXAMPLE.check_divides("batch", 6, "batch", mesh)


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="every must be a positive integer; got every=0"):
        EXAMPLE.parse(["--mesh", "data=8", "--checkpoints", "folder", "--every", "0"])


def test_rows_follow_from_seed_and_step_on_every_mesh():
    tokens, found = np.arange(100), []
    for text in ("data=8", "data=2,tensor=4", "fsdp=2,context=4"):
        mesh = EXAMPLE.make_mesh(EXAMPLE.parse_mesh(text))
        options = EXAMPLE.parse(["--mesh", text, "--checkpoints", "folder", "--steps", "4"])
        found.append(
            [
                (step, np.asarray(batch))
                for step, batch in EXAMPLE.make_batches(tokens, 12, options, mesh, 2)
            ]
        )
    for batches in found:
        assert [step for step, _ in batches] == [3, 4]
        for (_, batch), (_, expected) in zip(batches, found[0], strict=True):
            np.testing.assert_array_equal(batch, expected)
            np.testing.assert_array_equal(np.diff(batch), 1)
    assert len({tuple(row) for _, batch in found[0] for row in batch.tolist()}) > 8
