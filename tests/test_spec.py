"""attn_spec needs no framework: what it imports, and that its examples run without any."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "attn_spec").rglob("*.py"))
ALLOWED = sys.stdlib_module_names | {"attn_spec", "numpy"}

EXAMPLES_WITHOUT_FRAMEWORKS = """
import doctest
import sys
from importlib import import_module

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in ("attn_spec", "numpy", *sys.stdlib_module_names):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked)
results = [doctest.testmod(import_module(name)) for name in sys.argv[1:]]
print(sum(result.failed for result in results), sum(result.attempted for result in results))
"""


def packages_imported(text):
    """Return the packages that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").partition(".")[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_the_standard_library_and_numpy_alone(file):
    assert packages_imported(file.read_text()) <= ALLOWED


def test_an_import_of_a_framework_is_seen():
    text = "def f():\n    import jax.numpy\n    from torch import nn\n    from . import other\n"
    assert packages_imported(text) - ALLOWED == {"jax", "torch", ""}


def test_the_examples_run_without_any_framework():
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES]
    modules = [name.removesuffix(".__init__") for name in names]
    command = [sys.executable, "-c", EXAMPLES_WITHOUT_FRAMEWORKS, *modules]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    failed, attempted = map(int, run.stdout.split()[-2:])
    assert failed == 0, run.stdout
    assert attempted > 50
