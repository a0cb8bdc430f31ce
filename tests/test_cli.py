import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from flax_attn import native
from flax_attn.backends.registry import BACKENDS
from flax_attn.cli import main


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(
        command in shown for command in ("parity", "show", "backends", "bench", "generate", "plan")
    )


def test_no_command_is_bad_usage_and_lists_the_commands(capsys):
    assert main([]) == 64
    shown = capsys.readouterr().err
    assert "compare     say whether a JAX module and a PyTorch module are the same" in shown
    assert "plan        say what training or generation would take" in shown


def test_python_m_runs_the_same():
    run = subprocess.run(
        [sys.executable, "-m", "flax_attn", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("flax-attn 0.")


def test_a_command_ends_after_the_functions_of_atexit_and_before_its_modules():
    # What Python deletes at its end says so, unless the process has ended before.
    code = (
        "import atexit, os, sys; from flax_attn import cli;"
        "kept = type('Kept', (), {'__del__': lambda self: os.write(1, b'deleted')})();"
        "cli._run = lambda given: atexit.register(print, 'goodbye') and 2;"
        "sys.exit(cli.main())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert (run.stdout, run.stderr) == ("goodbye\n", "")


def test_parity_without_torch_says_what_to_install_in_one_line():
    code = (
        "import sys; sys.modules['torch'] = None; from flax_attn.cli import main;"
        " sys.exit(main(['parity']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 64
    assert (
        run.stderr == "flax-attn: parity needs PyTorch: pip install torch, or compare with an"
        " export: --against DIR\n"
    )


def test_show_shapes_prints_the_steps_of_grouped_queries(capsys):
    assert (
        main(
            [
                "show",
                "--shapes",
                "--text",
                "a b c d e",
                "--width",
                "12",
                "--heads",
                "6",
                "--kv-heads",
                "2",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    for step, axes, shape in [
        ("query", "b t n h", "(1, 5, 6, 2)"),
        ("key", "b s k h", "(1, 5, 2, 2)"),
        ("scores", "b n t s", "(1, 6, 5, 5)"),
        ("context", "b t n v", "(1, 5, 6, 2)"),
        ("output", "b t d", "(1, 5, 12)"),
    ]:
        (line,) = (line for line in shown.splitlines() if line.startswith(f"│ {step} "))
        assert axes in line
        assert shape in line


def test_show_environment_says_whether_there_are_native_kernels(capsys, monkeypatch):
    assert main(["show", "environment"]) == 0
    levels = ", ".join(native.levels()) or native.missing()
    assert f"native kernels: {levels}\n" in capsys.readouterr().out


NOT_BUILT = {
    "built nowhere": (
        (),
        r"was not built, which takes a C\+\+ compiler when flax_attn is installed: install one",
    ),
    "sources without it": (
        ("pyproject.toml",),
        r"was not built in {}, from which Python .*: start it elsewhere, or build it there",
    ),
    "a file that is none": (
        ("library.so",),
        r"fails to load: {}/library\.so: .*\. Build it here with a C\+\+ compiler: install one",
    ),
}


@pytest.mark.parametrize(("files", "reason"), NOT_BUILT.values(), ids=NOT_BUILT)
def test_show_environment_says_why_there_are_no_native_kernels(
    files, reason, tmp_path, capsys, monkeypatch
):
    for name in files:
        (tmp_path / name).write_text("no library")
    origin = tmp_path / "library.so"
    found = SimpleNamespace(origin=str(origin)) if origin.exists() else None
    monkeypatch.setattr(native, "find_spec", lambda name: found)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    # A library that does not load is no silent step to other backends.
    warned = pytest.warns(RuntimeWarning, match=reason.format(tmp_path)) if found else nullcontext()
    with warned:
        assert main(["show", "environment"]) == 0
    shown = capsys.readouterr().out
    assert re.search(f"native kernels: its library {reason.format(tmp_path)}", shown)


def test_show_writes_a_picture(tmp_path, capsys):
    path = tmp_path / "maps.png"
    assert main(["show", "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["--platform", "cpu"], "native" if native.library() else "blocked"),
        (
            ["--platform", "cpu", "--shape", "2,8,3,4"],
            "native" if native.library() else "reference",
        ),
        (
            [
                "--platform",
                "tpu",
                "--dtype",
                "bfloat16",
                "--shape",
                "1,2048,8,128",
                "--kv-heads",
                "2",
            ],
            "splash",
        ),
        (["--platform", "tpu", "--dtype", "float64", "--keys", "8192", "--no-causal"], "blocked"),
        (["--platform", "cpu", "--window", "100"], "native" if native.library() else "blocked"),
    ],
)
def test_backends_names_the_one_that_would_run_and_every_other(arguments, chosen, capsys):
    assert main(["backends", *arguments]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    where = {"cpu": "cpu", "tpu": "tpu (v5e)"}[arguments[1]]
    assert first == f"{chosen} runs on {where}"
    faster = [line for line in lines if "would be the fastest" in line]
    lines = [line for line in lines if line not in faster]
    assert [line[3:].split()[0] for line in lines] == list(BACKENDS)
    assert [line[:2] for line in lines].count("->") == 1
    assert next(line for line in lines if line.startswith("->")).startswith(f"-> {chosen} ")


@pytest.mark.parametrize(
    ("arguments", "platforms"), [([], ["CPU", "GPU", "TPU"]), (["--platform", "tpu"], ["TPU"])]
)
def test_backends_asks_about_the_calls_of_models(arguments, platforms, capsys, no_shape_checks):
    assert main(["backends", "--models", *arguments]) == 0
    shown = capsys.readouterr().out
    assert [
        line.split()[-1] for line in shown.splitlines() if "Attention of models" in line
    ] == platforms
    assert shown.count("T5 base encoder") == len(platforms)
    assert "splash takes no bias; got shape" in shown


@pytest.mark.parametrize(
    ("arguments", "chips"),
    [([], ["A100", "H200", "B200", "V5E", "V6E"]), (["--platform", "b200"], ["B200"])],
)
def test_backends_prints_the_predicted_times(arguments, chips, capsys, no_shape_checks):
    assert main(["backends", "--models", "--times", *arguments]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"Predicted on (\w+), ms forward", shown) == chips
    assert shown.count("T5 base encoder") == len(chips)


def test_bench_measures_one_shape_and_writes_all_that_was_measured(tmp_path, capsys, monkeypatch):
    from flax_attn.bench import suite

    monkeypatch.setattr(
        suite, "functions", lambda backends, platform: [suite.ours(backend) for backend in backends]
    )
    monkeypatch.setattr(suite.machine, "product_limit", lambda dtype, size: 1e11)
    path = tmp_path / "bench.json"
    assert (
        main(
            [
                "bench",
                "--shape",
                "1,24,2,8",
                "--rounds",
                "2",
                "--backend",
                "blocked",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    assert "(1, 24, 2, 8) forward+backward" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    ours = [row for row in rows if row["implementation"] == "ours blocked"]
    assert [row["status"] for row in ours] == ["timed", "timed"]
    assert all(len(row["seconds"]) == 2 and row["error"] <= 1 for row in ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "say what to show"),
        (
            ["backends", "--dtype", "bf16"],
            "--dtype must be one of 'float64', 'float32', 'bfloat16', 'float16'; got 'bf16'",
        ),
        (["backends", "--dtype", "float31"], "float31"),
        (["backends", "--kv-heads", "5"], "must divide the query heads"),
        (
            ["backends", "--models", "--kv-heads", "5", "--no-causal"],
            "calls of its own, and --kv-heads, --no-causal",
        ),
        (["backends", "--times"], "--times is about the calls of models"),
        (
            ["backends", "--models", "--times", "--platform", "cpu"],
            'times are predicted for accelerators; got platform "cpu"',
        ),
        (
            ["bench", "--shape", "1,2,8,8", "--backend", "blokced"],
            "backend must be one of 'auto', ",
        ),
        (["bench", "--shape", "1,2,8,8", "--plot", "growth.png"], "give one of them"),
        (["bench", "--json", "/no/such/folder/bench.json"], "in a folder that exists"),
        (["show", "--shapes", "--text", " "], "at least one word"),
        (["show", "--shapes", "--heads", "5"], "num_heads must divide d_out"),
        (["show", "--out", "/no/such/folder/maps.png"], "in a folder that exists"),
        (["show", "--out", "maps.doc"], "not supported"),
        (["show", "--out", "maps"], "its suffix says the format"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_64(arguments, message, capsys, no_shape_checks):
    assert main(arguments) == 64
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999", "x"])
def test_a_seed_out_of_range_is_bad_usage(seed):
    with pytest.raises(SystemExit, match="64"):
        main(["show", "--shapes", "--seed", seed])


@pytest.mark.parametrize(
    "arguments", [["backends", "--shape", "1,8,8"], ["bench", "--shape", "1,8,0,8"]]
)
def test_a_shape_that_is_none_is_bad_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="64"):
        main(arguments)
    assert "argument --shape" in capsys.readouterr().err


def test_the_skill_is_printed_and_found(capsys):
    assert main(["skill", "--path"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert main(["skill"]) == 0
    assert capsys.readouterr().out.strip() == path.read_text().strip()
    for word in ("flax-attn compare", "flax-attn verify", "schema.json"):
        assert word in path.read_text()
