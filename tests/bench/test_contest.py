from dataclasses import replace

import pytest

from flax_attn.backends.call import Unsupported
from flax_attn.bench.contest import GIB, Contest, Row, hold
from flax_attn.bench.functions import functions, ours
from flax_attn.bench.layers import layers
from flax_attn.bench.rivals import Prepared, Rival
from flax_attn.bench.truth import attention_truth, excess
from flax_attn.bench.work import Work

SMALL = Work(2, 3, 8, 4, backward=True)
LAYER = Work(2, 3, 8, 4, backward=True, layer=True)


class Actor:
    """A rival that shows the given arrays, and counts how often it is run."""

    def __init__(self, found, temporaries=0):
        self.calls, self.found, self.temporaries = 0, found, temporaries
        self.rival = Rival("actor", lambda work: Prepared(self.run, lambda result: result, 0.0, self.temporaries))

    def run(self, repeats):
        self.calls += repeats
        return self.found


def only(rival, work=SMALL, history=(), **options):
    (row,) = hold(Contest("attention", ((rival, work),), **{"limit": GIB, **options}), 3, history)
    return row


def refusing(error):
    def prepare(work):
        raise error

    return Rival("refusing", prepare)


@pytest.fixture
def truth():
    return dict(attention_truth(SMALL)[0])


def test_one_who_agrees_is_timed(truth):
    row = only(Actor(truth).rival)
    assert (row.status, row.error, len(row.seconds)) == ("timed", 0, 3)


@pytest.mark.parametrize("name", ["output", "query", "key", "value"])
@pytest.mark.parametrize("wrong", [lambda x: 1.01 * x, lambda x: x + float("nan")], ids=["factor", "nan"])
def test_one_who_disagrees_is_reported_and_not_timed(truth, name, wrong):
    actor = Actor({**truth, name: wrong(truth[name])})
    row = only(actor.rival)
    assert row.status == "disagrees"
    assert "times the allowed one" in row.note
    assert not row.error <= 1
    assert row.seconds == ()
    assert actor.calls == 1


def test_what_is_not_installed_says_how_to_install_it():
    row = only(replace(ours("reference"), package="no_such_package"))
    assert (row.status, row.note) == ("absent", "not installed: pip install no_such_package")


def test_a_refusal_is_told_with_its_reason():
    row = only(refusing(Unsupported("needs t to be a multiple of 128; got t=8")))
    assert (row.status, row.note) == ("refused", "needs t to be a multiple of 128; got t=8")


def test_a_failure_does_not_end_the_others(truth):
    entries = ((refusing(RuntimeError("no device\nand more")), SMALL), (Actor(truth).rival, SMALL))
    failed, timed = hold(Contest("attention", entries, GIB), 2)
    assert (failed.status, failed.note) == ("failed", "RuntimeError: no device")
    assert len(timed.seconds) == 2


def test_what_needs_too_much_memory_is_not_run(truth):
    actor = Actor(truth, temporaries=3 * GIB)
    row = only(actor.rival, limit=2 * GIB)
    assert (row.status, row.temporaries, actor.calls) == ("too large", 3 * GIB, 0)
    assert row.note == "needs 3.0 GiB of temporaries, and the limit is 2.0 GiB"


@pytest.mark.parametrize(("field", "step"), [("seconds", "run"), ("compile_seconds", "compile")])
def test_what_would_take_too_long_is_foreseen(truth, field, step):
    past = replace(SMALL, t=4)
    history = [Row("attention", "actor", past, **{field: (30.0,) if field == "seconds" else 30.0})]
    row = only(Actor(truth).rival, history=history)
    assert row.status == "too slow"
    assert f"108 s to {step}" in row.note  # 36 pairs after 10
    other = [replace(history[0], rival="another"), replace(history[0], work=replace(past, backward=False))]
    assert only(Actor(truth).rival, history=other).status == "timed"


def test_compiled_only_is_not_run():
    actor = Actor({})
    row = only(actor.rival, timed=False)
    assert (row.status, actor.calls) == ("compiled", 0)


def test_truth_in_blocks_is_the_truth_at_once(monkeypatch):
    work = Work(1, 2, 10, 4, backward=True, window=3)
    whole = attention_truth(work)[0]
    attention_truth.cache_clear()
    monkeypatch.setattr("flax_attn.bench.truth.ROWS", 4)
    blocks, plain = attention_truth(work)
    attention_truth.cache_clear()
    assert excess(blocks, whole, plain, "float32") < 1e-6
    assert set(whole) == {"output", "query", "key", "value"}


@pytest.mark.parametrize("rival", functions(["reference"], "cpu"), ids=lambda rival: rival.name)
def test_every_rival_computes_the_same_function(rival):
    pytest.importorskip(rival.package)
    row = only(rival)
    assert row.status == "timed", row.note
    assert row.seconds


@pytest.mark.parametrize("rival", layers(["reference"]), ids=lambda rival: rival.name)
def test_every_layer_computes_the_same_function(rival):
    pytest.importorskip(rival.package)
    row = only(rival, LAYER)
    assert row.status == "timed", row.note


def test_a_rival_without_the_mask_is_caught():
    row = only(ours("reference"), replace(SMALL, window=2))
    assert row.status == "timed", row.note
    (full,) = (rival for rival in functions(["reference"], "cpu") if rival.name == "jax.nn")
    assert only(full, replace(SMALL, window=2)).status == "disagrees"
