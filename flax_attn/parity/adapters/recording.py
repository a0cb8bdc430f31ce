"""The PyTorch results of a comparison in a file, recorded with torch and replayed without.

One safetensors file holds a comparison: weights, inputs, and the result of every run spec by its
name. A spec that is replayed must equal the recorded one to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy

from flax_attn.convert.entry import Entry
from flax_attn.convert.replacing import replacing
from flax_attn.convert.rules import Layout, Rule
from flax_attn.parity.adapters.adapter import (
    Adapter,
    Arrays,
    Float32,
    PairingError,
    Result,
    RunSpec,
    Untested,
    error_text,
)

if TYPE_CHECKING:
    from flax_attn.parity.report.report import Report
    from flax_attn.parity.training import TrainingSpec

# The format of the file; another one is refused.
FORMAT = 4
_KINDS = ("outputs", "gradients", "second")
# What reading a file that was cut or changed may raise.
_DAMAGED = (safetensors.SafetensorError, OSError, ValueError)


class ExportError(PairingError):
    """An export that cannot be used: the message names the file."""


class RecordingAdapter:
    """An `Adapter` that keeps every result of another one, to be written to a file."""

    def __init__(self, adapter: Adapter):
        self.adapter, self.results, self.about = adapter, {}, {}
        self.framework, self.shapes = adapter.framework, adapter.shapes
        self.accepts, self.has_cache = adapter.accepts, adapter.has_cache
        # Rows and `padding_idx` of the table that each input of ids indexes.
        self.tables: dict[str, tuple[int, int | None]] = {}

    def weights(self) -> Arrays:
        """Return the parameters of the adapter."""
        return self.adapter.weights()

    def load(self, weights: Arrays) -> None:
        """Set the parameters of the adapter."""
        self.adapter.load(weights)

    def run(self, spec: RunSpec) -> Result:
        """Run the adapter, and keep the result or the error."""
        about = self._begin(spec)
        try:
            result = self.adapter.run(spec)
        except Exception as error:
            about["raised"] = error_text(error)
            raise
        about["dtypes"] = dict(result.dtypes)
        for kind in _KINDS:
            self._keep(f"{spec.name}/{kind}", getattr(result, kind))
        return result

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train the adapter, and keep the result."""
        self._begin(spec)
        result = self.adapter.train(spec)
        self._keep(f"{spec.name}/trained", result)
        return result

    def _begin(self, spec: RunSpec | TrainingSpec) -> dict[str, Any]:
        """Return what is kept about a run beside its arrays: so far, what it was given."""
        about = self.about[spec.name] = {"digest": digest(spec)}
        return about

    def _keep(self, prefix: str, arrays: Arrays) -> None:
        for name, array in _prefixed(f"{prefix}/", arrays).items():
            self.results[name] = np.asarray(array, order="C")

    def save(self, path: str | PathLike[str], inputs: Arrays, about: Mapping[str, Any]) -> None:
        """Write all results, with the inputs and a header."""
        arrays = self.results | _prefixed("weights/", self.weights()) | _prefixed("inputs/", inputs)
        header = {
            **about,
            "format": FORMAT,
            "framework": self.framework,
            "accepts": sorted(self.accepts),
            "has_cache": self.has_cache,
            "tables": self.tables,
            "inputs": list(inputs),
            "results": self.about,
            "order": list(arrays),
        }
        try:
            with replacing(path) as whole:
                safetensors.numpy.save_file(arrays, whole, {"about": json.dumps(header)})
        except safetensors.SafetensorError as error:
            # This is what it makes of a full disk.
            raise ExportError(f"cannot write {path}: {error}. Pass a folder with space") from error


def _prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}{name}": array for name, array in arrays.items()}


class Recording:
    """The recorded results of an adapter, as an `Adapter`.

    Args:
        path: path of a file that `save` wrote.

    Raises:
        ExportError: if the file is damaged, no export, or of another format.
    """

    def __init__(self, path: str | PathLike[str]):
        self.path = Path(path)
        self._arrays, self.about = _read(self.path)
        self.framework: str = self.about["framework"]
        self.inputs = {name: self._arrays[f"inputs/{name}"] for name in self.about["inputs"]}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters."""
        return {name: array.shape for name, array in self.weights().items()}

    @property
    def accepts(self) -> frozenset[str]:
        """The extras that the call took."""
        return frozenset(self.about["accepts"])

    @property
    def has_cache(self) -> bool:
        """Whether there was a call that computed in steps."""
        return self.about["has_cache"]

    @property
    def layout(self) -> Layout | None:
        """The layout that was used, with full names of parameters; None if there was none."""
        rules = [_rule(fields) for fields in self.about["rules"]]
        # A rule applies under any prefix, so the longer of two names that end alike comes first.
        rules.sort(key=lambda rule: -rule.ours[0].count("."))
        return Layout(tuple(rules)) if rules else None

    @property
    def float32(self) -> Float32:
        """How the runs of JAX in float64 read float32."""
        return Float32[self.about["float32"]]

    def weights(self) -> Arrays:
        """Return the recorded parameters."""
        return self._under("weights/")

    def load(self, weights: Arrays) -> None:
        """Refuse parameters other than those recorded."""
        recorded = self.weights()
        if any(not np.array_equal(recorded[name], weights[name]) for name in recorded):
            raise ExportError(
                f"{self.path} was recorded with other parameters, which cannot be changed"
            )

    def run(self, spec: RunSpec) -> Result:
        """Return the recorded result."""
        about = self._about(spec)
        if "raised" in about:
            raise RuntimeError(about["raised"])
        kinds = {kind: self._under(f"{spec.name}/{kind}/") for kind in _KINDS}
        return Result(**kinds, dtypes=about["dtypes"])

    def train(self, spec: TrainingSpec) -> Arrays:
        """Return the recorded result."""
        self._about(spec)
        return self._under(f"{spec.name}/trained/")

    def _about(self, spec: RunSpec | TrainingSpec) -> dict[str, Any]:
        about = self.about["results"].get(spec.name)
        if about is None:
            raise Untested(
                f"{self.path} holds no result of {spec.name!r}: export again with this check"
            )
        if about["digest"] != digest(spec):
            raise ExportError(
                f"{self.path} was recorded with other inputs of {spec.name!r}, by flax-attn "
                f"{self.about.get('version', 'of an unknown version')}. Export again"
            )
        return about

    def _under(self, prefix: str) -> Arrays:
        names = [name for name in self._arrays if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._arrays[name] for name in names}


def save(report: Report, folder: str | PathLike[str]) -> Path:
    """Write the PyTorch results of a report to `folder/NAME.safetensors`.

    Raises:
        ExportError: if the report was made without `record=True`.
    """
    if report.pair is None or not isinstance(report.pair.torch, RecordingAdapter):
        raise ExportError(f"{report.name} was compared without recording: pass record=True")
    flax: Any = report.pair.flax
    path = Path(folder) / f"{file_name(report.name)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "name": report.name,
        "seed": report.seed,
        "version": report.environment.get("flax-attn", "of an unknown version"),
        "environment": report.environment,
        "checks": [check.name for check in report.checks if check.ran],
        "rules": list(_rules(report.pair.entries)),
        "float32": flax.float32.name,
    }
    report.pair.torch.save(path, report.pair.inputs, about)
    return path


def load(folder: str | PathLike[str], names: Sequence[str] | None = None) -> dict[str, Recording]:
    """Return the recordings in a folder by name of the comparison: all, or those in `names`.

    Raises:
        ExportError: if there are none, or one is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    recordings = [Recording(file) for file in files]
    found = {recording.about["name"]: recording for recording in recordings}
    if not found:
        raise ExportError(
            f"no export in {folder}: make one with `flax-attn parity --export {folder}`, where"
            " torch is"
        )
    if names is None:
        return found
    missing = [name for name in names if name not in found]
    if missing:
        raise ExportError(f"{folder} holds no {', '.join(missing)}; it holds {', '.join(found)}")
    return {name: recording for name, recording in found.items() if name in names}


def file_name(name: str) -> str:
    """Return the name of a comparison without what file systems do not take."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)


def digest(spec: RunSpec | TrainingSpec) -> str:
    """Return a hash of everything in a spec."""
    found = hashlib.sha256()
    for part in _leaves("", asdict(spec)):
        found.update(part)
    return found.hexdigest()


def _leaves(name: str, value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        # In order of names: how a mapping was built must not change the digest.
        for key in sorted(value):
            yield from _leaves(f"{name}/{key}", value[key])
    elif isinstance(value, np.ndarray):
        yield f"{name}{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    else:
        yield f"{name}={value!r}".encode()


def _rules(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Yield the rule of each entry as data; of the pieces of one, its own once."""
    whole = [entry.whole or entry for entry in entries]
    once = {entry.ours: entry for entry in whole}
    for entry in once.values():
        yield asdict(entry.named_rule)


def _rule(fields: Mapping[str, Any]) -> Rule:
    """Return a rule from its fields, as `_rules` yields them; JSON has made lists of tuples."""
    values: dict[str, Any] = dict(fields)
    for name in ("ours", "names", "shares", "flipped"):
        values[name] = tuple(fields[name])
    values["sizes"] = tuple(map(tuple, fields["sizes"]))
    return Rule(**values)


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    if not path.is_file():
        raise ExportError(f"no export at {path}")
    try:
        arrays, about = _content(path)
    except _DAMAGED as error:
        raise ExportError(f"{path} is damaged or cut off: {error}") from error
    if about is None:
        raise ExportError(f"{path} holds arrays, but is no export of a comparison")
    if about["format"] != FORMAT:
        raise ExportError(
            f"{path} is an export of format {about['format']}, made by flax-attn"
            f" {about.get('version')}; this version reads format {FORMAT}. Export again"
        )
    return arrays, about


def _content(path: Path) -> tuple[Arrays, Any]:
    """Return the arrays of an export and its header; None where there is no header."""
    with safetensors.safe_open(path, "np") as file:
        # Another file of safetensors may have no metadata.
        metadata = file.metadata() or {}
        about = json.loads(metadata.get("about", "null"))
        names = about.get("order", ()) if about else ()
        return {name: file.get_tensor(name) for name in names}, about
