"""The two packages mirror each other, and neither imports the other.

They have the same files, names, signatures, defaults and fields.
"""

import ast
import dataclasses
import importlib
import inspect
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import flax_attn
import torch_ref

ROOTS = {package.__name__: Path(package.__file__).parent for package in (flax_attn, torch_ref)}
ONE_SIDED_FILES = {
    "models/pretrained.py": "flax_attn",  # PyTorch has transformers
    "models/decode_loop.py": "flax_attn",  # what is compiled
    "models/registry.py": "flax_attn",  # PyTorch has transformers
    "models/stack.py": "flax_attn",  # saves compiling
    "models/layer_pattern.py": "flax_attn",
    "models/hugging_face/__init__.py": "flax_attn",
    "models/hugging_face/bounds.py": "flax_attn",
    "models/hugging_face/copies.py": "flax_attn",
    "models/hugging_face/counts.py": "flax_attn",
    "models/hugging_face/decoder.py": "flax_attn",
    "models/hugging_face/experts.py": "flax_attn",
    "models/hugging_face/delta_net.py": "flax_attn",
    "models/hugging_face/family.py": "flax_attn",
    "models/hugging_face/fields.py": "flax_attn",
    "models/hugging_face/folder.py": "flax_attn",
    "models/hugging_face/fp8.py": "flax_attn",
    "models/hugging_face/replacement.py": "flax_attn",
    "models/hugging_face/images.py": "flax_attn",
    "models/hugging_face/mxfp4.py": "flax_attn",
    "models/hugging_face/quantized.py": "flax_attn",
    "models/hugging_face/rope.py": "flax_attn",
    "models/hugging_face/streams.py": "flax_attn",
    "models/hugging_face/values.py": "flax_attn",
    "models/cross_entropy.py": "flax_attn",  # PyTorch's own is one call
    "modules/backend.py": "flax_attn",  # torch_ref has only one backend
    "functional/decayed_products.py": "flax_attn",  # torch_ref computes token by token
    "functional/delta_chunks.py": "flax_attn",
    "functional/absorption.py": "flax_attn",  # saves work
    "functional/explicit_sharding.py": "flax_attn",  # for several devices
    "functional/kv_range.py": "flax_attn",  # for kernels, which only JAX has
    "functional/local_view.py": "flax_attn",  # for parts of a call on several devices
    "functional/token_runs.py": "flax_attn",
    "functional/block_summary.py": "flax_attn",  # of tiles, for kernels
    "functional/traced.py": "flax_attn",  # PyTorch calls a function on tensors of indices
    "functional/traced_score.py": "flax_attn",
    "functional/called.py": "torch_ref",
    "modules/grouped_product.py": "flax_attn",  # saves work
    "modules/initialisation.py": "flax_attn",  # torch.nn.Linear draws its own
    "modules/random_numbers.py": "flax_attn",  # those of jax.random
    "modules/work.py": "flax_attn",  # counts for `flax-attn plan`
    "modules/matrix_product.py": "flax_attn",  # works around a limit of XLA
    "functional/tags.py": "torch_ref",  # JAX has checkpoint_name
    "modules/typed.py": "torch_ref",  # gives PyTorch's modules the types of their calls
}
ONE_SIDED_EXPORTS = {
    *("convert", "models", "parity", "sharding", "training"),
    *("Unsupported", "explain", "set_backend", "from_pretrained", "save_pretrained"),
}
ONE_SIDED = {
    "attention.py": {
        "BACKENDS",
        "check_backend",
    },  # beside the table of the backends, which only JAX has
    "functional/dropout.py": {"draw_key", "indices"},
    "functional/masks.py": {
        "kv_range",
        "row",
        "shift",
        "split_band",
        "split_intervals",
        "summarise",
        "summarised",
        "tiles",
    },  # for kernels, which only JAX has
    "functional/mask_part.py": {
        *("band", "has_interval", "interval", "kv_range", "row", "shift", "summarised", "tiles"),
        *("of_rank_4", "pick"),
    },
    "functional/mask_parts.py": {
        *("band", "ends", "interval", "kv_range", "row", "shift"),
    },
    "functional/score_function.py": {
        "apply",
        "trace",
    },  # called on tensors of indices, or traced on scalars
    "functional/mask_function.py": {"row"},
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


def mirrored_files(package):
    root = ROOTS[package]
    files = [path for layer in LAYERS for path in (root / layer).rglob("*.py")]
    return sorted(
        {str(path.relative_to(root)) for path in [*files, root / "attention.py"]}
        - ONE_SIDED_FILES.keys()
    )


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
            if dataclasses.is_dataclass(value)
            else None
        )
        return "class", methods(value, left_out), fields
    if inspect.isfunction(value):
        return "function", signature(value)
    return ("table", list(value)) if hasattr(value, "keys") else ("value", type(value).__name__)


def differences(file, ours, theirs):
    """Return a line for every difference between the two modules of a mirrored file."""
    left_out = ONE_SIDED.get(file, frozenset()) | COUNTED
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


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, names in ONE_SIDED.items() for name in sorted(names)]
)
def test_a_one_sided_name_is_on_one_side(file, name):
    modules = [load(package, file) for package in ROOTS]
    scopes = [
        [m, *(v for v in vars(m).values() if inspect.isclass(v) and v.__module__ == m.__name__)]
        for m in modules
    ]
    assert sum(any(name in vars(scope) for scope in one) for one in scopes) == 1


@pytest.mark.parametrize("file", sorted(ONE_SIDED_FILES))
def test_a_one_sided_file_stands_on_one_side(file):
    assert [package for package, root in ROOTS.items() if (root / file).exists()] == [
        ONE_SIDED_FILES[file]
    ]


def test_the_packages_export_the_same_names():
    assert set(flax_attn.__all__) ^ set(torch_ref.__all__) == ONE_SIDED_EXPORTS
    ours, theirs = set(flax_attn.models.__all__), set(torch_ref.models.__all__)
    assert ours ^ theirs == {"Pretrained", "from_pretrained", "save_pretrained"}
    assert set(flax_attn.__all__) >= ONE_SIDED_EXPORTS
    assert theirs < ours
    packages = (flax_attn, flax_attn.models, torch_ref, torch_ref.models)
    assert all(hasattr(package, name) for package in packages for name in package.__all__)


def test_the_legend_of_axes_is_the_same():
    assert (
        load("flax_attn", "functional/shapes.py").AXES
        == load("torch_ref", "functional/shapes.py").AXES
    )


def test_configs_are_equal_in_values():
    ours, theirs = (
        {k: dataclasses.asdict(v) for k, v in p.GPT2_CONFIGS.items()}
        for p in (flax_attn, torch_ref)
    )
    assert ours == theirs


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


def test_the_mirror_sees_a_changed_field_and_a_changed_table(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class GPT2Config:
        d_model: int
        num_heads: int
        num_layers: int
        context_length: int = 2048

    ours, theirs = (load(package, "models/gpt2.py") for package in ROOTS)
    monkeypatch.setattr(theirs, "GPT2Config", GPT2Config)
    monkeypatch.setattr(theirs, "GPT2_CONFIGS", {"gpt2-small": None})
    lines = differences("models/gpt2.py", ours, theirs)
    assert [line.split(": ")[1] for line in lines] == ["GPT2Config", "GPT2_CONFIGS"]


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
