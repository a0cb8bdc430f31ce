"""What speaks against a suite that ran under everywhere."""

from tools.suites.__main__ import table
from tools.suites.run import Result, run
from tools.suites.table import Suite

SUITE = Suite("keras", "keras", "wheel", ("a_test.py",), expected={"a.wording": "other words"})
WITHOUT = {"a.kept": "passed", "a.wording": "passed", "a.broken": "failed"}


def problems(under, taken=3, without=WITHOUT):
    return Result(SUITE, without, under, taken, {}).problems


def test_nothing_speaks_against_expected_differences():
    under = WITHOUT | {"a.wording": "failed"}
    assert problems(under) == []
    assert "| keras | 2 | 1 | 3 | 0 |" in table([Result(SUITE, WITHOUT, under, 3, {})])


CALLS = """
import jax, jax.numpy as jnp

def test_attends():
    x = jnp.ones((1, 64, 2, 4))
    jax.nn.dot_product_attention(x, x, x + jnp.ones(4))  # ranks are promoted, as by default
"""


def test_a_suite_runs_without_what_this_repository_sets(tmp_path):
    (tmp_path / "conftest.py").write_text("raise RuntimeError('of another repository')")
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "a_test.py").write_text(CALLS)
    found = run(Suite("jax.nn", "jax", "wheel", ("a_test.py",)), folder, tmp_path / "build")
    assert found.problems == []
    assert list(found.without.values()) == list(found.under.values()) == ["passed"]
    assert found.taken == 1


def test_what_speaks_against_a_suite():
    under = {"a.wording": "failed", "a.kept": "failed"}
    assert problems(under) == ["keras: a.kept passes without, and not under everywhere"]
    assert problems(WITHOUT) == ["keras: a.wording passes; take it off the expected differences"]
    gone = {"a.wording": "skipped"}
    assert problems(gone) == ["keras: a.kept passes without, and not under everywhere"]
    nothing = problems(WITHOUT | {"a.wording": "failed"}, taken=0)
    assert nothing == ["keras: no call was computed by flax_attn"]


def test_a_suite_of_which_nothing_passes():
    found = problems({}, without={"a.broken": "failed"})
    assert "keras: no test passes without everywhere" in found
