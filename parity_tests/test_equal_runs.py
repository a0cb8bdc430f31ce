"""The two packages repeat no long run of code: what is equal stands once in attn_spec."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import equal_runs  # noqa: E402 (a script beside the packages)

CODE = [f"x{i} = {i}" for i in range(40)]


def write(root, package, lines):
    folder = root / package
    folder.mkdir()
    (folder / "code.py").write_text("\n".join(lines) + "\n")


def runs(root, ours, theirs):
    write(root, "flax_attn", ours)
    write(root, "torch_ref", theirs)
    return equal_runs.equal_runs(*equal_runs.packages(root))


def test_no_run_of_30_equal_lines_is_left():
    ours, theirs = equal_runs.packages()
    assert len(ours) > len(theirs) > 50
    found = equal_runs.equal_runs(ours, theirs)
    assert not found, "\n".join(map(str, found))


def test_a_run_is_found_once_with_its_places(tmp_path):
    found = runs(tmp_path, ["import jax", *CODE], ["import torch", "y = 1", *CODE, "z = 2"])
    assert [str(run) for run in found] == [
        "  40 lines: flax_attn/code.py:2 torch_ref/code.py:3  x0 = 0"
    ]


def test_docstrings_comments_and_blank_lines_are_left_out(tmp_path):
    words = ['"""Text."""', *(f"# {line}" for line in CODE), *([""] * 40)]
    assert not runs(tmp_path, [*words, *CODE[:29]], [*words, *CODE[:29], "y = 1"])


def test_another_line_ends_a_run(tmp_path):
    assert not runs(tmp_path, CODE, [*CODE[:20], "y = 1", *CODE[20:]])
