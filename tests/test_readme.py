import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


BLOCKS = blocks(ROOT / "README.md")


def test_the_first_example_runs_by_itself():
    exec(BLOCKS[0], {})


@pytest.mark.parametrize("block", [b for b in BLOCKS if "torch" not in b], ids=lambda b: b.split("\n")[-2][:40])
def test_examples_run_without_torch(block):
    names = {}
    for earlier in BLOCKS[: BLOCKS.index(block) + 1]:
        if "torch" not in earlier:
            exec(earlier, names)


PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if "import torch" not in path.read_text()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_of_the_other_pages_run_in_order(path):
    names = {}
    for block in blocks(path):
        exec(block, names)
