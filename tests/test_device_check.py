import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from flax_attn.backends import fused
from flax_attn.backends.call import prepare
from flax_attn.backends.fused.kernel import Tiling
from flax_attn.backends.fused.tilings import _TRIED, TABLE, TileRow, row_of, tried
from flax_attn.backends.registry import load
from flax_attn.bench.calls import MODEL_CALLS
from flax_attn.cli import main
from flax_attn.device import check, conformance, tiles, times
from flax_attn.device.calls import CALLS, NAN, drawn, in_dtype
from flax_attn.device.clock import Clock
from flax_attn.device.report import DeviceReport, Judgement, Timing, TriedTiles, page
from flax_attn.device.threads import in_threads
from flax_attn.device.times import TimedCall
from flax_attn.device.torch_kernels import sdpa, tensors

pytestmark = pytest.mark.usefixtures("no_shape_checks")

BY_NAME = {call.name: call for call in CALLS}
SOME = [BY_NAME[name] for name in ("causal, rows that see nothing", "sinks", NAN)]


def hours(count):
    return Clock(3600.0 * count)


@pytest.mark.parametrize("call", SOME, ids=lambda call: call.name)
def test_every_backend_of_a_cpu_and_the_interpreter_equal_the_formula(call):
    judge = conformance.Judge(in_dtype(call, "float32"))
    with fused.interpreted():
        found = [judge(name) for name in ("native", "decode", "blocked", "fused")]
    assert [one.status for one in found] == ["equal"] * 4, found


@pytest.mark.parametrize("wrong", ["scaled", "NaN"])
def test_a_backend_that_is_wrong_differs(wrong, monkeypatch):
    backend = load("blocked")
    attend = backend.attend

    def broken(call):
        output = attend(call)
        return output * 1.001 if wrong == "scaled" else output.at[0, 3].set(np.nan)

    monkeypatch.setattr(backend, "attend", broken)
    found = conformance.Judge(in_dtype(BY_NAME["causal"], "float32"))("blocked")
    assert found.status == "differs"
    assert found.error is not None
    assert found.error > 1


def test_a_refusal_and_a_failure_are_lines(monkeypatch):
    judge = conformance.Judge(in_dtype(BY_NAME["dropout"], "float32"))
    refused = judge("decode")
    assert refused.status == "refused"
    assert "decode takes no dropout" in refused.note

    def fail(call):
        raise RuntimeError("out of shared memory\nsecond line")

    monkeypatch.setattr(load("blocked"), "attend", fail)
    failed = judge("blocked")
    assert (failed.status, failed.note) == ("failed", "RuntimeError: out of shared memory")


def test_what_the_time_did_not_reach_is_said():
    spent = Clock(1.0, now=lambda: 5.0, start=0.0)
    found = list(conformance.judgements(["blocked"], spent, 0.5, SOME))
    assert {one.status for one in found} == {"not reached"}
    assert len(found) == 3 * len(SOME)
    late = list(times.timings(["blocked"], SOME[:1], spent, 0.5))
    assert {one.status for one in late} == {"not reached"}
    assert list(tiles.tried_tiles(MODEL_CALLS, spent)) == []


@pytest.mark.parametrize("call", MODEL_CALLS, ids=lambda call: call.name)
def test_numbers_are_drawn_for_the_calls_of_models(call, monkeypatch):
    # Of the sizes of models only the integers and keys are drawn: numbers take seconds.
    fast = SimpleNamespace(
        standard_normal=lambda shape, dtype: np.broadcast_to(np.float32(1), shape),
        integers=np.random.default_rng(0).integers,
    )
    monkeypatch.setattr(np.random, "default_rng", lambda seed: fast)
    arrays, cotangent = drawn(call)
    given = jax.tree.map(lambda x: (x.shape, x.dtype), call.arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == given
    assert cotangent.shape == call.cotangent.shape


def test_times_name_the_choice_and_what_refuses():
    found = list(times.timings(["decode", "blocked", "native"], [BY_NAME["dropout"]], hours(1), 1))
    by_kernel = {one.kernel: one for one in found}
    assert by_kernel["decode"].status == "refused"
    assert by_kernel["blocked"].status == "timed"
    assert by_kernel["blocked"].chosen
    assert (by_kernel["blocked"].forward or 0) > 0
    assert (by_kernel["jax.nn"].ours, by_kernel["jax.nn"].chosen) == (False, False)


def test_a_row_of_tiles_is_taken_in_place_of_the_table():
    x = jax.numpy.zeros((1, 9, 2, 64), "bfloat16")
    call = prepare(x, x, x, platform="gpu")
    usual = row_of(call)
    assert usual in TABLE
    assert (usual.platform, usual.width, usual.capability) == ("gpu", 64, 0)
    row = TileRow("gpu", 2, 64, Tiling(128, 32), Tiling(32, 128), Tiling(32, 64))
    with tried(row):
        plan = fused.BACKEND.plan(call)
    assert (plan.forward, plan.backward, plan.keys) == (row.forward, row.backward, row.keys)
    assert fused.BACKEND.plan(call).forward == usual.forward


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: "gpu")


@pytest.mark.usefixtures("on_a_gpu")
def test_the_best_tiles_are_rows_of_the_table(monkeypatch):
    best = Tiling(64, 128, warps=8, stages=2)

    def compiled(call, one, both):
        plan = fused.BACKEND.plan(prepare(*(jax.numpy.zeros((1, 9, 2, 64)),) * 3, platform="gpu"))
        if plan.forward.s == 32:
            raise RuntimeError("does not fit")
        return lambda numbers: TimedCall(1.0, 1.0 if plan.forward == best else 2.0)

    monkeypatch.setattr(tiles, "compiled", compiled)
    monkeypatch.setattr(tiles, "drawn", lambda call: None)
    found = list(tiles.tried_tiles([MODEL_CALLS[0], MODEL_CALLS[1], MODEL_CALLS[2]], hours(1)))
    assert {one.call for one in found} == {MODEL_CALLS[0].name, MODEL_CALLS[1].name}
    assert "RuntimeError: does not fit" in {one.note for one in found}
    report = DeviceReport({"device": "an abacus", "platform": "gpu"}, False, tiles=found)
    for one in report.best_tiles.values():
        row = eval(one.row, {"TileRow": TileRow, "Tiling": Tiling})
        assert (row.forward, row.backward, row.keys) == (best, best, best)
        assert not one.usual


def test_the_page_says_what_is_wrong_and_what_is_faster():
    call = "a call"
    report = DeviceReport(
        {"device": "an abacus", "platform": "gpu"},
        interpreted=False,
        judgements=[
            Judgement("fused", call, "float32", "differs", 7.0),
            Judgement("blocked", call, "float32", "equal", 0.5),
        ],
        timings=[
            Timing(call, "cudnn", True, True, "timed", 0.002, 0.003, 2**20, 0.001),
            Timing(call, "fused", True, False, "timed", 0.001, 0.003, 2**20, 0.002),
            Timing(call, "jax.nn", False, False, "timed", 0.0005, 0.003),
        ],
        tiles=[TriedTiles(call, "TileRow(1)", True, 2.0), TriedTiles(call, "TileRow(2)", False)],
    )
    text = page(report)
    assert "**differs**: fused, a call, float32, error 7 times the allowed one" in text
    assert "`auto` takes cudnn for a call, and fused was faster: 1 of 2 ms." in text
    assert "    TileRow(1),  # a call" in text
    assert report.as_dict()["slower"] == {call: ["cudnn", "fused"]}


@pytest.mark.parametrize("name", ["causal", "no mask", "bias", "packed documents"])
def test_sdpa_computes_the_call(name):
    pytest.importorskip("torch")
    import torch

    call = in_dtype(BY_NAME[name], "float32")
    numbers = drawn(call)
    attend, inputs, _ = tensors(call, sdpa(call), numbers, "cpu")
    with torch.no_grad():
        found = attend(*inputs).transpose(1, 2).numpy()
    expected = conformance._results("reference", call, *numbers)["output"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_sdpa_refuses_what_it_has_not():
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="SDPA has no soft_cap; got a call with one"):
        sdpa(BY_NAME["soft cap"])


@pytest.mark.parametrize("name", ["dropout", "soft cap", "sinks"])
def test_a_kernel_of_another_library_is_not_timed_on_what_it_would_leave_out(name):
    (found,) = times.timings([], [BY_NAME[name]], hours(1), 1)
    assert (found.kernel, found.status) == ("jax.nn", "failed")
    assert found.note.startswith("ValueError: jax.nn has no ")


def test_tasks_in_threads_have_the_context_of_their_caller():
    row = TABLE[0]
    with tried(row):
        found = list(in_threads(_TRIED.get for _ in range(9)))
    assert found == [row] * 9


@pytest.mark.parametrize("minutes", ["0", "nan", "-1", "soon"])
def test_minutes_are_checked(minutes, capsys):
    with pytest.raises(SystemExit, match="64"):
        main(["device-check", "--minutes", minutes])
    assert "must be" in capsys.readouterr().err


def test_the_command_writes_json_and_a_page_and_fails_where_a_backend_differs(
    tmp_path, monkeypatch, capsys
):
    few = [BY_NAME["no mask"]]
    real = check.check

    def short(minutes, save, show):
        return real(minutes, save, show, few)

    monkeypatch.setattr(check, "check", short)
    monkeypatch.setattr(conformance, "DTYPES", ("float32",))
    path = tmp_path / "found.json"
    assert main(["device-check", "--minutes", "5", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {one["status"] for one in found["judgements"]} == {"equal"}
    assert {"native", "fused"} <= {one["backend"] for one in found["judgements"]}
    assert found["interpreted"]
    assert "ran in Pallas's interpreter" in (tmp_path / "found.md").read_text()
    attend = load("blocked").attend
    monkeypatch.setattr(load("blocked"), "attend", lambda call: attend(call) * 1.001)
    assert main(["device-check", "--minutes", "5", "--json", str(path)]) == 1
    assert "differs: blocked, no mask, float32" in capsys.readouterr().out
