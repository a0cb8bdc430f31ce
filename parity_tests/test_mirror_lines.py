"""The mirrored files share at least the part of their lines that `data/mirror.json` records.

The share is that of lines, blank ones aside, that are identical and in the same order in both
packages, and a file without a record at least 30 %. `pytest -rP` prints the shares.
`python parity_tests/test_mirror_lines.py` records them anew, rounded down to 5 %.
"""

import json
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "data" / "mirror.json"
FEWEST_LINES = 5  # shorter files say nothing
STEP = 5  # percent
NEW = 30  # percent of a file that has no record yet


def lines(package, file):
    return [line for line in (ROOT / package / file).read_text().splitlines() if line.strip()]


def identical(left, right):
    """Return the percentage of lines that are identical and in the same order."""
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return 200 * sum(block.size for block in blocks) / (len(left) + len(right))


def shares():
    """Return the percentage of identical lines of each mirrored file, and their mean."""
    files = {
        str(path.relative_to(ROOT / "torch_ref")) for path in (ROOT / "torch_ref").rglob("*.py")
    }
    pairs = {
        file: (lines("flax_attn", file), lines("torch_ref", file))
        for file in files
        if _mirrored(file)
    }
    found = {
        file: identical(*pair)
        for file, pair in sorted(pairs.items())
        if min(map(len, pair)) >= FEWEST_LINES
    }
    return found | {"mean": sum(found.values()) / len(found)}


def _mirrored(file):
    return file != "__init__.py" and (ROOT / "flax_attn" / file).exists()


def record():
    floors = {name: int(share // STEP) * STEP for name, share in shares().items()}
    RECORD.write_text(json.dumps(floors, indent=1) + "\n")


def test_mirrored_files_have_as_many_identical_lines_as_recorded():
    found, floors = shares(), json.loads(RECORD.read_text())
    for name, share in found.items():
        print(f"{share:5.1f} %  {name}")
    assert found.keys() >= floors.keys(), f"run python {Path(__file__).relative_to(ROOT)}"
    below = []
    for name, share in found.items():
        floor = floors.get(name, NEW)
        if share < floor:
            below.append(f"{name}: {share:.1f} %, floor {floor} %")
    assert not below, "\n".join(below)


def test_identical_lines_are_counted_in_order():
    assert identical(["a", "b", "c"], ["a", "b", "c"]) == 100
    assert identical(["a", "b", "c", "d"], ["a", "x", "c", "y"]) == 50
    assert identical(["a", "b"], ["b", "a"]) == 50
    assert identical(["import jax"], ["import torch"]) == 0


if __name__ == "__main__":
    record()
