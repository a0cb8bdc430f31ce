import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_first_example_runs_by_itself():
    exec(BLOCKS[0], {})


@pytest.mark.parametrize("block", [b for b in BLOCKS if "torch" not in b], ids=lambda b: b.split("\n")[-2][:40])
def test_examples_run_without_torch(block):
    names = {}
    for earlier in BLOCKS[: BLOCKS.index(block) + 1]:
        if "torch" not in earlier:
            exec(earlier, names)
