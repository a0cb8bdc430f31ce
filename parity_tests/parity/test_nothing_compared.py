"""Where no number was compared, the verdict is not that both are equal, and it says what to do."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import CHECKS, PairingError, ParityError, assert_parity, compare
from flax_attn.parity.check import Check, worst_of

NAN = float("nan")
X = [(2, 3)]


def judge(ours, theirs, inputs=X, **options):
    return compare(ours, theirs, inputs, locate=False, **options)


LINEAR = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2).eval()
# The sides of each are different functions, which no number shows.
WITHOUT_A_NUMBER = {
    "empty batch": (lambda x: x + 1, lambda x: x + 2, [(0, 3)]),
    "empty features": (lambda x: x + 1, lambda x: x + 2, [(3, 0)]),
    "NaN": (lambda x: x * NAN, lambda x: (x + 1) * NAN, X),
    "infinite": (lambda x: x * 0 + jnp.inf, lambda x: x * 0 + float("inf"), X),
    "module on an empty batch": (*LINEAR, [(0, 3)]),
    "empty booleans": (lambda x: x > 0, lambda x: x < 0, [(0, 3)]),
}


@pytest.mark.parametrize("case", WITHOUT_A_NUMBER)
def test_outputs_without_a_finite_number_are_not_equal(case):
    ours, theirs, inputs = WITHOUT_A_NUMBER[case]
    report = judge(ours, theirs, inputs)
    assert not report.passed
    assert not report.differs
    assert repr(report).startswith(f"Report({report.name!r}: NOT COMPARED, ")
    ran = {check.name for check in report.checks if check.ran}
    assert ran <= {"shapes", "weights"}
    lines = report.explain().splitlines()
    assert lines[0] == f"{report.name}: not proven that both sides are the same function"
    assert lines[1].startswith("  forward, ")
    assert lines[1].endswith("Pass inputs for which it returns numbers")
    with pytest.raises(ParityError, match="nothing was compared: PyTorch returns no number here"):
        assert_parity(ours, theirs, inputs, locate=False)


OF_OUTPUTS = ["forward", "gradients", "second", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("name", [*OF_OUTPUTS, "jit = eager", "unbatched"])
@pytest.mark.parametrize("inputs", [[(0, 3)], X], ids=["empty", "NaN"])
def test_no_check_of_outputs_passes_without_a_number(name, inputs):
    check = judge(lambda x: x * NAN, lambda x: x * NAN, inputs, checks=[name]).check(name)
    assert check.nothing
    assert not check.passed


def test_neither_does_training_or_a_cache():
    def call(module, x):
        return module(x)

    checks = ["training", "cache = full"]
    report = judge(*LINEAR, [(0, 3)], checks=checks, flax_cached=call, torch_cached=call)
    assert len(report.checks) == 2
    assert all(check.nothing for check in report.checks)


def test_a_stress_input_without_a_number_does_not_apply():
    def ours(x):
        return jnp.where(x.max() > 50, NAN, x)

    def theirs(x):
        return torch.where(x.max() > 50, NAN, x)

    report = judge(ours, theirs)
    assert report.passed
    assert report.check("huge logits").skipped == "PyTorch returns no finite number on these inputs"
    # What is asked for by name must run.
    asked_for = judge(ours, theirs, checks=["huge logits"])
    assert not asked_for.passed


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_lower_dtype_in_which_pytorch_overflows_does_not_apply():
    # float16 ends at 65504.
    report = judge(lambda x: 1e9 * (x + 9), lambda x: 1e9 * (x + 9))
    assert report.passed, report.explain()
    assert "nothing that it returns in float16 is finite" in report.check("float16").skipped


def test_gradients_that_are_nan_everywhere_are_not_equal():
    # The slope of a root at 0 is infinite, and 0 times it is NaN.
    report = judge(lambda x: x * 0 + jnp.sqrt(x * 0), lambda x: x * 0 + torch.sqrt(x * 0) * 1)
    assert report.check("gradients").nothing
    assert not report.passed


def test_zeros_without_a_gradient_are_not_equal():
    def ours(q, lengths):
        visible = jnp.arange(3)[None] < lengths[:, None]
        return jnp.where(visible, q, 0)

    def theirs(q, lengths):
        visible = torch.arange(3)[None] < lengths[:, None]
        return torch.where(visible, 2 * q, 0)

    # Where every length is 0 neither the factor nor a gradient is seen.
    report = judge(ours, theirs, extras={"lengths": [0, 0]}, checks=["forward"])
    assert not report.passed
    reason = report.check("forward").nothing
    assert reason.startswith("both sides return 0 everywhere, and all gradients")


def test_both_that_cannot_be_differentiated_are_not_equal():
    @jax.custom_vjp
    def ours(x):
        return 1 * x

    def backward(_, gradient):
        raise ValueError("no gradient in JAX")

    ours.defvjp(lambda x: (x, None), backward)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no gradient in PyTorch")

    report = judge(ours, Function.apply)
    assert not report.passed
    reason = report.check("forward").nothing
    assert "both raise an error: flax raised ValueError: no gradient in JAX" in reason


def test_nan_at_the_same_places_among_numbers_is_equal_and_elsewhere_differs():
    def masked(bound):
        return lambda x: jnp.where(x > bound, x, NAN)

    def theirs(x):
        return torch.where(x > 0, x, NAN)

    # Of the positive numbers only 0.5 is not above 1.
    x = [np.array([[0.5, -1.0, 2.0], [-3.0, 1.5, -0.2]])]
    at_same_places = judge(masked(0), theirs, x)
    elsewhere = judge(masked(1), theirs, x)
    assert at_same_places.passed
    assert elsewhere.differs


def test_numbers_where_pytorch_has_none_differ():
    report = judge(lambda x: x, lambda x: x * NAN)
    assert report.differs
    assert report.check("forward").error == np.inf


def test_a_tensor_without_numbers_beside_others_is_named():
    def ours(x):
        return x * NAN, x[:0], x

    def theirs(x):
        return (x + 1) * NAN, x[:0] + 1, x

    report = judge(ours, theirs, checks=["forward"])
    assert report.passed
    assert report.check("forward").note == "without a finite number to compare: 0, 1"


def test_the_written_reports_say_so(tmp_path):
    report = judge(lambda x: x, lambda x: x, [(0, 3)])
    for suffix in ("json", "xml", "html"):
        report.save(tmp_path / f"x.{suffix}")
    written = json.loads((tmp_path / "x.json").read_text())
    xml = (tmp_path / "x.xml").read_text()
    page = (tmp_path / "x.html").read_text()
    assert (written["passed"], written["state"]) == (False, "not compared")
    reason = "nothing was compared: PyTorch returns no number"
    assert reason in xml
    assert reason in page
    # The second line is the element of all tests: CI reads its count.
    assert 'failures="0"' not in xml.splitlines()[1]
    assert "had nothing to compare" in str(report)


def test_a_check_that_compared_nothing_never_passes():
    for check in (worst_of("rule", {}, 1.0), Check("rule", 0.0, 1.0, nothing="no number")):
        assert not check.ran
        assert not check.passed
        assert check.explain().startswith("rule: nothing was compared: ")


@pytest.mark.parametrize("kind", [KeyError, MemoryError, PairingError])
def test_a_check_that_raises_is_a_line_of_the_report_and_costs_no_other(kind, monkeypatch):
    def broken(pair):
        raise kind("no such tensor")

    monkeypatch.setitem(CHECKS, "gradients", broken)
    # The broken one stands between two others.
    report = judge(jnp.sin, torch.sin, checks=["shapes", "gradients", "forward"])
    ran = [check.name for check in report.checks if check.ran]
    assert ran == ["shapes", "forward"]
    assert not report.passed
    assert not report.differs
    reason = rf"gradients: nothing was compared: the check raised {kind.__name__}: .*no such tensor"
    assert re.search(reason, report.explain())


def test_outputs_that_one_check_cannot_read_do_not_stop_the_others():
    def words_in_bfloat16(x):
        return "a word" if x.dtype == jnp.bfloat16 else jnp.sin(x)

    report = judge(words_in_bfloat16, torch.sin, checks=["forward", "bfloat16", "second"])
    passed = [check.name for check in report.checks if check.passed]
    assert passed == ["forward", "second"]
    assert "the check raised PairingError" in report.check("bfloat16").nothing


def test_an_output_that_overflows_in_float16_is_not_tested():
    def flax(x):
        return {"small": x * 0.5, "large": x * 1e4 * 1e4}

    def theirs(x):
        return {"small": x * 0.5, "large": x * 1e4 * 1e4}

    # No number of the input is so small that its product is finite.
    report = compare(flax, theirs, [1.0 + np.arange(12.0).reshape(3, 4)], checks=["float16"])
    assert report.check("float16").passed, report.explain()
    said = "float16: 1 of 2 outputs of PyTorch have no finite number"
    assert said in report.coverage.untested
    assert report.state == "equal where tested"
