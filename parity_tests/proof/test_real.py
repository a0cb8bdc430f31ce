"""One row of real sizes of each kind that takes seconds; `flax-attn parity --sizes real` runs all.

The lower dtypes are those in which a sum over 2,048 tokens shows.
"""

import pytest

from flax_attn.cli import main
from flax_attn.proof.rows import real
from flax_attn.proof.run import ProofRun

QUICK = ("linear", "rms_norm", "layer_scale", "embedding_repeated")


@pytest.mark.parametrize("name", QUICK)
def test_a_sum_over_tokens_loses_no_more_than_in_pytorch(name):
    (row,) = ProofRun(real=True).select([f"real_{name}"])
    checks = ["gradients", "bfloat16", "float16"]
    report = ProofRun(checks=checks, real=True).report(row)
    assert [check.name for check in report.checks if check.passed] == checks, report.explain()
    # Without an allowance for how JAX sums.
    assert all(check.error <= check.limit for check in report.checks)
    assert "JAX adds up" not in report.explain()


@pytest.mark.parametrize("name", ["linear", "moe_sorted"])
def test_products_and_sums_of_jax_in_float32_are_no_difference(name):
    (row,) = ProofRun(real=True).select([f"real_{name}"])
    report = ProofRun(checks=["float32"], real=True).report(row)
    assert report.passed, report.explain()


def test_rows_have_2048_tokens_and_names_of_their_own():
    rows = real.rows()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        image = len(row.inputs[0]) == 4
        tokens = row.inputs[0][0] * (448 if image else row.inputs[0][1])
        assert tokens >= 2048


@pytest.mark.parametrize("other", [["--full"], ["--mesh", "data=2"]], ids=str)
def test_real_sizes_have_rows_and_checks_of_their_own(other, capsys):
    assert main(["parity", "--sizes", "real", *other]) not in (0, 1)
    assert "--sizes real has rows and checks of its own" in capsys.readouterr().err


def test_the_command_runs_the_checks_of_a_row(capsys):
    assert main(["parity", "--sizes", "real", "--variant", "real_embedding_repeated"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 variants equal their PyTorch twin" in printed
    assert "bfloat16" in printed
    assert "float16" in printed
