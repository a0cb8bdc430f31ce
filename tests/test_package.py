import re
import tomllib
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

import flax_attn

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements):
    return {re.match(r"[\w-]+", requirement).group().lower() for requirement in requirements}


def test_the_packages_are_in_the_wheel(pyproject):
    assert pyproject["tool"]["setuptools"]["packages"]["find"]["include"] == [
        "attn_spec*",
        "flax_attn*",
        "torch_ref*",
    ]


def test_pytest_finds_the_plugin(pyproject):
    project, setuptools = pyproject["project"], pyproject["tool"]["setuptools"]
    assert project["entry-points"]["pytest11"] == {"pytest_flax_attn": "pytest_flax_attn"}
    assert setuptools["py-modules"] == ["pytest_flax_attn"]
    assert (ROOT / "pytest_flax_attn.py").is_file()


@pytest.mark.parametrize("file", ["parity/SKILL.md", "parity/report/schema.json"])
def test_what_programs_read_is_in_the_wheel(file):
    assert (ROOT / "flax_attn" / file).is_file()


def test_sources_of_the_library_are_in_the_source_distribution():
    listed = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert {
        "graft attn_spec",
        "graft flax_attn",
        "graft torch_ref",
        "graft tests",
        "graft tools",
        "graft parity_tests",
        "graft docs",
    } <= set(listed)
    assert "global-exclude *.py[cod] *.so" in listed


@pytest.mark.parametrize("package", ["flax_attn", "torch_ref"])
def test_packages_say_that_they_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("package", ["flax_attn", "torch_ref"])
def test_every_folder_with_code_is_a_package(package):
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_version_is_that_of_the_package(pyproject):
    assert "version" in pyproject["project"]["dynamic"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "flax_attn.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", flax_attn.__version__)


def test_oldest_python(pyproject):
    assert pyproject["project"]["requires-python"] == ">=3.11"


def test_the_library_is_built_with_the_oldest_headers(pyproject):
    """A jaxlib refuses what was built with the headers of a newer one."""
    oldest = next(
        x.removeprefix("jax>=")
        for x in pyproject["project"]["dependencies"]
        if x.startswith("jax>=")
    )
    assert any(x.startswith(f"jaxlib=={oldest};") for x in pyproject["build-system"]["requires"])


def test_torch_and_matplotlib_are_extras(pyproject):
    project = pyproject["project"]
    assert {"jax", "flax", "einops", "jaxtyping", "numpy", "safetensors"} <= names(
        project["dependencies"]
    )
    assert names(project["dependencies"]).isdisjoint({"torch", "matplotlib", "beartype", "pytest"})
    assert {"torch", "viz", "cuda", "tpu", "dev"} <= set(project["optional-dependencies"])
    assert names(project["optional-dependencies"]["torch"]) == {"torch"}
    assert names(project["optional-dependencies"]["viz"]) == {"matplotlib"}


@pytest.mark.parametrize("extra", ["cuda", "tpu"])
def test_accelerators_are_extras_of_jax(pyproject, extra):
    assert pyproject["project"]["optional-dependencies"][extra] == [f"jax[{extra}]"]


def test_command_line_entry_can_be_called(pyproject):
    module, function = pyproject["project"]["scripts"]["flax-attn"].split(":")
    assert callable(getattr(import_module(module), function))


def test_licence_and_readme_are_there(pyproject):
    project = pyproject["project"]
    assert [
        file
        for file in (project["readme"], *project["license-files"])
        if not (ROOT / file).is_file()
    ] == []


def test_the_workflow_calls_targets_that_there_are():
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    called = re.findall(r"run: make ([\w-]+)", workflow)
    assert {"dist", "test-newest", "test-oldest"} <= set(called) <= targets
    assert "run: .ci/run" in workflow


def test_the_version_stands_in_one_place():
    files = [
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.cff"),
        *ROOT.glob("*.py"),
        *(ROOT / "flax_attn").rglob("*.py"),
    ]
    stated = [file.name for file in files if f'"{flax_attn.__version__}"' in file.read_text()]
    assert stated == ["__init__.py"]


def test_the_first_call_runs(capsys, as_a_user_has_jax):
    run_path(str(ROOT / "examples/first_call.py"))
    assert "(2, 10, 64)" in capsys.readouterr().out
