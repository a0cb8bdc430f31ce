"""The tests are tested: every fault that is planted is caught, first by the check that should."""

import pytest
import torch
from rich.console import Console

import torch_ref
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.check import Check
from flax_attn.proof.faults import FAULTS, kill, planting
from flax_attn.proof.faults.detect import Kill
from flax_attn.proof.variants import Variant
from torch_ref.functional import mask_parts, masks, positions, reference
from torch_ref.modules import block, multi_head, norm

ROWS = {fault.row.name: fault.row for fault in FAULTS}
LOW, MIDDLE, HIGH = kill.FIXED

# What each of the fixed tolerances lets pass, of some faults.
PASSES = {
    "another_epsilon": {LOW, MIDDLE, HIGH},
    "swapped_norms": {LOW, MIDDLE, HIGH},
    "no_shift": {LOW, MIDDLE, HIGH},
    "exact_gelu_for_tanh": {LOW, MIDDLE, HIGH},
    "softmax_in_float32": {LOW, MIDDLE, HIGH},
    "half_of_a_gradient": {LOW, MIDDLE, HIGH},
    "l2_for_weight_decay": {LOW, MIDDLE, HIGH},
    "quick_gelu": {MIDDLE, HIGH},
    "scaled_twice": {HIGH},
    "no_causal_mask": set(),
    "transposed_kernel": set(),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_fault_is_caught_first_by_the_check_that_should(row):
    faults, told = [fault for fault in FAULTS if fault.row.name == row], []
    found = {result.fault.name: result for result in kill.run(faults, watch=told.append)}
    assert told == list(found) == [fault.name for fault in faults]
    first = {name: result.check and result.check.name for name, result in found.items()}
    assert first == {fault.name: fault.check for fault in faults}
    assert "the call itself" not in [result.check.worst for result in found.values()], "anyone sees a fault that raises"
    passes = {name: {tol for tol, good in found[name].fixed.items() if good} for name in PASSES if name in found}
    assert passes == {name: PASSES[name] for name in passes}


def test_there_are_many_faults_with_names_and_words_of_their_own():
    assert len(FAULTS) >= 40
    for words in ([fault.name for fault in FAULTS], [fault.what for fault in FAULTS]):
        assert len(set(words)) == len(FAULTS)
        assert all(words)
    assert set(PASSES) <= {fault.name for fault in FAULTS}


def test_every_check_in_the_order_is_the_first_to_catch_something():
    assert {fault.check for fault in FAULTS} == set(kill.ORDER)


TOUCHED = (
    *(torch_ref, reference, positions, masks, multi_head, block, norm, torch.optim),
    *(value for value in vars(mask_parts).values() if isinstance(value, type)),
    *(masks.Mask, positions.RoPE, norm.LayerNorm, norm.RMSNorm, torch.nn.GELU),
    *(torch_ref.KVCache, torch_ref.GPT2, torch_ref.GatedFeedForward, torch_ref.MultiHeadAttention),
)


@pytest.mark.parametrize("row", ROWS)
def test_nothing_stays_planted(row):
    side = TorchAdapter(ROWS[row].build(torch_ref) if isinstance(ROWS[row], Variant) else lambda **inputs: None)
    weights, state = side.weights(), [dict(vars(thing)) for thing in TOUCHED]
    for fault in (fault for fault in FAULTS if fault.row.name == row):
        with fault.planted(side, weights):
            pass
        assert [dict(vars(thing)) for thing in TOUCHED] == state
        assert all((value == weights[name]).all() for name, value in side.weights().items())


@planting.fault("rms_norm")
def harmless(plant):
    """Nothing goes wrong."""


@planting.fault("rms_norm")
def serious(plant):
    """The scale is missing."""
    plant.module.scale.data.fill_(1)


def test_a_fault_that_no_check_sees_survives():
    (result,) = kill.run([harmless])
    assert result.survived
    assert result.fixed == {LOW: True, MIDDLE: True, HIGH: True}


def test_a_fault_is_planted_alone():
    forward, alone = norm.RMSNorm.forward, []

    @planting.fault("rms_norm")
    def doubled(plant):
        """The output is doubled."""
        alone.append(norm.RMSNorm.forward is forward)
        plant.wrap(norm.RMSNorm, "forward", lambda forward, self, x: 2 * forward(self, x))

    (result,) = kill.run([doubled])
    assert result.check.error == pytest.approx(0.5)
    assert alone == [True, True]  # for the check, and for the fixed tolerances


def test_a_check_that_fails_without_a_fault_says_nothing(monkeypatch):
    forward = norm.RMSNorm.forward
    monkeypatch.setattr(norm.RMSNorm, "forward", lambda self, x: 1.001 * forward(self, x))
    with pytest.raises(kill.UnsoundError, match=r"nothing is planted in rms_norm, and still forward: error 0\.000999"):
        kill.run([serious])


FIXED = {LOW: False, MIDDLE: True, HIGH: True}
KILLS = [
    Kill(serious, Check("forward", 0.25, 1e-12, "output"), FIXED),
    Kill(serious, Check("dropout", float("inf"), 0.0, skipped="nothing is dropped", wanted=True), FIXED),
    Kill(harmless, None, FIXED),
]


def test_the_table_has_the_same_cells():
    console = Console(width=130)
    with console.capture() as captured:
        console.print(kill.table(KILLS))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "The scale is missing rms_norm forward 2.5e-01 1e-12 fails passes passes" in lines
    assert "Nothing goes wrong rms_norm SURVIVED fails passes passes" in lines


def test_the_table_in_markdown():
    assert kill.markdown(KILLS).splitlines() == [
        "| fault | planted in | first caught by | error | rule | 1e-04 | 1e-02 | 4e-02 |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| The scale is missing | rms_norm | forward | 2.5e-01 | 1e-12 | fails | passes | passes |",
        "| The scale is missing | rms_norm | dropout | not run |  | fails | passes | passes |",
        "| Nothing goes wrong | rms_norm | SURVIVED |  |  | fails | passes | passes |",
    ]


def test_the_summary_counts_what_each_way_of_testing_sees():
    line = "2 of 3 faults are caught; a fixed tolerance sees 3 at 1e-04, 0 at 1e-02, 0 at 4e-02"
    assert kill.summary(KILLS) == line
