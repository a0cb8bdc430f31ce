import re
from pathlib import Path

import jax

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_all_examples_run_in_order():
    names = {}
    with jax.enable_x64(False):
        for block in BLOCKS:
            exec(block, names)
