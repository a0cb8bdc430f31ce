"""A folder of recordings: made where torch is, compared against where it is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import flax_attn
from flax_attn.parity.adapters.recording import ExportError, Recorder, Recording
from flax_attn.parity.report.report import Report, environment


def save(report: Report, folder: str | PathLike[str]) -> Path:
    """Write what the PyTorch side of a report answered to `folder/NAME.safetensors`.

    Raises:
        ExportError: if the report was not made with a recorder.
    """
    if report.pair is None or not isinstance(report.pair.torch, Recorder):
        raise ExportError(f"{report.name} was compared without recording: pass record=True")
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', report.name)}.safetensors"
    about = {
        "name": report.name,
        "seed": report.seed,
        "version": flax_attn.__version__,
        "environment": report.environment or environment(),
        "checks": [check.name for check in report.checks if check.ran],
    }
    report.pair.torch.save(path, report.pair.inputs, about)
    return path


def load(folder: str | PathLike[str], names: Sequence[str] | None = None) -> dict[str, Recording]:
    """Return the recordings in a folder by the name of what was compared; all, or those of these names.

    Raises:
        ExportError: if there are none, or one is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    if not files:
        raise ExportError(f"no export in {folder}: make one with `flax-attn parity --export {folder}`, where torch is")
    found = {recording.about["name"]: recording for recording in map(Recording, files)}
    missing = [name for name in names or () if name not in found]
    if missing:
        raise ExportError(f"{folder} holds no {', '.join(missing)}; it holds {', '.join(found)}")
    return {name: recording for name, recording in found.items() if names is None or name in names}
