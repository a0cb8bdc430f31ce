"""Every public name stands on a page of docs/api, once, and has a docstring."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from flax_attn.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
PACKAGES = (
    "flax_attn",
    "flax_attn.parity",
    "flax_attn.convert",
    "flax_attn.training",
    "flax_attn.sharding",
)


def names(text):
    """The names that a page documents."""
    return [
        name
        for block in re.findall(r"```{symbols}\n(.*?)```", text, re.DOTALL)
        for name in block.split()
    ]


def documented(package):
    """The names of a package on all pages."""
    found = [name for path in sorted(PAGES.glob("*.md")) for name in names(path.read_text())]
    return [name for name in found if name.startswith(f"{package}.")]


def value(name):
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def missing(package, found):
    """Return the public names of a package that are not among these, under any name."""
    things = [value(name) for name in found]
    public = {
        name: getattr(import_module(package), name) for name in import_module(package).__all__
    }
    return sorted(
        name
        for name, thing in public.items()
        if not inspect.ismodule(thing) and not any(thing is other for other in things)
    )


def undocumented(found):
    """Those of the classes and functions that have no docstring of their own."""
    things = {name: value(name) for name in found}
    return [
        n
        for n, thing in things.items()
        if (inspect.isclass(thing) or callable(thing)) and not own(thing)
    ]


def own(thing):
    return vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__


@pytest.mark.parametrize("package", [*PACKAGES, "flax_attn.models"])
def test_every_public_name_is_documented(package):
    assert missing(package, documented("flax_attn")) == []


def test_every_family_is_documented():
    found = [value(name) for name in documented("flax_attn")]
    assert [family.__name__ for family in FAMILIES if family not in found] == []


@pytest.mark.parametrize("package", ["torch_ref", "torch_ref.models"])
def test_every_public_name_of_the_twins_is_documented_as_ours(package):
    # Read as text: torch may not be installed.
    file = ROOT / package.replace(".", "/") / "__init__.py"
    stub = file.with_suffix(".pyi")
    nodes = ast.parse((stub if stub.is_file() else file).read_text()).body
    names = [a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names]
    public = {name for name in names if not (file.parent / name).is_dir()}
    assert public
    ours = import_module(package.replace("torch_ref", "flax_attn"))
    assert public <= set(ours.__all__)


def test_no_name_stands_twice_and_each_has_a_docstring():
    found = documented("flax_attn")
    assert sorted(found) == sorted(set(found))
    assert undocumented(found) == []


def test_every_page_is_in_the_list():
    listed = re.findall(r"```{toctree}.*?\n\n(.*?)```", (PAGES / "index.md").read_text(), re.DOTALL)
    assert sorted(listed[0].split()) == sorted(
        path.stem for path in PAGES.glob("*.md") if path.stem != "index"
    )


def test_a_name_that_is_left_out_is_missed():
    found = documented("flax_attn")
    assert missing("flax_attn", [name for name in found if name != "flax_attn.Mask"]) == ["Mask"]
    assert undocumented(["flax_attn.Mask"]) == []
