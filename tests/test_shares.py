"""The share of the longest grids that runs where no file is named."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
LONG = "tests/sharding/test_attention.py::test_outputs"


@dataclass(frozen=True)
class Case:
    nodeid: str


@pytest.fixture
def shares(pytestconfig):
    """Return the conftest of the whole repository."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if hasattr(plugin, "SHARES"))


def cases_of(test, count):
    return [Case(f"{test}[case {i}]") for i in range(count)]


def test_some_cases_of_a_long_grid_run_and_at_least_one(shares):
    cases = cases_of(LONG, 40)
    kept = shares._share(cases)
    assert 0 < len(kept) < 20
    assert all(len(shares._share([case])) == 1 for case in cases)


def test_all_other_cases_run(shares):
    cases = cases_of("tests/test_cli.py::test_a_command", 5)
    assert shares._share(cases) == cases


def test_every_share_is_of_a_file_that_there_is(shares):
    for prefix in shares.SHARES:
        path, _, function = prefix.partition("::")
        assert (ROOT / path).exists(), path
        # Folders have no functions.
        if function:
            assert function in (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("options", "named", "runs_all"),
    [([], False, False), (["--whole"], False, True), ([], True, True), (["--share"], True, False)],
)
def test_a_named_file_runs_whole_unless_a_share_is_asked_for(shares, options, named, runs_all):
    items = cases_of(LONG, 40)
    source = SimpleNamespace(ARGS="named", TESTPATHS="not named")
    left_out = []
    config = SimpleNamespace(
        args_source=source.ARGS if named else source.TESTPATHS,
        ArgsSource=source,
        getoption=options.__contains__,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    shares.pytest_collection_modifyitems(config, items)
    assert (not left_out) == runs_all
    assert len(items) + len(left_out) == 40
