"""Test the tests: a fault that is patched in is detected, first by the expected check.

Here a share of the variants is tried; `flax-attn faults` tries them all.
"""

import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import torch_ref
from flax_attn.parity.check import Check
from flax_attn.parity.training import Recipe
from flax_attn.proof.faults import FAULTS, detect
from flax_attn.proof.faults.detect import Detection
from flax_attn.proof.faults.fault import Copy, Modify, Patch, Wrap, fault, patched
from torch_ref.modules.norm import RMSNorm

ROWS = dict.fromkeys(known.row for known in FAULTS)
LOW, MIDDLE, HIGH = detect.FIXED

# Which of the fixed tolerances some faults pass.
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
# The variants whose faults are detected here, and those whose faults are explained, too.
SHARE = list(ROWS)[::3]
EXPLAINED = SHARE[::2]


@pytest.mark.parametrize("row", SHARE)
def test_every_fault_is_detected_first_by_the_check_that_should(row):
    faults, watched = _faults(row), []
    detections = detect.detect(faults, watch=watched.append, explain=row in EXPLAINED)
    found = {result.fault.name: result for result in detections}
    assert watched == list(found) == [known.name for known in faults]
    first = {name: result.check and result.check.name for name, result in found.items()}
    assert first == {known.name: known.check for known in faults}
    worst = [result.check.worst for result in found.values()]
    assert "the call itself" not in worst, "a fault must not raise"
    for name in PASSES.keys() & found.keys():
        passed = {tolerance for tolerance, good in found[name].fixed.items() if good}
        assert passed == PASSES[name], name
    # What is read at no line of the two sides must not be shown at one.
    for result in detections:
        said = f"{result.fault.what}\n{result.difference}"
        read = row in EXPLAINED and result.fault.check in detect.READ
        assert bool(result.located) == read, said


def _faults(row):
    return [known for known in FAULTS if known.row == row]


def test_every_fault_is_a_row_of_its_own():
    assert len(FAULTS) >= 114
    names = {known.name for known in FAULTS}
    sentences = {known.what for known in FAULTS}
    # One fault that is there twice would count twice as detected.
    for words in (names, sentences):
        assert len(words) == len(FAULTS)
        assert all(words)
    for known in FAULTS:
        assert known.what.endswith(".")
        assert known.patches
        assert known.variant.name == known.row
    assert set(PASSES) <= names


def test_faults_are_patched_into_code_that_ships():
    targets = {
        patch.target
        for known in FAULTS
        for patch in known.patches
        if not isinstance(patch.target, str)
    }
    # What both sides import would be patched on both.
    others = {target for target in targets if not _home(target).startswith("torch_ref")}
    assert others == {Recipe, torch.optim, torch.nn.GELU}


def _home(target):
    return getattr(target, "__module__", None) or target.__name__


def test_every_check_in_the_order_is_the_first_to_detect_something():
    assert {known.check for known in FAULTS} == set(detect.ORDER)


@pytest.mark.parametrize("row", ROWS)
def test_patches_are_taken_out_again_also_after_an_error(row):
    faults = _faults(row)
    module = faults[0].variant.build(torch_ref)
    before = _state(module)
    # All on one module: a patch that stays would show with the next fault.
    for known in faults:
        with pytest.raises(ZeroDivisionError), patched(module, known.patches):
            raise ZeroDivisionError
        assert _state(module) == before
        with patched(module, known.patches):
            assert _state(module) != before
        assert _state(module) == before


def _state(module):
    """Return the identities of all attributes of the module, `torch_ref`, and all else patched."""
    files = [file for name, file in sys.modules.items() if name.split(".")[0] == "torch_ref"]
    things = {*files, Recipe, torch.optim, torch.nn.GELU}
    for file in files:
        things |= {thing for thing in vars(file).values() if isinstance(thing, type)}
    state = {}
    for thing in things:
        state |= {(str(thing), name): id(value) for name, value in vars(thing).items()}
    for path, part in module.named_modules():
        own = dict(vars(part))
        # PyTorch keeps these in dictionaries, whose identity stays when an entry changes.
        own |= dict(part.named_parameters(recurse=False))
        own |= dict(part.named_buffers(recurse=False))
        own |= dict(part.named_children())
        state |= {(path, name): id(value) for name, value in own.items()}
    return state


def test_a_patch_that_cannot_be_applied_takes_out_those_before_it():
    module = torch_ref.RMSNorm(4)
    before = _state(module)
    right = Patch("", "eps", 0.1)
    # A number for a parameter, and a name that the module lacks.
    of_another_type, of_no_attribute = Patch("", "scale", 2.0), Patch("", "epsilon", 0.1)
    for wrong, error in ((of_another_type, TypeError), (of_no_attribute, AttributeError)):
        raises = pytest.raises(error, match=r"scale|epsilon")
        with raises, patched(module, [right, wrong]):
            pass
    assert _state(module) == before


HARMLESS = fault("harmless", "Nothing goes wrong.", "rms_norm", Copy("", "scale", "scale"))
SERIOUS = fault(
    *("serious", "The scale is missing.", "rms_norm"),
    Modify("", "scale", lambda scale: torch.nn.Parameter(torch.ones_like(scale))),
)


def test_a_fault_that_changes_nothing_is_undetected():
    (result,) = detect.detect([HARMLESS])
    assert not result.detected
    assert result.fixed == {LOW: True, MIDDLE: True, HIGH: True}


def test_a_fault_is_patched_in_alone():
    forward, alone = RMSNorm.forward, []

    def doubled(original, self, x):
        alone.append(original is forward)
        return 2 * original(self, x)

    patch = Wrap(RMSNorm, "forward", doubled)
    twice = [fault(name, "The output is doubled.", "rms_norm", patch) for name in ("one", "two")]
    for result in detect.detect(twice):
        # Half of the larger value; of both patches at once it would be three quarters.
        assert result.check.error == pytest.approx(0.5)
    # Each is called for the checks, and for the fixed tolerances.
    assert len(alone) >= 4
    assert all(alone)


def test_a_variant_that_fails_without_a_fault_is_refused(monkeypatch):
    forward = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: 1.001 * forward(self, x))
    rule = (
        r"must pass before a fault is patched in; got rms_norm, forward: error 0\.000999.*Repair"
        r" the variant first"
    )
    with pytest.raises(detect.FailsWithoutFaultError, match=rule):
        detect.detect([SERIOUS])


def test_what_is_not_repaired_is_not_shown():
    (found,) = detect.detect([SERIOUS], explain=True)
    assert found.shown
    lost = replace(found, difference=replace(found.difference, remaining=("output",)))
    assert not lost.shown
    assert "| NOT SHOWN |" in detect.markdown([lost])
    assert "1 of 1 faults are detected, 0 of 1 shown by the lines" in detect.summary([lost])


FIXED = {LOW: False, MIDDLE: True, HIGH: True}
PASSED = " | fails | passes | passes |"
DETECTIONS = [
    Detection(SERIOUS, Check("forward", 0.25, 1e-12, "output"), FIXED),
    Detection(
        SERIOUS,
        Check("dropout", float("inf"), 0.0, skipped="nothing is dropped", wanted=True),
        FIXED,
    ),
    Detection(HARMLESS, None, FIXED),
]


def test_the_table_has_the_same_cells():
    console = Console(width=130)
    with console.capture() as captured:
        console.print(detect.table(DETECTIONS))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "The scale is missing rms_norm forward 2.5e-01 1e-12 fails passes passes" in lines
    assert "Nothing goes wrong rms_norm UNDETECTED fails passes passes" in lines


def test_the_table_in_markdown():
    assert detect.markdown(DETECTIONS).splitlines() == [
        "| fault | variant | first detected by | error | rule | shown at | 1e-04 | 1e-02 | 4e-02 |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | ---: |",
        "| The scale is missing | rms_norm | forward | 2.5e-01 | 1e-12 | " + PASSED,
        "| The scale is missing | rms_norm | dropout | not run |  | " + PASSED,
        "| Nothing goes wrong | rms_norm | UNDETECTED |  |  | " + PASSED,
    ]


def test_the_summary_counts_what_each_way_of_testing_detects():
    line = (
        "2 of 3 faults are detected; a fixed tolerance detects 3 at 1e-04, 0 at 1e-02, 0 at 4e-02"
    )
    assert detect.summary(DETECTIONS) == line
