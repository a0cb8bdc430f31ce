import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if "import torch" in p.read_text())]


@pytest.mark.usefixtures("checkpoint_here")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_all_examples_run_in_order(path):
    names = {}
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            exec(block, names)
