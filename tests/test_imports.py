import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flax_attn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flax_attn"
FILES = sorted(str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*.py"))

# Every folder imports only from those before it; what stands together does not import each other.
LAYERS = (
    {"functional"},
    {"convert"},
    {"backends"},
    {"attention"},
    {"sharding"},
    {"modules"},
    {"models"},
    {"training"},
    {"parity"},
    {"proof"},
    {"bench", "steps", "viz"},
    {"cli"},
    {"__main__"},
)
HEIGHT = {folder: height for height, folders in enumerate(LAYERS) for folder in folders}
# These also stand on their own: what they import of ours.
ONLY = {
    "convert": {"flax_attn.functional.checks", "flax_attn.convert"},
    "parity": {"flax_attn.convert", "flax_attn.parity"},
}
CONSTANTS = {"GPT2_CONFIGS"}

WITHOUT_OPTIONALS = """
import sys
class Blocked:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "matplotlib", "safetensors.torch", "torch_ref"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked)
import jax.numpy as jnp
from flax import nnx
import flax_attn, flax_attn.convert
layer = flax_attn.MultiHeadAttention(6, 8, None, 0.0, 4, rngs=nnx.Rngs(0))
assert layer(jnp.ones((2, 3, 6))).shape == (2, 3, 8)
assert flax_attn.convert.state_dict(layer)
print(*sys.modules)
"""


def imported(source):
    """Return the modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}"}
            names |= {f"flax_attn.{alias.name}" for alias in node.names if node.module == "flax_attn"}
    return names


def folder(name):
    """`flax_attn/modules/norm.py` and `flax_attn.modules.norm` are both in `modules`."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


def wrong_imports(file, source):
    """Return what a file imports from a layer that is not below its own."""
    own = folder(file)
    wrong = {name for name in imported(source) if name.startswith(".")}
    for name in imported(source):
        if not name.startswith("flax_attn."):
            continue
        other = folder(name)
        allowed = other == own or HEIGHT.get(other, -1) < HEIGHT[own]
        if own in ONLY:
            allowed = any(f"{name}.".startswith(f"{start}.") for start in ONLY[own])
        wrong |= set() if allowed else {name}
    return wrong


@pytest.fixture(scope="module")
def loaded():
    run = subprocess.run([sys.executable, "-c", WITHOUT_OPTIONALS], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_import_works_without_optional_packages(loaded):
    assert "flax_attn.modules.multi_head" in loaded


@pytest.mark.parametrize("name", ["torch", "torch_ref", "matplotlib", "safetensors.torch", "beartype", "pytest"])
def test_import_leaves_optional_packages_alone(loaded, name):
    assert name not in loaded


@pytest.mark.parametrize("name", ["parity", "proof", "bench", "steps", "viz", "cli"])
def test_import_leaves_the_top_layers_alone(loaded, name):
    assert not [module for module in loaded if f"{module}.".startswith(f"flax_attn.{name}.")]


@pytest.mark.parametrize("file", [file for file in FILES if file != "flax_attn/__init__.py"])
def test_each_layer_imports_only_layers_below_it(file):
    assert folder(file) in HEIGHT, "give this folder a layer"
    assert wrong_imports(file, (ROOT / file).read_text()) == set()


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("flax_attn/functional/masks.py", "from flax_attn.modules.norm import LayerNorm", "flax_attn.modules.norm"),
        ("flax_attn/attention.py", "def f():\n    import flax_attn.models.gpt2", "flax_attn.models.gpt2"),
        ("flax_attn/models/gpt2.py", "from flax_attn import parity", "flax_attn.parity"),
        ("flax_attn/modules/norm.py", "from flax_attn.cli import main", "flax_attn.cli"),
        ("flax_attn/convert/api.py", "from flax_attn.functional.masks import Mask", "flax_attn.functional.masks"),
        (
            "flax_attn/parity/pair.py",
            "from flax_attn.functional.checks import check_rate",
            "flax_attn.functional.checks",
        ),
        ("flax_attn/parity/pair.py", "from flax_attn.modules.norm import LayerNorm", "flax_attn.modules.norm"),
        ("flax_attn/parity/pair.py", "from flax_attn.proof.variants import VARIANTS", "flax_attn.proof.variants"),
        ("flax_attn/parity/pair.py", "from flax_attn import MultiHeadAttention", "flax_attn.MultiHeadAttention"),
        ("flax_attn/modules/norm.py", "from .linear import Linear", ".linear"),
    ],
)
def test_a_wrong_import_is_seen(file, line, wrong):
    assert wrong_imports(file, line) == {wrong}


@pytest.mark.parametrize(
    "line", ["import flax_attn.functional.checks", "from flax_attn.modules.linear import Linear", "import jax"]
)
def test_a_right_import_is_let_through(line):
    assert wrong_imports("flax_attn/modules/norm.py", line) == set()


@pytest.mark.parametrize(
    "file", [file for file in FILES if folder(file) not in ("parity", "proof") and "bench" not in file]
)
def test_torch_is_not_imported_at_the_top_of_a_file(file):
    top = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = set().union(*(imported(ast.unparse(node)) for node in top))
    assert not [name for name in names if name.split(".")[0] in ("torch", "torch_ref", "matplotlib")]


def test_neither_package_imports_the_other():
    for file in (ROOT / "torch_ref").rglob("*.py"):
        names = {name.split(".")[0] for name in imported(file.read_text())}
        assert names.isdisjoint({"jax", "jaxlib", "flax", "flax_attn"}), file
    for file in FILES:
        if HEIGHT.get(folder(file), -1) <= HEIGHT["parity"]:
            assert "torch_ref" not in {name.split(".")[0] for name in imported((ROOT / file).read_text())}, file


def test_public_names_are_unique():
    assert len(set(flax_attn.__all__)) == len(flax_attn.__all__)


@pytest.mark.parametrize("name", flax_attn.__all__)
def test_public_name_is_described_by_an_example(name):
    thing = getattr(flax_attn, name)
    if name in CONSTANTS:
        assert not callable(thing)
        return
    doc = inspect.getdoc(thing)
    assert doc.splitlines()[0]
    assert "Example:" in doc
    assert ">>> " in doc


def test_every_variant_in_a_folder_of_modules_is_public():
    for file in (PACKAGE / "modules").glob("*.py"):
        classes = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
        assert [name for name in classes if not name.startswith("_") and name not in flax_attn.__all__] == []
