"""What was recorded where torch is judges the Flax side where it is not."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import nnx

import flax_attn
from flax_attn.cli import main
from flax_attn.parity import compare
from flax_attn.parity.adapters import recording
from flax_attn.parity.adapters.recording import ExportError, Recording
from flax_attn.proof.prove import pair_of, pair_with, prove
from flax_attn.proof.variants import select

ROW = "causal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    assert main(["parity", "--full", "--variant", ROW, "--export", str(path)]) == 0
    return path


@pytest.fixture
def file(folder, tmp_path):
    """Return a copy of the export that may be spoilt."""
    copy = tmp_path / f"{ROW}.safetensors"
    copy.write_bytes((folder / copy.name).read_bytes())
    return copy


def rewritten(file, **changes):
    """Change the header of an export, or with `arrays` what it holds."""
    with safetensors.safe_open(file, "np") as opened:
        metadata = opened.metadata()
    arrays = safetensors.numpy.load_file(file)
    for name, change in changes.pop("arrays", {}).items():
        arrays[name] = change(arrays[name])
    about = json.loads(metadata["about"]) | changes
    safetensors.numpy.save_file(arrays, file, {"about": json.dumps(about)})
    return file


def against(file):
    (variant,) = select([ROW])
    return prove(variant, full=True, pair=pair_with(variant, Recording(file)))


def errors_of(report):
    # As pairs, since the order is part of a report.
    return [(check.name, check.error) for check in report.checks]


def test_an_export_repeats_every_number(folder):
    (variant,) = select([ROW])
    live = prove(variant, full=True)
    repeated = against(folder / f"{ROW}.safetensors")
    assert repeated.passed
    assert errors_of(repeated) == errors_of(live)
    # The variant has no cache.
    assert [check.name for check in repeated.checks if not check.ran] == ["cache = full"]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("float64/outputs/output", "forward"),
        ("float64/gradients/W_value.weight", "gradients"),
        ("train/outputs/output", "dropout"),
        ("training/trained/loss", "training"),
    ],
)
def test_every_recorded_number_counts(file, name, check):
    report = against(rewritten(file, arrays={name: lambda array: array * (1 + 1e-9)}))
    assert [failed.name for failed in report.failed] == [check]


def test_a_check_that_was_not_exported_is_a_line_and_not_a_pass(folder):
    (variant,) = select([ROW])
    pair = pair_with(variant, Recording(folder / f"{ROW}.safetensors"))
    report = prove(variant, checks=["second"], pair=pair)
    assert not report.passed
    reason = report.check("second").skipped
    assert "holds no result of 'second': export again with this check" in reason


def test_a_comparison_of_two_modules_is_exported_and_repeated(tmp_path):
    ours = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    theirs = torch.nn.Linear(3, 2)
    live = compare(ours, theirs, [(4, 5, 3)], layout="torch", record=True)
    path = live.export(tmp_path / "a folder" / "of its own")
    assert path.name == "Linear.safetensors"

    found = recording.load(path.parent)["Linear"]
    # Drawn from another seed: the weights are those of the recording.
    other = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    repeated = compare(other, found, found.inputs, layout="torch")
    assert repeated.passed
    assert errors_of(repeated) == errors_of(live)


class FlaxTimes(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        return self.factor[...] * x


class TorchTimes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * x


def test_a_number_as_parameter_is_exported_and_repeated(tmp_path):
    options = {"layout": "torch_ref", "checks": ["forward", "gradients"]}
    live = compare(FlaxTimes(), TorchTimes(), [(4, 3)], record=True, **options)
    recording.save(live, tmp_path)
    found = recording.load(tmp_path)["FlaxTimes"]
    # Without axes, where a file of arrays may give it one.
    assert found.shapes == {"factor": ()}
    repeated = compare(FlaxTimes(), found, found.inputs, **options)
    assert live.passed
    assert repeated.passed


def test_the_command_line_compares_against_an_export(folder, capsys, monkeypatch):
    assert main(["parity", "--against", str(folder)]) == 0
    assert "1 of 1 variants equal their PyTorch twin" in capsys.readouterr().out
    attend = flax_attn.CausalAttention.attend

    def off(self, *arguments, **options):
        attended = attend(self, *arguments, **options)
        # Far above the rule in float64, and far below one ulp of float32.
        return replace(attended, output=attended.output * (1 + 1e-9))

    monkeypatch.setattr(flax_attn.CausalAttention, "attend", off)
    assert main(["parity", "--against", str(folder), "--check", "forward"]) == 1


def test_lower_dtypes_may_run_elsewhere(folder):
    import jax

    (variant,) = select([ROW])
    device = jax.devices("cpu")[0]
    pair = pair_with(variant, Recording(folder / f"{ROW}.safetensors"), device)
    assert prove(variant, checks=["float32"], pair=pair).passed
    assert pair.flax.device is device


def test_a_report_that_was_not_recorded_cannot_be_exported(tmp_path):
    (variant,) = select([ROW])
    report = prove(variant, checks=["forward"], pair=pair_of(variant))
    remedy = "causal was compared without recording: pass record=True"
    with pytest.raises(ExportError, match=remedy):
        report.export(tmp_path)


def spoilt_truncated(file):
    file.write_bytes(file.read_bytes()[:-100])


def spoilt_garbage(file):
    file.write_bytes(b"not a file of weights")


def spoilt_not_an_export(file):
    safetensors.numpy.save_file({"x": np.ones(3)}, file)


def spoilt_another_format(file):
    rewritten(file, format=recording.FORMAT + 1, version="9.9")


def spoilt_other_inputs(file):
    rewritten(file, arrays={"inputs/input 0": lambda array: array + 1})


SPOILT = [
    (spoilt_truncated, "causal.safetensors is damaged or cut off"),
    (spoilt_garbage, "causal.safetensors is damaged or cut off"),
    (spoilt_not_an_export, "holds arrays, but is no export of a comparison"),
    (
        spoilt_another_format,
        "an export of format 5, made by flax-attn 9.9; this version reads format 4. Export again",
    ),
    (spoilt_other_inputs, "was recorded with other inputs of 'outputs'"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT, ids=[spoil.__name__ for spoil, _ in SPOILT])
def test_an_export_that_cannot_be_used_is_refused(spoil, message, file, capsys):
    spoil(file)
    with pytest.raises(ExportError, match=message):
        against(file)
    assert main(["parity", "--against", str(file.parent)]) == 64
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_parameters_of_a_recording_cannot_be_changed(folder):
    recording = Recording(folder / f"{ROW}.safetensors")
    weights = {name: weight + 1 for name, weight in recording.weights().items()}
    # Its numbers are those of the recorded weights.
    match = "recorded with other parameters, which cannot be changed"
    with pytest.raises(ExportError, match=match):
        recording.load(weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--against", "nowhere"],
            "no export in nowhere: make one with `flax-attn parity --export nowhere`",
        ),
        (["--against", "{folder}", "--variant", "rms_norm"], "holds no rms_norm; it holds causal"),
        (
            ["--against", "{folder}", "--device", "quantum"],
            "no device of the platform 'quantum' here",
        ),
    ],
)
def test_bad_usage_of_an_export(folder, arguments, message, capsys):
    filled = [argument.format(folder=folder) for argument in arguments]
    assert main(["parity", *filled]) == 64
    assert message in capsys.readouterr().err
