"""The table of platforms follows from what is compiled, and claims nothing else."""

from pathlib import Path

import pytest

from flax_attn.backends.registry import BACKENDS, load
from tools import platforms

ROOT = Path(__file__).parents[2]
BEGIN, END = (f"<!-- tools/platforms.py: {word} -->\n" for word in ("begin", "end"))


def rows():
    """The cells of the table, by backend and platform."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in platforms.table().splitlines())
    return {cells[0].strip("`"): dict(zip(head[1:], cells[1:], strict=True)) for cells in lines}


def test_every_backend_has_a_row_and_only_claims_where_it_runs():
    table = rows()
    assert tuple(table) == BACKENDS
    for name, cells in table.items():
        supported = load(name).platforms
        for platform, shown in platforms.PLATFORMS.items():
            impossible = supported is not None and platform not in supported
            assert (cells[shown] == platforms.IMPOSSIBLE) == impossible
            # Nothing was run or measured but on CPUs.
            assert platform == "cpu" or not {"run", "measured"} & set(cells[shown].split(", "))


def test_what_is_claimed_has_a_test_or_a_figure():
    for name, path in platforms.INTERPRETED.items():
        text = (ROOT / path).read_text()
        assert "interpreted" in text
        assert name in text
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"`{name}`" in performance for name in platforms.MEASURED)


def test_a_chip_that_is_no_longer_compiled_for_leaves_the_table(monkeypatch):
    assert "v6e" in rows()["splash"]["TPU"]
    monkeypatch.setattr(platforms.tpu, "TOPOLOGIES", {"v5e": "v5e:2x2"})
    assert rows()["splash"]["TPU"] == "interpreted, compiled for v5e"
    monkeypatch.setattr(platforms.gpu, "KERNELS", ())
    assert rows()["tokamax"]["NVIDIA GPU"] == platforms.UNTESTED


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in platforms.FILES:
        (tmp_path / name).write_text(f"Before.\n\n{BEGIN}old\n{END}\nAfter.\n")
    return tmp_path


def test_check_names_what_is_out_of_date_and_writes_nothing(root, capsys):
    assert platforms.main(["--root", str(root), "--check"]) == 1
    assert capsys.readouterr().err.count("is out of date. Run `make tables` and commit it") == 3
    assert "old" in (root / "README.md").read_text()
    assert platforms.main(["--root", str(root)]) == 0
    assert platforms.main(["--root", str(root), "--check"]) == 0
    text = (root / "README.md").read_text()
    assert platforms.table() in text
    assert (text[:7], text[-7:]) == ("Before.", "After.\n")


def test_a_file_without_a_place_for_the_table_is_refused(root):
    (root / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match=r"README\.md: the table must be between one line"):
        platforms.main(["--root", str(root)])
