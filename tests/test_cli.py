import subprocess
import sys

import pytest

from flax_attn.cli import main


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "parity" in shown
    assert "show" in shown


def test_no_command_is_bad_usage():
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_python_m_runs_the_same():
    run = subprocess.run([sys.executable, "-m", "flax_attn", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("flax-attn 0.")


def test_parity_without_torch_says_what_to_install_in_one_line():
    code = "import sys; sys.modules['torch'] = None; from flax_attn.cli import main; sys.exit(main(['parity']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == 'flax-attn: parity needs PyTorch: pip install "flax-attn[torch]"\n'


def test_show_shapes_prints_the_steps_of_grouped_queries(capsys):
    assert main(["show", "--shapes", "--text", "a b c d e", "--width", "12", "--heads", "6", "--kv-heads", "2"]) == 0
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


def test_show_writes_a_picture(tmp_path, capsys):
    path = tmp_path / "maps.png"
    assert main(["show", "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "say what to show"),
        (["show", "--shapes", "--text", " "], "at least one word"),
        (["show", "--shapes", "--heads", "5"], "num_heads must divide d_out"),
        (["show", "--out", "/no/such/folder/maps.png"], "in a folder that exists"),
        (["show", "--out", "maps.doc"], "not supported"),
        (["show", "--out", "maps"], "its suffix says the format"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, message, capsys, no_shape_checks):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999", "x"])
def test_a_seed_out_of_range_is_bad_usage(seed):
    with pytest.raises(SystemExit, match="2"):
        main(["show", "--shapes", "--seed", seed])
