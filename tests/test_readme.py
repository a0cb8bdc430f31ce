import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


BLOCKS = blocks(ROOT / "README.md")


def test_the_first_example_runs_by_itself():
    exec(BLOCKS[0], {})


@pytest.mark.skipif(
    find_spec("torch") is not None, reason="parity_tests/test_readme.py runs all examples"
)
@pytest.mark.usefixtures("as_a_user_has_jax", "checkpoint_here")
def test_examples_run_in_order_without_those_for_torch():
    names = {}
    for block in BLOCKS:
        if "torch" not in block:
            exec(block, names)


PAGES = [
    path for path in sorted((ROOT / "docs").glob("*.md")) if "import torch" not in path.read_text()
]


@pytest.mark.usefixtures("as_a_user_has_jax", "checkpoint_here")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_of_the_other_pages_run_in_order(path):
    names = {}
    for block in blocks(path):
        exec(block, names)
