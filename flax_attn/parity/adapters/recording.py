"""A PyTorch side on paper: recorded where torch is, replayed where it is not.

One safetensors file holds a comparison: weights, inputs, and the result to every spec that was asked, by the
spec's name. A spec that is asked again must be the same to the last bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from flax_attn.parity.adapters.adapter import Adapter, Arrays, PairingError, Result, RunSpec
from flax_attn.parity.pair import NotRun
from flax_attn.parity.training import TrainingSpec

FORMAT = 1  # of the file; another one is refused


class ExportError(PairingError):
    """An export that cannot be used: the message names the file."""


class Recorder:
    """A side that writes down what it results."""

    def __init__(self, side: Adapter):
        self.side, self.results, self.about = side, {}, {}
        self.framework, self.shapes = side.framework, side.shapes
        self.accepts, self.has_cache = side.accepts, side.has_cache

    def weights(self) -> Arrays:
        """Return those of the side."""
        return self.side.weights()

    def load(self, weights: Arrays) -> None:
        """Set those of the side."""
        self.side.load(weights)

    def run(self, spec: RunSpec) -> Result:
        """Ask the side, and keep the result or what it raised."""
        self.about[spec.name] = {"digest": digest(spec)}
        try:
            result = self.side.run(spec)
        except Exception as error:
            self.about[spec.name]["raised"] = f"{type(error).__name__}: {error}"
            raise
        self.about[spec.name]["dtypes"] = dict(result.dtypes)
        for kind in ("outputs", "gradients", "second"):
            self._keep(f"{spec.name}/{kind}", getattr(result, kind))
        return result

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train the side, and keep the result."""
        self.about[spec.name] = {"digest": digest(spec)}
        result = self.side.train(spec)
        self._keep(f"{spec.name}/trained", result)
        return result

    def _keep(self, prefix: str, arrays: Arrays) -> None:
        self.results |= {f"{prefix}/{name}": np.ascontiguousarray(array) for name, array in arrays.items()}

    def save(self, path: str | PathLike[str], inputs: Arrays, about: Mapping[str, Any]) -> None:
        """Write all that was answered, with the inputs and what else a reader needs to ask again."""
        arrays = self.results | {f"weights/{name}": array for name, array in self.weights().items()}
        arrays |= {f"inputs/{name}": array for name, array in inputs.items()}
        header = {**about, "format": FORMAT, "framework": self.framework, "accepts": sorted(self.accepts)}
        header |= {"has_cache": self.has_cache, "inputs": list(inputs), "results": self.about, "order": list(arrays)}
        safetensors.numpy.save_file(arrays, path, {"about": json.dumps(header)})


class Recording:
    """What a side answered once, as a `Adapter`.

    Args:
        path: of a file that a `Recorder` wrote.

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

    def weights(self) -> Arrays:
        """Return the recorded parameters."""
        return self._under("weights/")

    def load(self, weights: Arrays) -> None:
        """Refuse parameters other than those recorded."""
        recorded = self.weights()
        if any(not np.array_equal(recorded[name], weights[name]) for name in recorded):
            raise ExportError(f"{self.path} was recorded with other parameters, which cannot be changed")

    def run(self, spec: RunSpec) -> Result:
        """Return the recorded result."""
        about = self._about(spec)
        if "raised" in about:
            raise RuntimeError(about["raised"])
        kinds = {kind: self._under(f"{spec.name}/{kind}/") for kind in ("outputs", "gradients", "second")}
        return Result(**kinds, dtypes=about["dtypes"])

    def train(self, spec: TrainingSpec) -> Arrays:
        """Return the recorded result."""
        self._about(spec)
        return self._under(f"{spec.name}/trained/")

    def _about(self, asked: RunSpec | TrainingSpec) -> dict[str, Any]:
        about = self.about["results"].get(asked.name)
        if about is None:
            raise NotRun(f"{self.path} holds no result to {asked.name!r}: export again with this check")
        if about["digest"] != digest(asked):
            raise ExportError(
                f"{self.path} holds an result to another {asked.name!r} than is asked: it was exported by "
                f"flax-attn {self.about.get('version', 'of an unknown version')} with other inputs. Export again"
            )
        return about

    def _under(self, prefix: str) -> Arrays:
        return {name.removeprefix(prefix): a for name, a in self._arrays.items() if name.startswith(prefix)}


def digest(asked: RunSpec | TrainingSpec) -> str:
    """Return what tells one spec from another: a hash of everything in it."""
    found = hashlib.sha256()
    for part in _leaves("", asdict(asked)):
        found.update(part)
    return found.hexdigest()


def _leaves(name: str, value: Any):
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _leaves(f"{name}/{key}", value[key])
    elif isinstance(value, np.ndarray):
        yield f"{name}{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    else:
        yield f"{name}={value!r}".encode()


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    if not path.is_file():
        raise ExportError(f"no export at {path}")
    try:
        with safetensors.safe_open(path, "np") as file:
            about = json.loads((file.metadata() or {}).get("about", "null"))
            arrays = {name: file.get_tensor(name) for name in (about or {}).get("order", ())}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{path} is damaged or cut off: {error}") from error
    if about is None:
        raise ExportError(f"{path} holds arrays, but is no export of a comparison")
    if about["format"] != FORMAT:
        raise ExportError(
            f"{path} is an export of format {about['format']}, made by flax-attn {about.get('version')}; this version "
            f"reads format {FORMAT}. Export again"
        )
    return arrays, about
