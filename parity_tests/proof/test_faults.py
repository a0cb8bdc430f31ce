"""Test the tests: a fault that is patched in is detected, first by the expected check.

Here a share of the variants is tried; `flax-attn faults` tries them all.
"""

import sys
from dataclasses import replace
from itertools import chain

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
    names = [known.name for known in _faults(row)]
    watched = []
    detections = detect.detect(_faults(row), watch=watched.append, explain=row in EXPLAINED)
    assert watched == names
    assert [detection.fault.name for detection in detections] == names
    for detection in detections:
        _assert_first_detected_as_expected(detection)
        _assert_passes_as_expected(detection)
        _assert_shown(detection, explained=row in EXPLAINED)


def _assert_first_detected_as_expected(detection):
    name = detection.fault.name
    assert detection.detected, name
    assert detection.check.name == detection.fault.check, name
    assert detection.check.worst != "the call itself", "a fault must not raise"


def _assert_passes_as_expected(detection):
    name = detection.fault.name
    if name in PASSES:
        passed = {tolerance for tolerance, passes in detection.fixed.items() if passes}
        assert passed == PASSES[name], name


def _assert_shown(detection, explained):
    # What is read at no line of the two sides must not be shown at one.
    read = explained and detection.fault.check in detect.READ
    said = f"{detection.fault.what}\n{detection.difference}"
    assert bool(detection.located) == read, said


def _faults(row):
    return [known for known in FAULTS if known.row == row]


def test_every_fault_is_a_row_of_its_own():
    assert len(FAULTS) >= 114
    # One fault that is there twice would count twice as detected.
    assert len({known.name for known in FAULTS}) == len(FAULTS)
    assert len({known.what for known in FAULTS}) == len(FAULTS)
    for known in FAULTS:
        assert known.name
        assert known.what.endswith(".")
        assert known.patches
        assert known.variant.name == known.row
    assert set(PASSES) <= {known.name for known in FAULTS}


def test_faults_are_patched_into_code_that_ships():
    patches = chain.from_iterable(known.patches for known in FAULTS)
    # A path in the module under test is no file.
    targets = {patch.target for patch in patches if not isinstance(patch.target, str)}
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
    state = {}
    for owner in _files_and_classes():
        state |= _identities(str(owner), vars(owner))
    for path, part in module.named_modules():
        state |= _identities(path, _own_attributes(part))
    return state


def _own_attributes(part):
    own = dict(vars(part))
    # PyTorch keeps these in dictionaries, whose identity stays when an entry changes.
    own |= dict(part.named_parameters(recurse=False))
    own |= dict(part.named_buffers(recurse=False))
    return own | dict(part.named_children())


def _files_and_classes():
    files = [file for name, file in sys.modules.items() if name.split(".")[0] == "torch_ref"]
    owners = {*files, Recipe, torch.optim, torch.nn.GELU}
    for file in files:
        owners |= {value for value in vars(file).values() if isinstance(value, type)}
    return owners


def _identities(owner, attributes):
    return {(owner, name): id(value) for name, value in attributes.items()}


def test_a_patch_that_cannot_be_applied_takes_out_those_before_it():
    module = torch_ref.RMSNorm(4)
    before = _state(module)
    # PyTorch refuses a number in the place of a parameter.
    _assert_second_patch_raises(module, Patch("", "scale", 2.0), TypeError)
    _assert_second_patch_raises(module, Patch("", "epsilon", 0.1), AttributeError)
    assert _state(module) == before


def _assert_second_patch_raises(module, wrong, error):
    right = Patch("", "eps", 0.1)
    raises = pytest.raises(error, match=r"scale|epsilon")
    with raises, patched(module, [right, wrong]):
        pass


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
    first = fault("one", "The output is doubled.", "rms_norm", patch)
    for result in detect.detect([first, replace(first, name="two")]):
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
