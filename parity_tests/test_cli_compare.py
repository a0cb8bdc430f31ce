"""`flax-attn compare` and `flax-attn verify`: two modules of anybody's, from a shell."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jsonschema
import pytest
import torch

from flax_attn.cli import hugging_face, main
from flax_attn.cli.guard import UsageError
from flax_attn.cli.inputs import draw, parse
from flax_attn.cli.specs import CannotCompareError
from flax_attn.parity.journal import Journal
from flax_attn.parity.report import document

MODULES = '''
import os
import sys

import jax
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


class Port(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x, mask=None, slope=0.25):
        x = self.layer(x)
        x = jnp.where(x > 0, x, slope * x)
        return x if mask is None else jnp.where(mask[:, None], x, 0)


if "ENDS" in os.environ:
    os._exit(0)


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, mask=None, slope=0.25):
        x = torch.nn.functional.leaky_relu(self.layer(x), slope)
        return x if mask is None else x * mask[:, None]


instance = Original()


def port_sum(x):
    return x.sum(-1)


def port_mean(x):
    return x.sum(0) / 4


def torch_mean(x):
    return x.mean(0)


def scaled(module, x, factor):
    return factor * module(x)


def broken():
    raise KeyError("no such table")


def nothing():
    return None


class ExitsInCall(Port):
    def __call__(self, x):
        sys.exit(0)


class ExitsInInit(nnx.Module):
    def __init__(self):
        sys.exit()


class ExitsAtOnce(Port):
    def __call__(self, x):
        os._exit(0)


@jax.custom_vjp
def no_way_back(x):
    return x


no_way_back.defvjp(lambda x: (x, None), lambda _, cotangent: os._exit(0))


class ExitsBackward(Port):
    def __call__(self, x):
        return no_way_back(super().__call__(x))


class Branches(Port):
    def __call__(self, x):
        return super().__call__(x if x.sum() > 0 else 1 * x)


class OriginalExits(Original):
    def forward(self, x):
        sys.exit(7)


class OriginalExitsAtOnce(Original):
    def forward(self, x):
        os._exit(7)


def flax_norm():
    return nnx.GroupNorm(8, 4, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))


def torch_norm():
    return torch.nn.GroupNorm(4, 8)


def channels_last(module, x):
    return module(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
'''


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Put a module of factories into the folder that the command is run in."""
    name = f"modules_{re.sub(r'[^0-9]', '', tmp_path.name)}_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    # The command adds folders, in which a torch.py may lie: no other test may find it.
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A port that ends the process would end the tests, with the code of a success.
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"os._exit({status})"))
    return name


def compare(modules, flax, theirs, *options):
    """Run the command on two names of the file."""
    return main(["compare", f"{modules}:{flax}", f"{modules}:{theirs}", *options])


X = ("--input", "4,3")
FORWARD = ("--check", "forward")


def read(path):
    """Return a written document, after it was validated."""
    content = json.loads(Path(path).read_text())
    jsonschema.validate(content, json.loads(document.SCHEMA.read_text()))
    return content


def test_a_comparison_is_printed_and_written(modules, capsys):
    options = [*X, *FORWARD, "--check", "training", "--report", "r.xml", "--json", "r.json"]
    assert compare(modules, "flax_linear", "torch_linear", *options) == 2
    report = read("r.json")
    assert report["name"] == "flax_linear"
    assert (report["state"], report["error"]) == ("equal where tested", None)
    (left_out,) = report["coverage"]["untested"]
    assert left_out.endswith("checks, which were not asked for")
    assert [check["name"] for check in report["checks"]] == ["forward", "training"]
    names = [f"{modules}:flax_linear", f"{modules}:torch_linear"]
    assert report["command"] == " ".join(["flax-attn", "compare", *names, *options])
    assert list(report["request"]["files"]) == [f"{modules}.py"]
    assert 'tests="2"' in Path("r.xml").read_text()
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("flax_linear: equal where tested (loosened by the caller: 2 of ")


@pytest.mark.parametrize(
    ("flax", "torch", "options"),
    [
        ("Port", "Original", X),
        ("Port", "instance", X),
        ("Port", "Original", ("--input", "x:float:4,3", "--input", "mask:bool:4")),
        ("Port", "Original", ("--input", "x:float:4,3:-2..5", "--constant", "slope=0.2")),
        ("flax_embedding", "torch_embedding", ("--input", "int:4,7:0..10")),
        ("port_sum", "port_sum", X),
        ("flax_linear", "torch_linear", (*X, "--layout", "{m}:TABLE")),
        ("flax_linear", "torch_linear", (*X, "--rules", "{m}:RULES")),
    ],
)
def test_what_is_equal_in_one_check_exits_with_2(flax, torch, options, modules):
    options = [option.format(m=modules) for option in options]
    assert compare(modules, flax, torch, *options, *FORWARD, "--json", "r.json") == 2
    report = read("r.json")
    assert (report["state"], report["passed"]) == ("equal where tested", True)
    (left_out,) = report["coverage"]["untested"]
    assert left_out.endswith("checks, which were not asked for")


@pytest.mark.parametrize(("flax", "torch"), [("Port", "Original"), ("flax_linear", "torch_linear")])
def test_what_is_equal_in_all_checks_exits_with_0(flax, torch, modules):
    assert compare(modules, flax, torch, *X, "--json", "r.json") == 0
    report = read("r.json")
    assert (report["state"], report["loosened"]) == ("equal", [])
    assert report["coverage"]["untested"] == []


def test_files_are_specs_and_find_what_lies_beside_them(modules, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "port.py").write_text(f"from {modules} import Port\nfrom helper import HELP\n")
    (folder / "helper.py").write_text("HELP = 1\n")
    (folder / "torch.py").write_text(f"from {modules} import Original\n")
    specs = ["folder/port.py:Port", "folder/torch.py:Original"]
    assert main(["compare", *specs, *X, *FORWARD, "--json", "-"]) == 2
    files = json.loads(capsys.readouterr().out)["request"]["files"]
    beside = {"folder/helper.py", "folder/port.py", "folder/torch.py", f"{modules}.py"}
    assert set(files) == beside


def test_what_differs_exits_with_1_and_says_what_to_look_at(modules, capsys):
    call = ["--torch-call", f"{modules}:doubled"]
    options = [*X, *FORWARD, *call, "--json", "-"]
    assert compare(modules, "flax_linear", "torch_linear", *options) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["state"] == "different"
    assert "compare again" in report["next"][0]


def test_constants_reach_both_calls(modules):
    calls = ["--flax-call", f"{modules}:scaled", "--torch-call", f"{modules}:scaled"]
    options = [*X, *FORWARD, *calls, "--constant", "factor=2.5"]
    assert compare(modules, "flax_linear", "torch_linear", *options) == 2


def test_equal_where_tested_exits_with_2(modules):
    options = [*X, *FORWARD, "--check", "dropout"]
    assert compare(modules, "flax_linear", "torch_linear", *options) == 2


@pytest.mark.parametrize(
    ("flax", "torch", "options", "reason"),
    [
        ("flax_linear", "torch_embedding", X, "do not pair"),
        ("flax_linear", "torch_linear", ("--input", "4,5"), "do not go through the torch module"),
        ("broken", "torch_linear", X, r"broken raised KeyError: 'no such table' \(.*py:\d+\)"),
        ("nothing", "torch_linear", X, "got NoneType"),
        ("ExitsInCall", "Original", X, r"py:\d+ ended the process \(SystemExit 0\). What is"),
        ("ExitsInInit", "Original", X, r"py:\d+ ended the process \(SystemExit None\)"),
        ("ExitsAtOnce", "Original", X, r"py:\d+ ended .* \(os\._exit\(0\)\).* remove os\._exit"),
        ("Port", "OriginalExitsAtOnce", X, r"py:\d+ ended the process \(os\._exit\(7\)\)"),
        ("Branches", "Original", X, r"JAX cannot compile `return super.* else 1 \* x\)` at .*py:"),
        ("Port", "OriginalExits", X, r"py:\d+ ended the process \(SystemExit 7\)"),
        ("flax_linear", "torch_linear", (*X, "--rules", "{m}:WRONG"), "kernel"),
        (
            "flax_linear",
            "torch_linear",
            (*X, "--flax-call", "{m}:not_a_number", "--torch-call", "{m}:not_a_number"),
            None,
        ),
    ],
)
def test_what_cannot_be_compared_exits_with_3_and_writes_json(
    flax, torch, options, reason, modules, capsys
):
    options = [option.format(m=modules) for option in options]
    assert compare(modules, flax, torch, *options, *FORWARD, "--json", "r.json") == 3
    report = read("r.json")
    assert report["state"] == "not compared"
    error = capsys.readouterr().err
    if reason is not None:
        assert error.startswith("flax-attn: could not compare: ")
        assert re.search(reason, report["error"])
        assert report["next"][0] == report["error"]


@pytest.mark.parametrize("command", ["compare", "mutants"])
def test_a_backward_pass_that_ends_the_process_is_no_difference(command, modules, capsys):
    sides = f"{modules}:ExitsBackward", f"{modules}:Original"
    assert main([command, *sides, *X, "--check", "gradients"]) == 3
    captured = capsys.readouterr()
    assert re.search(r"py:\d+ ended the process \(os\._exit\(0\)\)", captured.out + captured.err)


def test_verify_outlives_a_port_that_ends_the_process(modules, monkeypatch, capsys):
    assert compare(modules, "Port", "Original", *X, *FORWARD, "--json", "r.json") == 2
    # The file is the same, but reads the environment.
    monkeypatch.setenv("ENDS", "1")
    sys.modules.pop(modules)
    assert main(["verify", "r.json"]) == 3
    assert "ended the process (os._exit(0))" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_an_error_of_the_comparison_itself_is_no_difference(kind, modules, monkeypatch, capsys):
    def fails(*arguments, **options):
        raise kind("ours")

    monkeypatch.setattr(importlib.import_module("flax_attn.parity.compare"), "report_on", fails)
    assert compare(modules, "flax_linear", "torch_linear", *X, "--json", "r.json") == 3
    assert read("r.json")["error"] == f"the comparison itself raised {kind.__name__}: ours"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["compare"], ["mutants", "--count", "1"]])
def test_a_file_that_ends_the_process_is_named_with_its_line(command, modules, tmp_path, capsys):
    (tmp_path / "exits.py").write_text("import argparse\n\nargparse.ArgumentParser().error('no')\n")
    assert main([*command, "exits.py:Port", f"{modules}:Original", *X]) == 3
    said = "could not compare: exits.py:3 ended the process (SystemExit 2). What is compared must"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{m}:flax_linear"], "give both sides, FLAX TORCH, or FLAX --against DIR; got"),
        (["{m}:flax_linear", "{m}:torch_linear"], "give the inputs: --input 2,3,12,12"),
        (["{m}:flax_linear", "--against", "out", *X], "an export holds its inputs"),
        (
            ["{m}:flax_linear", "{m}:torch_linear", *X, "--check", "forwards"],
            "no check is called forwards (nearest: forward). Known are: shapes, ",
        ),
        (["{m}:flax_linear", "{m}:torch_linear", "--input", "3,x"], "an input is SHAPE, KIND"),
        (["{m}:flax_linear", "{m}:torch_linear", *X, "--constant", "eps"], "is NAME=VALUE"),
        (["{m}:nothing_here", "{m}:torch_linear", *X], "has no nothing_here"),
        (["no_such_module:f", "{m}:torch_linear", *X], "cannot import no_such_module"),
        (["no_file.py:f", "{m}:torch_linear", *X], "there is no file no_file.py"),
        (["flax_linear", "{m}:torch_linear", *X], "a spec is FILE.py:NAME or pkg.mod:NAME; got"),
        (["torch.nn:Linear", "{m}:torch_linear", *X], "needs arguments that the command line"),
        (
            ["{m}:flax_linear", "{m}:torch_linear", *X, "--layout", "torchref"],
            "or a spec of a table; got 'torchref' (nearest: torch_ref)",
        ),
        (
            [
                "{m}:flax_linear",
                "{m}:torch_linear",
                *X,
                "--layout",
                "torch",
                "--rules",
                "{m}:RULES",
            ],
            "--rules is for what auto cannot pair, beside --layout auto; got",
        ),
        (
            ["{m}:flax_linear", "hf:qwen33", *X],
            "transformers has no type 'qwen33'; the nearest are qwen3,",
        ),
        (["{m}:flax_linear", "{m}:torch_linear", *X, "--json", "/no/such/r.json"], "cannot write"),
    ],
)
def test_bad_usage_exits_with_64(arguments, message, modules, capsys):
    assert main(["compare", *(argument.format(m=modules) for argument in arguments)]) == 64
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x:float", "an input is SHAPE"),
        ("3,0", "an input is SHAPE"),
        ("a:b:float:3", "an input is SHAPE"),
        ("1x:float:3", "an input is SHAPE"),
        ("x:float7:3", "of the kinds float, bool, int, "),
        ("ids:int:2,7", "integers have a smallest and a largest value: ids:int:2,7:0..99"),
        ("mask:bool:2:0..1", "a mask holds both values, and has no range"),
        ("float:2:5..1", "a range is LOW..HIGH of values that float holds"),
        ("uint8:2:0..256", "of values that uint8 holds"),
        ("int:2:0..1.5", "of values that int holds"),
        ("float:2:0..inf", "a range is LOW..HIGH, such as 0..99; got '0..inf'"),
    ],
)
def test_an_input_that_cannot_be_read_is_bad_usage(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text)


def test_inputs_have_a_name_each_or_none():
    with pytest.raises(UsageError, match="a name each, or none has; got 'x', ''"):
        draw([parse("x:float:3"), parse("4")], 0)


def test_integers_hold_both_ends_and_masks_both_values():
    ids, mask, narrow, pixels = draw(
        [parse("int:2,7:0..9999"), parse("bool:3,5"), parse("bool:2,1"), parse("uint8:5:0..255")], 1
    )
    assert {0, 9999} <= set(ids.flat)
    assert mask[:, 0].all()
    assert not mask.all()
    assert narrow.all()
    assert pixels.dtype == "uint8"


def test_factories_are_called_with_x64_enabled_and_leave_it_as_it_was(modules):
    with jax.enable_x64(False):
        options = ["--layout", "torch", *X, *FORWARD]
        assert compare(modules, "Table", "TorchTable", *options) == 2
        assert not jax.config.jax_enable_x64


def test_without_a_layout_the_weights_stay_as_they_are(modules, capsys):
    options = [*X, *FORWARD, "--layout", "none"]
    assert compare(modules, "flax_linear", "torch_linear", *options) == 1
    assert "layout=None: both modules keep their weights" in capsys.readouterr().out


def test_a_pair_is_exported_and_repeated_with_one(modules, capsys):
    both = [*X, *FORWARD, "--name", "linear", "--export", "out"]
    assert compare(modules, "flax_linear", "torch_linear", *both) == 2
    one = ["compare", f"{modules}:flax_linear", *FORWARD, "--against", "out"]
    assert main(one) == 2
    assert main([*one, "--flax-call", f"{modules}:doubled"]) == 1


def test_a_check_that_ends_the_process_is_named_by_the_next_start(modules, tmp_path):
    # PyTorch 2.13 has a segmentation fault in the backward pass of GroupNorm over a permuted input
    # in float64 that needs no gradient.
    names = [f"{modules}:flax_norm", f"{modules}:torch_norm", "--input", "2,5,6,8"]
    checks = ["--check", "forward", "--check", "training", "--check", "shapes"]
    call = ["--torch-call", f"{modules}:channels_last", "--json", "r.json"]
    command = [sys.executable, "-m", "flax_attn", "compare", *names, *checks, *call]
    options = {"capture_output": True, "text": True, "check": False}
    first = subprocess.run(command, **options)
    assert first.returncode == -signal.SIGSEGV
    (journal,) = tmp_path.glob("cache/flax-attn/journals/*.json")
    found = json.loads(journal.read_text())
    assert found["running"] == "training"
    assert [check["name"] for check in found["found"]] == ["forward"]
    for _ in range(2):
        run = subprocess.run(command, **options)
        assert run.returncode == 2
        assert "flax-attn: training: the check ended the process" in run.stderr
        results = {check["name"]: check["result"] for check in read("r.json")["checks"]}
        assert results == {"forward": "holds", "training": "nothing compared", "shapes": "holds"}
    assert not journal.exists()
    assert journal.with_suffix(".died.json").exists()


def test_a_journal_takes_no_running_process_and_no_cut_file_for_a_death(tmp_path):
    path = tmp_path / "x.json"
    first = Journal(path)
    first.begin("forward")
    assert Journal(path).died == []
    path.write_text('{"process": 1, "runn')
    assert Journal(path).died == []
    assert not first.record.exists()


def test_a_search_that_was_ended_once_is_tried_again(tmp_path):
    path = tmp_path / "x.json"
    for left_out in [], ["where they differ"]:
        journal = Journal(path)
        journal.begin("where they differ")
        # A number that no process has.
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "process": 2**22}))
        assert Journal(path).left_out == left_out


def test_without_a_home_a_comparison_runs_and_says_so(modules, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/home")
    assert compare(modules, "flax_linear", "torch_linear", *X, *FORWARD) == 2
    assert "a check that ends the process will not be known" in capsys.readouterr().err


def claimed(modules, flax, torch, *options):
    """Write a report, and return what verify says of it."""
    compare(modules, flax, torch, *options, "--json", "claim.json")
    code = main(["verify", "claim.json", "--json", "found.json"])
    return code, read("found.json")


ONLY_FORWARD = (*X, *FORWARD)


@pytest.mark.parametrize(
    ("options", "code", "state", "loosened"),
    [
        (X, 0, "equal", ""),
        (ONLY_FORWARD, 2, "equal where tested", " (loosened by the caller: 1 of "),
    ],
)
def test_a_claim_that_stands_is_compared_on_a_fresh_seed_and_on_other_shapes(
    options, code, state, loosened, modules, capsys
):
    exited, found = claimed(modules, "Port", "Original", *options)
    assert exited == code
    assert (found["claimed"], found["state"], found["stands"]) == (state, state, True)
    shapes = [run["shapes"]["input 0"] for run in found["runs"]]
    assert shapes == [[4, 3], [5, 3]]
    assert {run["seed"] for run in found["runs"]} != {0}
    assert found["notes"] == ["PyTorch takes no other size than 3"]
    last = capsys.readouterr().out.split("claim.json: ")[1]
    first = last.splitlines()[0]
    assert first.startswith(f"the claim {state!r} stands{loosened}")
    assert ("loosened" in first) == bool(loosened)


def test_what_is_equal_for_one_length_alone_does_not_stand(modules, capsys):
    code, found = claimed(modules, "port_mean", "torch_mean", *ONLY_FORWARD)
    assert (code, found["claimed"], found["state"]) == (
        1,
        "equal where tested",
        "different",
    )
    assert not found["stands"]
    assert found["runs"][0]["state"] == "equal where tested"
    assert "forward: error" in found["runs"][2]["failed"][-1] + found["runs"][2]["failed"][0]
    assert "the claim 'equal where tested' does not stand" in capsys.readouterr().out


def test_a_difference_that_is_there_again_exits_with_1(modules):
    options = (*ONLY_FORWARD, "--torch-call", f"{modules}:doubled")
    code, found = claimed(modules, "flax_linear", "torch_linear", *options)
    assert (code, found["stands"], found["state"]) == (1, True, "different")


def edited(change):
    """Change a written report."""
    report = json.loads(Path("claim.json").read_text())
    change(report)
    Path("claim.json").write_text(json.dumps(report))


def test_a_difference_that_is_claimed_and_not_found_does_not_stand(modules):
    claimed(modules, "Port", "Original", *ONLY_FORWARD)
    edited(lambda report: report.update(state="different", loosened=[]))
    assert main(["verify", "claim.json", "--json", "found.json"]) == 1
    found = read("found.json")
    assert not found["stands"]
    assert found["loosened"][0].startswith("1 of ")


def test_other_versions_are_said(modules, capsys):
    claimed(modules, "Port", "Original", *ONLY_FORWARD)
    edited(lambda report: report["environment"].update(jax="0.0.1"))
    assert main(["verify", "claim.json"]) == 2
    assert "made with jax 0.0.1, here " in capsys.readouterr().out


def test_a_claim_on_other_files_cannot_be_verified(modules, capsys):
    claimed(modules, "Port", "Original", *ONLY_FORWARD)
    with Path(f"{modules}.py").open("a") as file:
        file.write("\n# changed\n")
    assert main(["verify", "claim.json"]) == 3
    shown = capsys.readouterr().out
    assert f"changed since the report was made, or not here: {modules}.py" in shown


REPORT = {"kind": "comparison", "version": 1, "name": "a", "environment": {}, "loosened": []}
REPORT |= {"state": "equal", "request": {"flax": "a:b", "torch": "a:b"}}


def test_a_report_without_what_is_read_of_it_is_bad_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for key in ("name", "state", "loosened", "environment", "request"):
        rest = {other: REPORT[other] for other in REPORT if other != key}
        Path("claim.json").write_text(json.dumps(rest))
        assert main(["verify", "claim.json"]) == 64
        said = f"claim.json has no '{key}', which flax-attn compare --json writes: make the report"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "cannot read claim.json: "),
        ({"version": 0}, "is no report of version 1"),
        ({"kind": "table"}, "is no report of version 1"),
        ({"request": None}, "was written from Python"),
        ({"request": "a:b"}, "asks for what is not known here"),
        ({"request": {"torch": "a:b"}}, "asks for what is not known here"),
        ({"request": {"flax": "a:b", "torch": "a:b", "new": 1}}, "asks for what is not known here"),
        (
            {"request": {"flax": "a:b", "torch": "recorded:out"}},
            "compares with an export, which has no results for other inputs",
        ),
    ],
)
def test_a_report_that_cannot_be_verified_is_bad_usage(
    changed, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if changed is not None:
        Path("claim.json").write_text(json.dumps(REPORT | changed))
    assert main(["verify", "claim.json"]) == 64
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_mapping_is_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("claim.json").write_text("[]")
    assert main(["verify", "claim.json"]) == 64
    assert "is no report of version 1" in capsys.readouterr().err


QWEN3 = """
from flax import nnx
from flax_attn.models.qwen3 import Qwen3, Qwen3Config

LAYOUT = Qwen3.family.layout


def make():
    config = Qwen3Config(
        24, 40, 4, 2, num_kv_heads=2, head_dim=6, context_length=64, vocab_size=99
    )
    return Qwen3(config, rngs=nnx.Rngs(0))
"""


@pytest.mark.parametrize("kind", ["qwen3", "bert", "mixtral"])
def test_a_small_model_of_transformers_is_built_in_float64(kind):
    model = hugging_face.build(kind)
    angles = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert bool(angles) == (kind != "bert")
    assert all(buffer.dtype == torch.float64 for buffer in angles)
    tokens = torch.arange(14).reshape(2, 7)
    output = hugging_face.call(model, tokens)
    assert output.dtype == torch.float64
    assert output.shape == (2, 7, 24 if kind == "bert" else 99)
    assert sum(weight.numel() for weight in model.parameters()) < 100_000
    assert not model.training
    # Below float64 it is what transformers has.
    low = hugging_face.call(model.bfloat16(), tokens)
    assert low.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_the_folders_of_what_was_compared_are_searched_no_longer(modules):
    before = list(sys.path)
    specs = [f"{modules}:flax_linear", f"{modules}:torch_linear"]
    assert main(["compare", *specs, *X, *FORWARD, "--json", "r.json"]) == 2
    assert sys.path == before
    assert main(["verify", "r.json"]) in (0, 2)
    assert sys.path == before


@pytest.mark.parametrize("kind", ["swin", "convnext", "vit"])
def test_a_small_model_of_images_runs(kind):
    model = hugging_face.build(kind)
    size = model.config.image_size
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    output = hugging_face.call(model, images)
    assert output.dtype == torch.float64
    assert sum(weight.numel() for weight in model.parameters()) < 300_000


def test_our_qwen3_equals_that_of_transformers_from_a_shell(modules):
    Path("ours.py").write_text(QWEN3)
    specs = ["ours.py:make", "hf:qwen3", "--input", "int:2,7:0..98", "--layout", "ours.py:LAYOUT"]
    assert main(["compare", *specs, *FORWARD, "--json", "r.json"]) == 2, read("r.json")["error"]
    assert read("r.json")["state"] == "equal where tested"
    assert "transformers" in read("r.json")["environment"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("qwen3", ["Qwen3ForCausalLM", "hidden_size=24", "rms_norm_eps=1e-06", "'rope_theta': 1"]),
        ("gpt2", ["n_embd=24", "n_head=4", "layer_norm_epsilon=1e-05", "=gelu_new"]),
        ("clip", ["text_config.hidden_size=24", "vision_config.hidden_act=quick_gelu"]),
    ],
)
def test_the_sizes_and_constants_of_a_small_model_are_printed(kind, told, capsys):
    hugging_face.build(kind)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flax-attn: hf:{kind} is ")
    assert all(word in line for word in told), line


def test_a_type_that_no_small_model_has_is_said(monkeypatch):
    def refuses(kind, config_class):
        raise KeyError("stages")

    monkeypatch.setattr(hugging_face, "_built", refuses)
    rule = (
        r"no small model of the type 'swin': KeyError: 'stages'. Name a function .* FILE\.py:make"
    )
    with pytest.raises(CannotCompareError, match=rule):
        hugging_face.build("swin")


def test_without_transformers_a_type_is_bad_usage(modules, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    assert main(["compare", f"{modules}:flax_linear", "hf:qwen3", *X]) == 64
    assert "hf:qwen3 needs transformers: pip install transformers" in capsys.readouterr().err
