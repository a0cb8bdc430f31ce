import pytest

from flax_attn.bench.calls import MODEL_CALLS
from flax_attn.bench.predicted import CHIPS
from flax_attn.proof.faults import FAULTS, mesh
from flax_attn.proof.variants import VARIANTS
from tools import tables

BEGIN, END = "<!-- tools/tables.py: begin -->\n", "<!-- tools/tables.py: end -->\n"
TIMES = f"# Performance\n\n{BEGIN}{END}"
PAGE = f"# Backends\n\n{BEGIN}an old table\n{END}\nThe rest.\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "backends.md").write_text(PAGE)
    (tmp_path / "performance.md").write_text(TIMES)
    return tmp_path


def run(folder, *options):
    return tables.main(["--folder", str(folder), *options])


def test_pages_hold_every_row(folder):
    assert run(folder) == 0
    page = (folder / "appendix.md").read_text()
    assert all(f"\n| `{variant.name}` | `{variant.module}(" in page for variant in VARIANTS)
    assert all(f"| `{fault.variant.name}` | {fault.check} |\n" in page for fault in FAULTS)
    rows = len(VARIANTS) + len(FAULTS) + len(mesh.FAULTS)
    assert page.count("\n| ") == rows + 3 * 2  # the heads of three tables
    backends = (folder / "backends.md").read_text()
    assert backends.startswith(f"# Backends\n\n{BEGIN}\n| | `native` |")
    assert backends.endswith(f"\n{END}\nThe rest.\n")
    assert "an old table" not in backends
    times = (folder / "performance.md").read_text()
    assert all(f"**{chip.upper()}**" in times for chip in CHIPS)
    assert all(times.count(f"\n| {call.name} |") == len(CHIPS) for call in MODEL_CALLS)


def test_the_same_code_writes_the_same_pages(folder):
    run(folder)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert not any(" at 0x" in text for text in first.values())
    run(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_check_names_what_is_out_of_date_and_writes_nothing(folder, capsys):
    assert run(folder, "--check") == 1
    assert {path.name for path in folder.iterdir()} == {"backends.md", "performance.md"}
    assert (folder / "backends.md").read_text() == PAGE
    run(folder)
    capsys.readouterr()
    assert run(folder, "--check") == 0
    with (folder / "appendix.md").open("a") as file:
        file.write("by hand\n")
    assert run(folder, "--check") == 1
    error = f"{folder / 'appendix.md'} is out of date. Run `make tables` and commit it\n"
    assert capsys.readouterr().err == error


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"has no backends\.md\. Pass the folder"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["backends.md", "performance.md"])
@pytest.mark.parametrize("page", ["no markers", BEGIN, END, PAGE + PAGE])
def test_missing_or_repeated_markers_are_refused_before_anything_is_written(name, page, folder):
    (folder / name).write_text(page)
    line = "must be between one line <!-- tools/tables.py: begin --> and one line"
    with pytest.raises(SystemExit, match=line):
        run(folder)
    assert {path.name for path in folder.iterdir()} == {"backends.md", "performance.md"}


@pytest.mark.parametrize("page", ["no markers", BEGIN, END, PAGE + PAGE])
def test_a_table_goes_between_two_markers(page):
    with pytest.raises(ValueError, match="must be between one line"):
        tables.between_markers(page, "table")
    assert (
        tables.between_markers(PAGE, "new") == f"# Backends\n\n{BEGIN}\nnew\n\n{END}\nThe rest.\n"
    )
