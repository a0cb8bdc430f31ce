"""A verdict of "equal" extends to what was tested, and each report says how far that is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import CHECKS, compare
from flax_attn.parity.check import Check
from flax_attn.parity.coverage import Coverage
from flax_attn.parity.report.document import document
from flax_attn.parity.report.report import Report

X = [(3, 4)]
HIDDEN = Coverage("x (3, 4); float64", ("mask <b> has no effect on the outputs",))


def judged(ours, theirs, inputs=X, **options):
    with jax.numpy_dtype_promotion("standard"):
        return compare(ours, theirs, inputs, locate=False, **options)


@pytest.mark.parametrize(
    ("checks", "coverage", "state"),
    [
        ([Check("forward", 0.0, 1.0)], Coverage(), "equal"),
        ([Check("forward", 0.0, 1.0)], HIDDEN, "equal where tested"),
        ([Check("forward", 2.0, 1.0)], HIDDEN, "different"),
        ([Check("forward", 2.0, 1.0), Check("x", 0.0, 1.0, nothing="none")], HIDDEN, "different"),
        ([Check("forward", 0.0, 1.0, skipped="none")], HIDDEN, "not compared"),
        ([Check("x", 0.0, 1.0, skipped="none", wanted=True)], Coverage(), "not compared"),
        ([], Coverage(), "not compared"),
    ],
)
def test_the_verdict_has_four_states(checks, coverage, state):
    report = Report("r", checks, coverage=coverage)
    assert report.state == state
    assert report.state.lower() in repr(report).lower()
    assert document(report)["state"] == state


def test_every_form_of_a_report_says_what_was_tested_and_what_was_not(tmp_path):
    report = Report("r", [Check("forward", 0.0, 1.0)], coverage=HIDDEN)
    assert report.passed
    files = {}
    for kind in ("json", "html", "xml"):
        path = tmp_path / f"r.{kind}"
        report.save(path)
        files[kind] = path.read_text()
    written = json.loads(files["json"])
    assert written["coverage"] == {"lines": [HIDDEN.lines], "untested": [*HIDDEN.untested]}
    for text in (str(report), files["html"], files["xml"]):
        assert "equal where tested" in text
        assert HIDDEN.lines in text
    assert HIDDEN.untested[0] in str(report)
    assert HIDDEN.untested[0] in report.explain()
    # A name of the user's is no markup.
    assert "mask &lt;b&gt; has no effect" in files["html"]


def test_all_checks_on_a_plain_layer_leave_nothing_untested():
    report = judged(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), torch.nn.Linear(4, 3).eval(), [(2, 5, 4)])
    assert report.state == "equal", report.explain()
    assert report.coverage.lines == (
        "input 0 (2, 5, 4) float64; 2 parameters; float64, float32, bfloat16, float16; no batch"
        " axis; training; input 0 (4, 10, 4); input 0 (2, 6, 4)"
    )


def test_checks_that_were_not_asked_for_are_not_tested():
    report = judged(jnp.sin, torch.sin, checks=["shapes", "forward"])
    assert report.state == "equal where tested"
    (sentence,) = report.coverage.untested
    assert sentence == f"{len(CHECKS) - 2} of {len(CHECKS)} checks, which were not asked for"


@pytest.mark.parametrize(
    ("ours", "theirs", "inputs", "sentence"),
    [
        (lambda x, y: x, lambda x, y: x, [(3, 4)] * 2, "input 1 has no effect on the outputs"),
        (
            lambda x: jnp.ones_like(x),
            lambda x: torch.ones_like(x),
            X,
            "input 0 has no effect on the outputs",
        ),
        (
            lambda x, ids: x,
            lambda x, ids: x,
            [(3, 4), np.arange(12).reshape(3, 4)],
            "input 1 has no effect on the outputs",
        ),
        (
            lambda x, place: x + place,
            lambda x, place: x + place,
            [(3, 4), np.array(7)],
            "input 1 is 7 everywhere; no other value was tried",
        ),
    ],
    ids=["of two inputs", "constant", "integers", "one value"],
)
def test_an_input_that_changes_nothing_is_not_tested(ours, theirs, inputs, sentence):
    report = judged(ours, theirs, inputs, checks=["forward", "gradients"])
    assert report.passed, report.explain()
    assert sentence in report.coverage.untested


def test_what_pools_its_inputs_has_an_effect():
    report = judged(
        lambda x, ids: x.sum() + ids.sum(),
        lambda x, ids: x.sum() + ids.sum(),
        [(3, 4), np.array([[0, 1, 3]])],
    )
    assert report.state == "equal", report.explain()


class Idle(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return x + 0 * self.weight[...]


class TorchIdle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        # It has a gradient, which is zero.
        return x + 0 * self.weight


def test_parameters_that_change_nothing_are_not_tested():
    with jax.numpy_rank_promotion("allow"):
        report = judged(Idle(), TorchIdle(), layout="torch", checks=["forward"])
    assert "the parameters have no effect on the outputs" in report.coverage.untested


def test_parameters_that_are_not_shared_are_not_tested():
    report = judged(jnp.sin, TorchIdle(), layout=None, checks=["shapes", "weights"])
    assert report.coverage.untested[0].startswith("weights: without a layout it is not known which")


def called_back(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def sine(x):
        return jax.pure_callback(lambda x: np.sin(x), shape, x)

    # JAX cannot differentiate what Python computes.
    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))
    return sine(x)


@pytest.mark.parametrize("checks", [["shapes"], ["forward", "gradients"]])
def test_a_port_that_calls_back_into_python_is_never_equal(checks):
    report = judged(called_back, torch.sin, checks=checks)
    assert report.passed, report.explain()
    (sentence,) = [line for line in report.coverage.untested if "Python" in line]
    assert sentence.startswith("JAX calls back into Python at test_coverage.py:")


def test_a_callback_that_returns_nothing_is_harmless():
    def shown(x):
        jax.debug.callback(lambda x: None, x)
        return jnp.sin(x)

    report = judged(shown, torch.sin, checks=["forward"])
    # What prints or logs has no number that the outputs depend on.
    assert not any("Python" in line for line in report.coverage.untested)


# The checks in which a number of float64 among those of the inputs would raise the dtype.
LOW = ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (
            lambda x: x * np.array(3**0.5),
            "float32, bfloat16: JAX computes in float64 at test_coverage.py:",
        ),
        (
            lambda x: (x * np.full(4, 3**0.5)[None]).astype(x.dtype),
            "float32, bfloat16: JAX computes in float64 at test_coverage.py:",
        ),
        (
            lambda x: x * (np.float32(3**0.5) if x.dtype == jnp.bfloat16 else 3**0.5),
            "bfloat16: JAX returns output in float32, PyTorch in bfloat16",
        ),
    ],
    ids=["number", "array", "float32"],
)
def test_a_lower_dtype_that_was_computed_in_a_higher_one_is_not_tested(ours, sentence):
    report = judged(ours, lambda x: x * 3**0.5, checks=LOW)
    assert report.passed, report.explain()
    assert any(line.startswith(sentence) for line in report.coverage.untested), report.coverage


def test_what_pytorch_computes_in_float64_as_well_is_tested():
    report = judged(
        lambda x: jnp.sin(x.astype(jnp.float64)).astype(x.dtype),
        lambda x: torch.sin(x.double()).to(x.dtype),
        checks=LOW,
    )
    assert not any("float64" in line for line in report.coverage.untested)


class Mode(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) if self.training else x


@pytest.mark.parametrize(
    ("layer", "untested"),
    [
        (torch.nn.Dropout(0.5), True),
        (torch.nn.BatchNorm1d(4, affine=False, track_running_stats=False), False),
        (torch.nn.Dropout(0.0), False),
    ],
)
def test_another_train_mode_without_a_key_is_not_tested(layer, untested):
    report = judged(lambda x: x, Mode(layer).eval(), [(1, 4)], checks=None, layout=None)
    assert report.passed, report.explain()
    reason = "dropout: the calls take no dropout_key, so they cannot be made to drop"
    assert any(line.startswith(reason) for line in report.coverage.untested) == untested


def test_whole_numbers_hide_small_differences():
    class Choice(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(4, 5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jnp.argmax(self.fc(x), -1)

    class TorchChoice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 5)

        def forward(self, x):
            return self.fc(x).argmax(-1)

    report = judged(Choice(), TorchChoice())
    assert report.state == "equal where tested"
    assert any("whole numbers, which hide small differences" in x for x in report.coverage.untested)
    # Without parameters the numbers are all there is.
    assert judged(lambda x: x.argmax(-1), lambda x: x.argmax(-1)).state == "equal"
