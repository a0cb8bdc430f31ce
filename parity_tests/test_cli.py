import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.numpy
import torch

from flax_attn.cli import main, reports
from torch_ref.modules.linear import Linear


def test_parity_prints_the_table_and_writes_all_that_was_measured(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert (
        main(["parity", "--variant", "causal", "--variant", "rms_norm", "--report", str(path)]) == 0
    )
    shown = capsys.readouterr().out
    assert "2 of 2 variants equal their PyTorch twin" in shown
    report = json.loads(path.read_text())
    assert report["passed"]
    assert [each["name"] for each in report["variants"]] == ["causal", "rms_norm"]
    names = [check["name"] for check in report["variants"][0]["checks"]]
    assert names == [
        "forward",
        "gradients",
        "float32",
        "dropout",
        "unbatched",
        "cache = full",
        "layouts",
        "many rows",
    ]
    assert 0 < report["variants"][0]["checks"][0]["error"] < 1e-14
    assert {"jax", "flax", "torch", "python"} <= report["environment"].keys()


@pytest.mark.parametrize(
    ("mesh", "variant"),
    [
        ("data=2,tensor=2,context=2", "multi_head_packed_window"),
        ("data=2,tensor=2,context=2", "gpt2"),
        ("data=2,tensor=2,expert=2", "moe_gpt_oss"),
    ],
)
def test_rows_on_a_mesh_equal_pytorch_on_one_device(mesh, variant, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["parity", "--mesh", mesh, "--variant", variant, "--report", str(path)]) == 0
    assert "1 of 1 variants equal their PyTorch twin" in capsys.readouterr().out
    (report,) = json.loads(path.read_text())["variants"]
    axes = ", ".join(part.partition("=")[0] for part in mesh.split(","))
    assert report["notes"][-1] == f"split over {axes}"


def test_what_a_mesh_does_not_split_is_counted_apart(capsys):
    assert (
        main(["parity", "--mesh", "tensor=2", "--variant", "rms_norm", "--variant", "swiglu"]) == 0
    )
    shown = capsys.readouterr().out
    assert "1 of 1 variants equal their PyTorch twin" in shown
    assert "1 cannot be split over this mesh, and were not compared" in shown
    assert "rms_norm: nothing of it is split over this mesh" in shown
    assert main(["parity", "--mesh", "tensor=2", "--variant", "rms_norm"]) == 1


def test_a_difference_is_printed_with_its_tensor_and_exits_with_1(monkeypatch, capsys):
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: forward(self, x) * (1 + 1e-9))
    assert main(["parity", "--variant", "self_attention"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown
    assert "self_attention: forward: error" in shown
    assert "0 of 1 variants" in shown


def test_rows_are_located_one_by_one(monkeypatch, capsys):
    monkeypatch.setattr(
        Linear,
        "forward",
        lambda self, x: torch.nn.functional.linear(x, self.weight + 1e-3, self.bias),
    )
    rows = ["causal", "multi_head_square", "multi_head_gqa", "block_bert"]
    assert (
        main(
            ["parity", "--check", "forward", *(word for row in rows for word in ("--variant", row))]
        )
        == 1
    )
    printed = capsys.readouterr()
    assert "IndexError" not in printed.err
    # Once as what differs, and once as what to look at next.
    assert printed.out.count("torch adds 0.001, flax does not") >= 2 * len(rows)


WRONG_MESHES = (
    "data=0",
    "data=-1",
    "data=x",
    "data=2,data=2",
    "",
    "=2",
    "data=",
    "data=2,",
    "data=\u00b2",
    "data=1.5",
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--variant", "CausalAtention"],
            "no variant is called CausalAtention; the nearest are CausalAttention, ",
        ),
        (
            ["--check", "forwards"],
            "no check is called forwards (nearest: forward). Known are: shapes, weights, forward, ",
        ),
        (["a.py:A", "b.py:B"], "your own by flax-attn compare a.py:A b.py:B, and a variant by"),
        (["--report", "/no/such/folder/report.json"], "in a folder that exists"),
        (
            ["--mesh", "model=2"],
            "can be divided over data and fsdp, and over tensor, context and expert where these",
        ),
        *(
            (["--mesh", text], "a mesh is written as its axes and their sizes")
            for text in WRONG_MESHES
        ),
        (
            ["--mesh", "data=99999999999999999999"],
            "64 devices in all at most; got {'data': 99999999999999999999}.",
        ),
        (
            ["--mesh", "data=2", "--device", "cpu"],
            "--mesh runs our own table against PyTorch",
        ),
        (
            ["--mesh", "tensor=3"],
            "are 1, 2, 4 or 8, as its modules are small; got {'tensor': 3}. Use fewer devices",
        ),
    ],
)
def test_bad_usage_exits_with_64(arguments, message, capsys):
    assert main(["parity", *arguments]) == 64
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.skipif(
    sys.platform != "linux" or os.cpu_count() == 1, reason="several processes, looked up in /proc"
)
def test_an_interrupt_ends_the_processes_and_leaves_no_export(tmp_path):
    command = [
        sys.executable,
        "-m",
        "flax_attn",
        "parity",
        "--variant",
        "CausalAttention",
        "--variant",
        "Embedding",
    ]
    command += ["--variant", "MultiHeadAttention", "--export", "out", "--report", "report.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)
    until, children = time.monotonic() + 120, []
    while (
        len(children) < 3 and time.monotonic() < until
    ):  # the workers, and what tracks their semaphores
        time.sleep(0.2)
        children = _children(process.pid)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
    shown, error = process.communicate(timeout=60)
    assert (process.returncode, shown, error) == (130, "", "flax-attn: interrupted\n")
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(tmp_path.iterdir())


def _children(process):
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += path.read_text().split()
    return found


def test_a_report_that_cannot_be_written_is_said_and_the_others_are(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(reports._WRITERS, ".json", full)
    arguments = ["parity", "--variant", "rms_norm", "--report", str(tmp_path / "r.json")]
    assert main([*arguments, "--report", str(tmp_path / "r.xml")]) == 3
    shown = capsys.readouterr()
    assert "1 of 1 variants equal their PyTorch twin" in shown.out
    assert (
        shown.err
        == f"flax-attn: cannot write {tmp_path / 'r.json'}: [Errno 28] No space left on device\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["r.xml"]


def test_an_export_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise safetensors.SafetensorError("No space left on device")

    folder = tmp_path / "out"
    arguments = ["parity", "--variant", "rms_norm", "--variant", "swiglu", "--export", str(folder)]
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.numpy, "save_file", full)
        assert main(arguments) == 64
    assert "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "rms_norm.safetensors",
        "swiglu.safetensors",
    ]
