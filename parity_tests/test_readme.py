import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if "import torch" in p.read_text()),
]


@pytest.mark.usefixtures("as_a_user_has_jax", "checkpoint_here")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_all_examples_run_in_order(path):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(block, names)
