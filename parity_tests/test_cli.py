import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax
import pytest
import safetensors.numpy
import torch

from flax_attn.cli import main, parity
from torch_ref.modules.linear import Linear

MODULES = '''
import jax.numpy as jnp
import torch
from flax import nnx

from flax_attn.convert import Rule

TABLE = [Rule(("kernel",), "weight", "i o -> o i"), Rule(("bias",), "bias")]
RULES = TABLE[:1]
WRONG = [Rule(("kernel",), "bias")]


class Table(nnx.Module):
    """Holds a number that float32 cannot."""

    def __init__(self):
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.table = nnx.Variable(jnp.array([0.1, 0.2]))

    def __call__(self, x):
        return self.layer(x) + self.table[None]


class TorchTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("table", torch.tensor([0.1, 0.2], dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + self.table


def flax_linear():
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def torch_linear():
    return torch.nn.Linear(3, 2)


def torch_dropout():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))[0:2]


def flax_embedding():
    return nnx.Embed(11, 3, rngs=nnx.Rngs(0))


def torch_embedding():
    return torch.nn.Embedding(11, 3)


def doubled(module, x):
    return 2 * module(x)


def not_a_number(module, x):
    return module(x) * float("nan")
'''


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Put a module of factories into the folder that the command is run in."""
    name = f"modules_{re.sub(r'[^0-9]', '', tmp_path.name)}_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    return name


def test_parity_prints_the_table_and_writes_all_that_was_measured(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert (
        main(["parity", "--variant", "causal", "--variant", "rms_norm", "--report", str(path)]) == 0
    )
    shown = capsys.readouterr().out
    assert "2 of 2 variants equal their PyTorch twin" in shown
    report = json.loads(path.read_text())
    assert report["passed"]
    assert [each["variant"] for each in report["variants"]] == ["causal", "rms_norm"]
    names = [check["name"] for check in report["variants"][0]["checks"]]
    assert names == [
        "forward",
        "gradients",
        "float32",
        "dropout",
        "unbatched",
        "cache = full",
        "layouts",
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
    assert printed.out.count("fault") >= len(rows)


def test_two_targets_are_compared_and_written(modules, tmp_path, capsys):
    targets = [f"{modules}:flax_linear", f"{modules}:torch_linear"]
    arguments = [
        "parity",
        *targets,
        "--input",
        "4,5,3",
        "--layout",
        "torch",
        "--check",
        "forward",
        "--check",
        "training",
    ]
    assert main([*arguments, "--report", "r.json", "--report", "r.xml"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())["variants"][0]
    assert [check["name"] for check in report["checks"]] == ["forward", "training"]
    assert report["command"] == " ".join(
        ["flax-attn", *arguments, "--report", "r.json", "--report", "r.xml"]
    )
    assert 'tests="2"' in (tmp_path / "r.xml").read_text()
    assert "Linear" in capsys.readouterr().out


def test_targets_that_differ_exit_with_1(modules, capsys):
    targets = [f"{modules}:flax_linear", f"{modules}:torch_linear"]
    call = ["--torch-call", f"{modules}:doubled"]
    assert (
        main(
            [
                "parity",
                *targets,
                "--input",
                "4,5,3",
                "--layout",
                "torch",
                "--check",
                "forward",
                *call,
            ]
        )
        == 1
    )
    assert "forward" in capsys.readouterr().out


def test_factories_are_called_with_x64_enabled_and_leave_it_as_it_was(modules):
    with jax.enable_x64(False):
        targets = [f"{modules}:Table", f"{modules}:TorchTable"]
        assert (
            main(["parity", *targets, "--input", "4,3", "--layout", "torch", "--check", "forward"])
            == 0
        )
        assert not jax.config.jax_enable_x64


def test_layouts_may_be_targets_and_inputs_integers(modules):
    linear = [f"{modules}:flax_linear", f"{modules}:torch_linear", "--input", "4,3"]
    assert main(["parity", *linear, "--layout", f"{modules}:TABLE", "--check", "weights"]) == 0
    embedding = [f"{modules}:flax_embedding", f"{modules}:torch_embedding", "--input", "int:11:4,7"]
    assert main(["parity", *embedding, "--layout", "torch", "--check", "gradients"]) == 0


def test_without_a_layout_the_weights_stay_as_they_are(modules, capsys):
    linear = [f"{modules}:flax_linear", f"{modules}:torch_linear", "--input", "4,3"]
    assert main(["parity", *linear, "--layout", "none", "--check", "forward"]) == 1
    assert "layout=None: both modules keep their weights" in capsys.readouterr().out
    assert main(["parity", *linear, "--check", "forward"]) == 0


def test_a_pair_of_targets_is_exported_and_repeated_with_one(modules, capsys):
    both = [
        f"{modules}:flax_linear",
        f"{modules}:torch_linear",
        "--input",
        "4,3",
        "--layout",
        "torch",
    ]
    assert main(["parity", *both, "--check", "forward", "--export", "out"]) == 0
    one = [
        "parity",
        f"{modules}:flax_linear",
        "--layout",
        "torch",
        "--check",
        "forward",
        "--against",
        "out",
    ]
    assert main(one) == 0
    assert main([*one, "--flax-call", f"{modules}:doubled"]) == 1


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
            "no variant is called CausalAtention. Known are: Bert",
        ),
        (
            ["--check", "forwards"],
            "no check is called forwards. Known are: shapes, weights, forward, ",
        ),
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
            ["--mesh", "", "{m}:flax_linear", "{m}:torch_linear"],
            "--mesh runs our own table against PyTorch",
        ),
        (
            ["--mesh", "tensor=3"],
            "are 1, 2, 4 or 8, as its modules are small; got {'tensor': 3}. Use fewer devices",
        ),
        (["{m}:flax_linear"], "give pkg.mod:flax_factory pkg.mod:torch_factory; got"),
        (["{m}:flax_linear", "{m}:torch_linear"], "give the inputs: --input 3,5,6"),
        (
            ["{m}:flax_linear", "{m}:torch_linear", "--input", "3,x"],
            "an input is a shape such as 3,5,6",
        ),
        (
            ["{m}:flax_linear", "{m}:torch_linear", "--input", "50:3,4"],
            "an input is a shape such as 3,5,6, or int:50:3,5; got 50:3,4",
        ),
        (["{m}:nothing", "{m}:torch_linear"], "has no nothing"),
        (["no_such_module:f", "{m}:torch_linear"], "cannot import no_such_module"),
        (["flax_linear", "{m}:torch_linear"], "a target is pkg.mod:name; got flax_linear"),
        (
            ["{m}:flax_linear", "{m}:torch_linear", "--input", "4,3", "--layout", "nothing"],
            "layout must be one of 'auto', ",
        ),
        (
            ["{m}:flax_linear", "{m}:torch_embedding", "--input", "4,3", "--layout", "torch"],
            "do not pair",
        ),
        (
            [
                "{m}:flax_linear",
                "{m}:torch_linear",
                "--input",
                "4,3",
                "--layout",
                "torch",
                "--rules",
                "{m}:RULES",
            ],
            (
                "--rules is for what auto cannot pair, beside --layout auto, and an export holds"
                " its layout; got --rules"
            ),
        ),
        (
            ["{m}:flax_linear", "{m}:torch_linear", "--input", "4,5"],
            "the inputs do not go through the torch module",
        ),
    ],
)
def test_bad_usage_exits_with_2(arguments, message, modules, capsys):
    assert main(["parity", *(argument.format(m=modules) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: ")
    assert message in error
    assert "Traceback" not in error


def test_rules_for_some_parameters_pair_the_rest_as_auto_does(modules, capsys):
    targets = (f"{modules}:flax_linear", f"{modules}:torch_linear")
    arguments = ["parity", *targets, "--input", "4,3", "--check", "weights", "--rules"]
    assert main([*arguments, f"{modules}:RULES"]) == 0
    assert main([*arguments, f"{modules}:WRONG"]) == 2
    assert "kernel" in capsys.readouterr().err


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
    def full(reports, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(parity._WRITERS, ".json", full)
    arguments = ["parity", "--variant", "rms_norm", "--report", str(tmp_path / "r.json")]
    assert main([*arguments, "--report", str(tmp_path / "r.xml")]) == 2
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
        assert main(arguments) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "rms_norm.safetensors",
        "swiglu.safetensors",
    ]


def test_nothing_compared_exits_with_1(modules, capsys):
    targets = [f"{modules}:flax_linear", f"{modules}:torch_linear"]
    nothing = ["--flax-call", f"{modules}:not_a_number", "--torch-call", f"{modules}:not_a_number"]
    assert main(["parity", *targets, "--input", "4,3", "--check", "forward", *nothing]) == 1
    assert "NOT COMPARED" in capsys.readouterr().out
