import pytest

from flax_attn.bench.calls import MODEL_CALLS
from flax_attn.bench.predicted import CHIPS
from flax_attn.proof.faults import FAULTS, mesh
from flax_attn.proof.variants import VARIANTS
from tools import tables

BEGIN, END = "<!-- tools/tables.py: begin -->\n", "<!-- tools/tables.py: end -->\n"
# Pages before a run.
TIMES = f"# Performance\n\n{BEGIN}{END}"
PAGE = f"# Backends\n\n{BEGIN}an old table\n{END}\nThe rest.\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "backends.md").write_text(PAGE)
    (tmp_path / "performance.md").write_text(TIMES)
    return tmp_path


def run(folder, *options):
    return tables.main(["--folder", str(folder), *options])


def written(folder, name):
    """Return a page after a run."""
    assert run(folder) == 0
    return (folder / name).read_text()


def test_the_appendix_holds_every_row(folder):
    page = written(folder, "appendix.md")
    assert all(f"\n| `{variant.name}` | `{variant.module}(" in page for variant in VARIANTS)
    assert all(f"| `{fault.variant.name}` | {fault.check} |\n" in page for fault in FAULTS)
    rows = len(VARIANTS) + len(FAULTS) + len(mesh.FAULTS)
    # And the heads of three tables.
    assert page.count("\n| ") == rows + 3 * 2


def test_a_table_of_backends_takes_the_place_of_the_old_one(folder):
    page = written(folder, "backends.md")
    assert page.startswith(f"# Backends\n\n{BEGIN}\n| | `native` |")
    assert page.endswith(f"\n{END}\nThe rest.\n")
    assert "an old table" not in page


def test_times_are_predicted_of_every_call_on_every_chip(folder):
    page = written(folder, "performance.md")
    assert all(f"**{chip.upper()}**" in page for chip in CHIPS)
    assert all(page.count(f"\n| {call.name} |") == len(CHIPS) for call in MODEL_CALLS)


def test_the_same_code_writes_the_same_pages(folder):
    run(folder)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    # An address of an object would differ in every process.
    assert not any(" at 0x" in text for text in first.values())
    run(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_check_writes_nothing(folder):
    assert run(folder, "--check") == 1
    assert {path.name for path in folder.iterdir()} == {"backends.md", "performance.md"}
    assert (folder / "backends.md").read_text() == PAGE


def test_check_passes_after_a_run(folder):
    run(folder)
    assert run(folder, "--check") == 0


def test_check_names_what_is_out_of_date(folder, capsys):
    page = written(folder, "appendix.md")
    (folder / "appendix.md").write_text(f"{page}by hand\n")
    # Behind what the run has printed.
    capsys.readouterr()
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
