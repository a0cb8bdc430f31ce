from dataclasses import replace

import jax.numpy as jnp  # noqa: F401 (names bfloat16 to NumPy)
import numpy as np
import pytest

from flax_attn.backends.call import Unsupported
from flax_attn.bench.agreement import excess_error, reference
from flax_attn.bench.benchmark import GIB, Benchmark, Measurement, measure
from flax_attn.bench.functions import functions, ours, steps
from flax_attn.bench.implementation import Implementation, PreparedCall
from flax_attn.bench.layers import layers
from flax_attn.bench.workload import Workload, inputs
from flax_attn.parity import tolerance

SMALL = Workload(2, 3, 8, 4, backward=True)
LAYER = Workload(2, 3, 8, 4, backward=True, layer=True)
STEP = Workload(2, 12, 512, 64, step=True)


class Fake:
    """An implementation that returns the given arrays, and counts how often it is run."""

    def __init__(self, found, temporaries=0):
        self.calls, self.found, self.temporaries = 0, found, temporaries
        self.implementation = Implementation(
            "fake",
            lambda work: PreparedCall(self.run, lambda result: result, 0.0, self.temporaries),
        )

    def run(self, repeats):
        self.calls += repeats
        return self.found


def only(implementation, work=SMALL, history=(), **options):
    (row,) = measure(
        Benchmark("attention", ((implementation, work),), **{"limit": GIB, **options}), 3, history
    )
    return row


def refusing(error):
    def prepare(work):
        raise error

    return Implementation("refusing", prepare)


@pytest.fixture
def exact():
    return dict(reference(SMALL)[0])


def test_an_implementation_that_agrees_is_timed(exact):
    row = only(Fake(exact).implementation)
    assert (row.status, row.error, len(row.seconds)) == ("timed", 0, 3)


@pytest.mark.parametrize("name", ["output", "query", "key", "value"])
@pytest.mark.parametrize(
    "wrong", [lambda x: 1.01 * x, lambda x: x + float("nan")], ids=["factor", "nan"]
)
def test_an_implementation_that_disagrees_is_reported_and_not_timed(exact, name, wrong):
    fake = Fake({**exact, name: wrong(exact[name])})
    row = only(fake.implementation)
    assert row.status == "disagrees"
    assert "times the allowed one" in row.note
    assert not row.error <= 1
    assert row.seconds == ()
    assert fake.calls == 1


def test_a_missing_package_says_how_to_install_it():
    row = only(replace(ours("reference"), package="no_such_package"))
    assert (row.status, row.note) == ("not installed", "pip install no_such_package")


def test_a_refusal_is_reported_with_its_reason():
    row = only(refusing(Unsupported("needs t to be a multiple of 128; got t=8")))
    assert (row.status, row.note) == ("refused", "needs t to be a multiple of 128; got t=8")


def test_a_failure_does_not_end_the_others(exact):
    entries = (
        (refusing(RuntimeError("no device\nand more")), SMALL),
        (Fake(exact).implementation, SMALL),
    )
    failed, timed = measure(Benchmark("attention", entries, GIB), 2)
    assert (failed.status, failed.note) == ("failed", "RuntimeError: no device")
    assert len(timed.seconds) == 2


def test_what_needs_too_much_memory_is_not_run(exact):
    fake = Fake(exact, temporaries=3 * GIB)
    row = only(fake.implementation, limit=2 * GIB)
    assert (row.status, row.temporaries, fake.calls) == ("too large", 3 * GIB, 0)
    assert row.note == "needs 3.0 GiB of temporaries, and the limit is 2.0 GiB"


@pytest.mark.parametrize(("field", "step"), [("seconds", "run"), ("compile_seconds", "compile")])
def test_too_long_a_time_is_predicted(exact, field, step):
    past = replace(SMALL, t=4)
    history = [
        Measurement("attention", "fake", past, **{field: (30.0,) if field == "seconds" else 30.0})
    ]
    row = only(Fake(exact).implementation, history=history)
    assert row.status == "too slow"
    assert f"108 s to {step}" in row.note  # 36 pairs after 10
    other = [
        replace(history[0], implementation="another"),
        replace(history[0], work=replace(past, backward=False)),
    ]
    assert only(Fake(exact).implementation, history=other).status == "timed"


def test_compiled_only_is_not_run():
    fake = Fake({})
    row = only(fake.implementation, timed=False)
    assert (row.status, fake.calls) == ("compiled", 0)


def test_the_reference_in_blocks_is_the_reference_at_once(monkeypatch):
    work = Workload(1, 2, 10, 4, backward=True, window=3)
    whole = reference(work)[0]
    reference.cache_clear()
    monkeypatch.setattr("flax_attn.bench.functions.ROWS", 4)
    blocks, plain = reference(work)
    reference.cache_clear()
    assert excess_error(blocks, whole, plain, "float32") < 1e-6
    assert set(whole) == {"output", "query", "key", "value"}


@pytest.mark.parametrize(
    "implementation", functions(["reference"], "cpu"), ids=lambda one: one.name
)
def test_every_implementation_computes_the_same_function(implementation):
    pytest.importorskip(implementation.package)
    row = only(implementation)
    assert row.status == "timed", row.note
    assert row.seconds


@pytest.mark.parametrize("implementation", layers(["reference"]), ids=lambda one: one.name)
def test_every_layer_computes_the_same_function(implementation):
    pytest.importorskip(implementation.package)
    row = only(implementation, LAYER)
    assert row.status == "timed", row.note


def step_in_numpy(scale=8.0, keys=STEP.t, dtype="float32"):
    """A step that sums the products one after another, which rounds more than sums in parts do."""
    query, key, value = (x[1, -keys:].astype(dtype).astype("float32") for x in inputs(STEP)[:3])
    scores = np.einsum("tnh,snh->nts", query, key) / np.float32(scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), value)
    return Fake({"output": output.astype("float64")}).implementation


@pytest.mark.parametrize(
    "implementation", [*steps("cpu"), step_in_numpy()], ids=lambda one: one.name
)
def test_every_step_computes_the_same_function_in_any_order_of_sums(implementation):
    pytest.importorskip("torch")
    row = only(implementation, STEP)
    assert row.status == "timed", row.note


@pytest.mark.parametrize(
    "wrong", [{"scale": 8.01}, {"keys": STEP.t - 1}, {"dtype": "bfloat16"}], ids=str
)
def test_a_wrong_step_is_caught(wrong):
    row = only(step_in_numpy(**wrong), STEP)
    assert (row.status, row.error > 100) == ("disagrees", True)


@pytest.mark.parametrize("window", [None, 100])
def test_a_step_in_pytorch_is_the_formula_in_several_orders(window):
    pytest.importorskip("torch")
    exact, (_, *draws) = reference(replace(STEP, window=window))
    single = lambda arrays: {name: array.astype("float32") for name, array in arrays.items()}  # noqa: E731
    assert all(tolerance.reordered(single(draw), single(exact))["output"] <= 1 for draw in draws)
    assert len({draw["output"].tobytes() for draw in draws}) == tolerance.DRAWS


def test_an_implementation_without_the_mask_is_caught():
    row = only(ours("reference"), replace(SMALL, window=2))
    assert row.status == "timed", row.note
    (full,) = (one for one in functions(["reference"], "cpu") if one.name == "jax.nn")
    assert only(full, replace(SMALL, window=2)).status == "disagrees"
