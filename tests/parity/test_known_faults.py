"""Known wrong results of JAX: looked for here, printed, and part of each report."""

import subprocess
import sys

import pytest

from flax_attn.cli import main
from flax_attn.parity import known_faults
from flax_attn.parity.report.report import environment

LOOK = "from flax_attn.parity.known_faults import summary; print(summary())"


@pytest.fixture
def table(monkeypatch):
    """A function that replaces the table by one fault, which is here or is not."""

    def replace(here):
        fault = known_faults.KnownFault("jax#1", "cpu", "seen in 0.1", "sums", lambda: here)
        monkeypatch.setattr(known_faults, "KNOWN_FAULTS", (fault,))
        known_faults.found_here.cache_clear()

    yield replace
    known_faults.found_here.cache_clear()


def test_a_fault_of_this_installation_is_in_the_environment_of_a_report(table):
    table(here=True)
    assert environment()["known wrong results"] == "jax#1 (cpu; seen in 0.1): sums"


def test_a_fault_that_is_not_here_is_named_as_absent(table):
    table(here=False)
    assert environment()["known wrong results"] == "none of jax#1"


def test_the_command_prints_the_environment(table, capsys):
    table(here=True)
    assert main(["show", "environment"]) == 0
    assert "known wrong results: jax#1 (cpu; seen in 0.1): sums\n" in capsys.readouterr().out


def test_the_first_fault_goes_where_the_option_that_causes_it_is_off():
    if known_faults.KNOWN_FAULTS[0] not in known_faults.found_here():
        pytest.skip("this version of JAX is right")
    code = f"import os; os.environ['XLA_FLAGS'] = '{FLAG}'; {LOOK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none of jax#39103\n"


FLAG = "--xla_cpu_experimental_ynn_fusion_type="
