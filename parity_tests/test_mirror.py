"""The two packages mirror each other, and neither imports the other.

They have the same files, names, signatures, defaults and fields.
"""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flax_attn
import torch_ref

ROOTS = {package.__name__: Path(package.__file__).parent for package in (flax_attn, torch_ref)}
# A file of one side says so in its docstring, and why; in `__init__.py` it holds for the folder.
ONE_SIDED_FILE = re.compile(r"^Only in (flax_attn|torch_ref): .+", re.MULTILINE)
# What a file has on one side alone: for kernels, which only JAX has, or for one framework's keys.
ONE_SIDED = {
    "attention.py": {"BACKENDS", "check_backend"},
    "functional/dropout.py": {"draw_key", "indices"},
    "functional/mask": {
        *("PlacedPart", "axes", "band", "kv_range", "of_rank_4", "per_row", "pick", "row"),
        *("shift", "split_band", "split_intervals", "summarise", "summarised", "tiles"),
    },
    "functional/score_function.py": {"apply", "trace"},
    # In lower dtypes PyTorch's own adds the bias, and sums its gradient, in float32.
    "modules/linear.py": {"__call__"},
    # A stack of layers is run by one scan, which saves compiling.
    "models/blocks.py": {"blocks", "of_layers", "unstacked", "pure", "recompute"},
}
COUNTED = {"work"}  # what `flax-attn plan` asks of any module
FRAMEWORK_ONLY = {
    "dtype",
    "param_dtype",
    "precision",
    "rngs",
    "numerics",
    "device",
    "scan_layers",
    "axes",
    "unit",
}
LAYERS = ("functional", "attention", "modules", "models")


def files_of_layers(package):
    root = ROOTS[package]
    files = [path for layer in LAYERS for path in (root / layer).rglob("*.py")]
    return {str(path.relative_to(root)) for path in [*files, root / "attention.py"]}


@cache
def only_in(path):
    """Return the package that a file, or the folder it stands in, says that it is only in."""
    found = []
    for file in (path, path.parent / "__init__.py"):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        found += ONE_SIDED_FILE.findall(docstring)
    return found[0] if found else None


def mirrored_files(package):
    files = files_of_layers(package)
    return sorted(file for file in files if only_in(ROOTS[package] / file) is None)


def one_sided_names(file):
    """Return the names that a file may have on one side alone."""
    found = [names for start, names in ONE_SIDED.items() if file.startswith(start)]
    return set().union(*found)


def is_one_sided(value, package):
    """Whether an export is a layer of one side, or is defined in a file of one side."""
    module = inspect.getmodule(value)
    path = Path(module.__file__)
    layer = path.relative_to(ROOTS[package]).parts[0].removesuffix(".py")
    return layer not in LAYERS or only_in(path) is not None


def load(package, file):
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return importlib.import_module(f"{package}.{dotted}")


@cache
def defined(path):
    """Return the public names that a file defines, not those that it imports."""
    names = set()
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
    return {name for name in names if not name.startswith("_")}


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [
        (p.name, p.kind.name, _comparable(p.default))
        for p in parameters
        if p.name not in FRAMEWORK_ONLY
    ]


def _comparable(default):
    # Each package has its own class of options, such as `Scores`.
    return repr(default) if dataclasses.is_dataclass(default) else default


def methods(cls, left_out=frozenset()):
    """Return the signatures of the methods that a class defines.

    `forward` and `__call__` share one name.
    """
    kept = {"__init__", "__call__", "__and__", "__post_init__"}
    names = {n for n in vars(cls) if not n.startswith("_") or n in kept} - left_out
    own = {n: getattr(v, "__func__", v) for n, v in vars(cls).items() if n in names}
    found = {
        {"forward": "__call__"}.get(n, n): signature(f)
        for n, f in own.items()
        if inspect.isfunction(f)
    }
    properties = sorted(n for n, value in own.items() if isinstance(value, property))
    if len(found.get("__init__", [])) == 1:  # takes nothing beside self
        del found["__init__"]
    return found, properties


def describe(value, left_out=frozenset()):
    if hasattr(value, "dim_str"):
        return "array type", value.dim_str, value.dtypes
    if inspect.isclass(value):
        fields = (
            [(f.name, f.default) for f in dataclasses.fields(value)]
            if "__dataclass_fields__" in vars(value)  # its own: `nnx.List` is a dataclass too
            else None
        )
        return "class", methods(value, left_out), fields
    if inspect.isfunction(value):
        return "function", signature(value)
    return ("table", list(value)) if hasattr(value, "keys") else ("value", type(value).__name__)


def differences(file, ours, theirs):
    """Return a line for every difference between the two modules of a mirrored file."""
    left_out = one_sided_names(file) | COUNTED
    names = [defined(module.__file__) - left_out for module in (ours, theirs)]
    lines = [f"{file}: {name} is on one side only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        left, right = (describe(getattr(module, name), left_out) for module in (ours, theirs))
        lines += [f"{file}: {name}: {left} != {right}"] if left != right else []
    return lines


def test_the_same_files_are_on_both_sides():
    files = mirrored_files("flax_attn")
    assert files == mirrored_files("torch_ref")
    assert {
        "attention.py",
        "functional/masks.py",
        "modules/multi_head.py",
        "models/gpt2.py",
    } <= set(files)


@pytest.mark.parametrize("file", mirrored_files("flax_attn"))
def test_a_file_has_the_same_interface_on_both_sides(file):
    lines = differences(file, load("flax_attn", file), load("torch_ref", file))
    assert not lines, "\n".join(lines)


def defines(module, name):
    """Whether a file defines a name, itself or in one of its classes."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    own = [cls for cls in classes if cls.__module__ == module.__name__]
    return any(name in vars(scope) for scope in (module, *own))


@pytest.mark.parametrize(
    ("start", "name"),
    [(start, name) for start, names in ONE_SIDED.items() for name in sorted(names)],
)
def test_a_one_sided_name_is_on_one_side(start, name):
    files = [file for file in mirrored_files("flax_attn") if file.startswith(start)]
    sides = [[load(package, file) for file in files] for package in ROOTS]
    assert sum(any(defines(module, name) for module in modules) for modules in sides) == 1


@pytest.mark.parametrize("package", ROOTS)
def test_a_one_sided_file_stands_on_one_side(package):
    (other,) = ROOTS.keys() - {package}
    named = {file: only_in(ROOTS[package] / file) for file in files_of_layers(package)}
    one_sided = {file for file, only in named.items() if only is not None}
    assert {named[file] for file in one_sided} == {package}
    assert not one_sided & files_of_layers(other)


def test_the_packages_export_the_same_names():
    for package, other in ((flax_attn, torch_ref), (flax_attn.models, torch_ref.models)):
        name = package.__name__.partition(".")[0]
        more = set(package.__all__) - set(other.__all__)
        exported = {export: getattr(package, export) for export in more}
        mirrored = [export for export, value in exported.items() if not is_one_sided(value, name)]
        assert not mirrored
        assert set(other.__all__) < set(package.__all__)
        assert all(hasattr(other, export) for export in other.__all__)


def test_configs_are_the_same_objects():
    configs = [
        name for name in torch_ref.models.__all__ if re.search("config", name, re.IGNORECASE)
    ]
    assert len(configs) > 20
    for name in configs:
        assert getattr(flax_attn.models, name) is getattr(torch_ref.models, name)


MULTI_HEAD = "modules/multi_head.py"


def _default(x, y: int = 1): ...


def _other_default(x, y: int = 2): ...


def _other_name(x, z: int = 1): ...


def _keyword_only(x, *, y: int = 1): ...


@pytest.mark.parametrize("changed", [_other_default, _other_name, _keyword_only])
def test_the_mirror_sees_a_changed_signature(changed, monkeypatch):
    ours, theirs = (load(package, "attention.py") for package in ROOTS)
    monkeypatch.setattr(ours, "dot_product_attention", _default)
    monkeypatch.setattr(theirs, "dot_product_attention", changed)
    assert any(
        "dot_product_attention" in line for line in differences("attention.py", ours, theirs)
    )


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_mirror_sees_a_changed_method(method, monkeypatch):
    ours, theirs = (load(package, MULTI_HEAD) for package in ROOTS)
    monkeypatch.setattr(theirs.MultiHeadAttention, method, _other_default)
    assert any("MultiHeadAttention" in line for line in differences(MULTI_HEAD, ours, theirs))


def test_the_mirror_sees_a_method_of_one_side(monkeypatch):
    ours, theirs = (load(package, "functional/masks.py") for package in ROOTS)
    monkeypatch.delattr(theirs.Mask, "as_text")
    assert ["Mask" in line for line in differences("functional/masks.py", ours, theirs)] == [True]


def test_the_mirror_sees_a_changed_field(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class ScoreFunction:
        function: Callable
        query_positions: Any = 0
        key_positions: Any = None

    file = "functional/score_function.py"
    ours, theirs = (load(package, file) for package in ROOTS)
    monkeypatch.setattr(theirs, "ScoreFunction", ScoreFunction)
    assert [line.split(": ")[1] for line in differences(file, ours, theirs)] == ["ScoreFunction"]


def test_the_mirror_sees_a_changed_table(monkeypatch):
    file = "modules/feed_forward.py"
    ours, theirs = (load(package, file) for package in ROOTS)
    monkeypatch.setattr(theirs, "ACTIVATIONS", {"relu": None})
    assert [line.split(": ")[1] for line in differences(file, ours, theirs)] == ["ACTIVATIONS"]


def test_a_file_of_one_side_must_say_so(tmp_path):
    file = tmp_path / "extra.py"
    (tmp_path / "__init__.py").write_text("")
    file.write_text('"""More."""\n')
    assert only_in(file) is None
    other = tmp_path / "other.py"
    other.write_text('"""More.\n\nOnly in flax_attn: it saves work.\n"""\n')
    assert only_in(other) == "flax_attn"


def test_the_mirror_sees_a_missing_name(tmp_path):
    ours, full = load("flax_attn", MULTI_HEAD), ROOTS["torch_ref"] / MULTI_HEAD
    renamed = tmp_path / "multi_head.py"
    renamed.write_text(full.read_text().replace("class MultiHeadAttention", "class ManyHeads"))
    theirs = SimpleNamespace(__file__=str(renamed))
    assert differences(MULTI_HEAD, ours, theirs) == [
        f"{MULTI_HEAD}: ManyHeads is on one side only",
        f"{MULTI_HEAD}: MultiHeadAttention is on one side only",
    ]


def imports(path, everywhere=True):
    """Return the modules that a file imports, those inside functions only if `everywhere`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path, everywhere=True):
    return {name.split(".")[0] for name in imports(path, everywhere)}


def files_of(package):
    return {
        str(path.relative_to(ROOTS[package])): path for path in sorted(ROOTS[package].rglob("*.py"))
    }


@pytest.mark.parametrize("file", files_of("torch_ref"))
def test_torch_ref_knows_no_jax(file):
    assert not imported_packages(files_of("torch_ref")[file]) & {
        "flax_attn",
        "jax",
        "flax",
        "optax",
        "jaxlib",
    }


@pytest.mark.parametrize(
    "file", [file for file in files_of("flax_attn") if not file.startswith(("parity/", "proof/"))]
)
def test_flax_attn_needs_no_torch(file):
    path = files_of("flax_attn")[file]
    assert "torch_ref" not in imported_packages(path)
    assert "torch" not in imported_packages(path, everywhere=False)


def layer_of(file):
    return file.removesuffix(".py").split("/")[0]


@pytest.mark.parametrize(
    "file", [file for file in files_of("torch_ref") if layer_of(file) in LAYERS]
)
def test_a_layer_of_torch_ref_imports_only_layers_below(file):
    below = LAYERS[: LAYERS.index(layer_of(file)) + 1]
    names = [
        name.split(".")[1]
        for name in imports(files_of("torch_ref")[file])
        if name.startswith("torch_ref.")
    ]
    assert set(names) <= set(below)
