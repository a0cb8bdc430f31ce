"""The layers: what each imports, and what importing the package leaves alone."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flax_attn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flax_attn"
LIBRARY = {"functional", "native", "backends", "sharding", "attention", "modules"}
# Lowest first, with the layers that each may import; the package is `flax_attn/__init__.py`.
LAYERS = {
    "native": set(),
    "functional": {"native"},
    "convert": set(),
    "aot": set(),
    "backends": {"functional", "native"},
    "sharding": {"functional", "backends"},
    "attention": {"functional", "backends", "sharding"},
    "modules": {"functional", "native", "backends", "attention", "sharding"},
    "everywhere": {"functional", "backends", "sharding", "attention"},
    "adapters": {"everywhere"},
    "models": {"functional", "convert", "modules", "sharding"},
    "training": {"functional", "convert", "models", "sharding"},
    "package": LIBRARY | {"adapters", "everywhere", "models"},
    "parity": {"convert"},
    "proof": {"package", "functional", "backends", "convert", "parity", "sharding", "aot"},
    "steps": set(),
    "viz": set(),
    "bench": LIBRARY | {"convert", "models", "training", "parity"},
    "device": LIBRARY | {"bench", "convert", "parity"},
    "plan": {"functional", "backends", "sharding", "modules", "models", "training", "aot"},
    "cli": (
        LIBRARY
        | {
            "package",
            "convert",
            "models",
            "parity",
            "proof",
            "steps",
            "viz",
            "bench",
            "device",
            "plan",
            "aot",
        }
    ),
    "__main__": {"cli"},
}
OTHERS = {"torch", "torch_ref", "matplotlib"}  # imported at the top of no file below the harness
CONSTANTS = {"GPT2_CONFIGS"}

WITHOUT_OPTIONALS = """
import sys
class Blocked:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "matplotlib", "safetensors.torch", "torch_ref"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked)
import flax_attn
assert "jax" not in sys.modules, "a name is imported where it is first used"
import jax.numpy as jnp
from flax import nnx
import flax_attn, flax_attn.convert, flax_attn.backends.tokamax
layer = flax_attn.MultiHeadAttention(6, 8, None, 0.0, 4, rngs=nnx.Rngs(0))
assert layer(jnp.ones((2, 3, 6))).shape == (2, 3, 8)
assert flax_attn.convert.state_dict(layer)
print(*sys.modules)
from flax_attn import *
from flax_attn.models import *
import flax_attn.bench.suite, flax_attn.cli, flax_attn.parity, flax_attn.proof.variants
"""


def dotted(file: Path) -> str:
    """`flax_attn/modules/norm.py` is `flax_attn.modules.norm`."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {dotted(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def layer(name: str) -> str:
    """`flax_attn.modules.norm` is in `modules`."""
    return name.split(".")[1] if "." in name else "package"


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Return everything in a file but what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


def imported(tree: ast.AST) -> set[str]:
    """Return what a file imports, inside functions too: `from a import b` is `a.b`."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str:
    """`flax_attn.modules.norm.LayerNorm` is in `flax_attn.modules.norm`."""
    while name not in FILES:
        name = name.rpartition(".")[0]
    return name


def modules_imported(tree: ast.AST) -> set[str]:
    return {module_of(name) for name in imported(tree) if name.split(".")[0] == "flax_attn"}


def wrong_imports(own: str, tree: ast.AST) -> set[str]:
    """Return what a file of a layer imports and may not."""
    relative = {name for name in imported(tree) if name.startswith(".")}
    return relative | {
        name for name in modules_imported(tree) if layer(name) not in LAYERS[own] | {own}
    }


@pytest.fixture(scope="module")
def trees():
    return {name: ast.parse(file.read_text()) for name, file in FILES.items()}


@pytest.fixture(scope="module")
def loaded():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONALS], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_import_works_without_optional_packages(loaded):
    assert "flax_attn.modules.multi_head" in loaded


@pytest.mark.parametrize(
    "name",
    ["torch", "torch_ref", "matplotlib", "safetensors.torch", "tokamax", "beartype", "pytest"],
)
def test_import_leaves_optional_packages_alone(loaded, name):
    assert name not in loaded


@pytest.mark.parametrize("name", ["flax_attn.models", "flax_attn.training", "orbax", "tokenizers"])
def test_a_layer_leaves_alone_what_models_and_training_need(loaded, name):
    assert not [module for module in loaded if f"{module}.".startswith(f"{name}.")]


@pytest.mark.parametrize("name", ["parity", "proof", "aot", "bench", "plan", "steps", "viz", "cli"])
def test_import_leaves_the_top_layers_alone(loaded, name):
    assert not [module for module in loaded if f"{module}.".startswith(f"flax_attn.{name}.")]


def test_layers_import_lower_layers_only():
    below = set()
    for name, allowed in LAYERS.items():
        assert allowed <= below, name
        below.add(name)


def test_every_file_is_in_a_layer_and_imports_what_its_layer_may(trees):
    assert {layer(name) for name in trees} == set(LAYERS)
    found = {name: wrong_imports(layer(name), tree) for name, tree in trees.items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_no_files_import_each_other_in_a_circle(trees):
    order = TopologicalSorter(
        {name: modules_imported(tree) - {name} for name, tree in trees.items()}
    )
    assert len(list(order.static_order())) == len(FILES)


@pytest.mark.parametrize(
    ("own", "line", "wrong"),
    [
        ("functional", "from flax_attn.modules.norm import LayerNorm", "flax_attn.modules.norm"),
        ("attention", "def f():\n    import flax_attn.models.gpt2", "flax_attn.models.gpt2"),
        ("models", "from flax_attn import parity", "flax_attn.parity"),
        ("modules", "from flax_attn.cli import main", "flax_attn.cli"),
        ("modules", "from flax_attn import LayerNorm", "flax_attn"),
        ("convert", "from flax_attn.functional.masks import Mask", "flax_attn.functional.masks"),
        (
            "parity",
            "from flax_attn.backends.registry import BACKENDS",
            "flax_attn.backends.registry",
        ),
        (
            "parity",
            "from flax_attn.functional.masks import Mask",
            "flax_attn.functional.masks",
        ),
        ("parity", "from flax_attn.proof.variants import VARIANTS", "flax_attn.proof.variants"),
        ("parity", "from flax_attn import MultiHeadAttention", "flax_attn"),
        ("modules", "from .linear import Linear", ".linear.Linear"),
    ],
)
def test_a_wrong_import_is_seen(own, line, wrong):
    assert wrong_imports(own, ast.parse(line)) == {wrong}


@pytest.mark.parametrize(
    "line",
    [
        "import attn_spec.checks",
        "from flax_attn.modules.linear import Linear",
        "import jax",
    ],
)
def test_a_right_import_is_let_through(line):
    assert wrong_imports("modules", ast.parse(line)) == set()


def packages(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported(tree)}


def test_no_file_below_the_harness_imports_torch_at_its_top(trees):
    for name, tree in trees.items():
        if layer(name) not in ("parity", "proof"):
            top = ast.Module(
                [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
            )
            assert packages(top).isdisjoint(OTHERS), name


def test_neither_package_imports_the_other(trees):
    for file in (ROOT / "torch_ref").rglob("*.py"):
        assert packages(ast.parse(file.read_text())).isdisjoint(
            {"jax", "jaxlib", "flax", "optax", "flax_attn"}
        ), file
    assert {layer(name) for name, tree in trees.items() if "torch_ref" in packages(tree)} <= {
        "proof"
    }


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
    if inspect.ismodule(thing):
        assert thing.__all__
        return
    assert "Example:" in doc
    assert ">>> " in doc


def test_every_variant_in_a_folder_of_modules_is_public():
    for file in (PACKAGE / "modules").glob("*.py"):
        classes = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        data = [
            node
            for node in classes
            if {"TypedDict", "NamedTuple"} & set(map(ast.unparse, node.bases))
        ]
        names = {
            node.name for node in classes if node not in data and not node.name.startswith("_")
        }
        assert names <= set(flax_attn.__all__)
