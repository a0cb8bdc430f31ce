"""A share of the random calls, every call that has to be refused, and how failures are told."""

import dataclasses
import sys
from time import monotonic

import numpy as np
import pytest
from flax_attn import Mask
from flax_attn.backends.call import Unsupported

from . import attention, cases, spoiled, workers
from .judge import Wrong, refused

SHARE = 25  # half a minute of processor time, where nothing is compiled yet
SCRIPTS = {
    "no answer in 2 s": "import time; time.sleep(60)",
    "the process died: exit status -11": "import os; input(); os.kill(os.getpid(), 11)",
    "the process died: exit status 3": "import os; os._exit(3)",
}


def run(numbers, **limits):
    limits = {"jobs": 1, "seconds": 300, "until": monotonic() + 3000} | limits
    told = []
    return workers.run(iter(numbers), **limits, tell=told.append), told


def first_call():
    drawn = map(cases.draw, range(99))
    calls = (case for case in drawn if isinstance(case, attention.Attention) and not case.wrong)
    precise = (case for case in calls if case.dtype in ("float32", "float64"))
    return next(case for case in precise if case.options.visible.any())


def test_a_share_of_the_random_calls():
    report, told = run(range(SHARE))
    assert report.cases == SHARE
    assert not report.failures, "\n\n".join(told)
    assert {"equal", "refused"} <= {result for _, result in report.results}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("argument", spoiled.CALLS)
def test_what_no_backend_may_take_is_refused(argument):
    case = spoiled.Spoiled(argument, compiled=False, backends=("auto", "blocked"))
    for outcome in cases.outcomes(case):
        if outcome.error is not None:
            raise outcome.error


def test_a_case_is_known_by_its_number():
    assert str(cases.draw(12)) == str(cases.draw(12))
    assert len({str(cases.draw(number)) for number in range(20)}) == 20


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_a_wrong_number_is_found(monkeypatch):
    case = dataclasses.replace(first_call(), backends=("reference",))
    right = case.run("reference")

    def run(self, backend):
        return [{name: np.asarray(x) * (1 + 2**-6) for name, x in found.items()} for found in right]

    assert [x.result for x in cases.outcomes(case)] == ["equal"]
    monkeypatch.setattr(attention.Attention, "run", run)
    (outcome,) = cases.outcomes(case)
    assert outcome.result == "wrong"
    assert isinstance(outcome.error, Wrong)


def test_an_error_of_another_library_is_no_refusal():
    with pytest.raises(ValueError, match="cannot reshape") as raised:
        np.zeros(3).reshape(2)
    assert not refused(raised.value)
    with pytest.raises(ValueError, match="window") as raised:
        Mask.window(-1, 0)
    assert refused(raised.value)


def test_a_refusal_of_what_has_to_run_is_wrong(monkeypatch):
    def check(self, backend):
        raise Unsupported("got a call")

    monkeypatch.setattr(attention.Attention, "check", check)
    case = dataclasses.replace(first_call(), backends=("auto", "reference"))
    assert [x.result for x in cases.outcomes(case)] == ["wrong", "wrong"]


@pytest.mark.parametrize("words", SCRIPTS)
def test_a_case_that_hangs_or_crashes_is_told_with_its_number(monkeypatch, words):
    script = f"print('ready', flush=True); {SCRIPTS[words]}"
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-c", script])
    report, told = run([7, 8], seconds=2)
    assert report.cases == len(told) == 2
    for number, text in zip((7, 8), told, strict=True):
        assert f"case {number}: {words}" in text


def test_a_process_that_does_not_start_ends_the_run(monkeypatch):
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-c", "import nothing_of_this_name"])
    with pytest.raises(RuntimeError, match="nothing_of_this_name"):
        run([7, 8])
