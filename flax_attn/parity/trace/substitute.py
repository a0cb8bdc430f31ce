"""The error of each node by itself: the Flax side is run again on what PyTorch computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.trace.activations import Activations
from flax_attn.parity.trace.hooks import ROOT, Activation, Frame, Observer, numpy64, path_of


@dataclass
class Target:
    """One thing that a node computes: its output, or what it passes to a submodule.

    Args:
        label: `"output"`, or `"input of W_query"`.
        flax: value that Flax computes from the values of PyTorch.
        torch: value that PyTorch computed.
        without: the submodule that it is passed to, whose output is therefore no source of it.
        rounding: error allowed because Flax takes the sources in a lower dtype only.
    """

    label: str
    flax: Any
    torch: np.ndarray
    without: str = ""
    rounding: float = 0.0

    @property
    def error(self) -> float:
        """The relative error of Flax."""
        return relative(self.flax, self.torch)


@dataclass
class Evidence:
    """All that is known of a node when it is run by itself.

    Args:
        name: name of the node.
        kind: `"module"` or `"step"`.
        targets: values that it computes.
        sources: PyTorch's values that it computes the targets from: `"input"`, outputs of
            submodules, earlier steps.
        same_inputs: whether it could be given the inputs of PyTorch's node.
        alone: inputs of submodules that PyTorch alone calls, or calls with other shapes; their
            outputs are sources.
    """

    name: str
    kind: str
    targets: list[Target] = field(default_factory=list)
    sources: Arrays = field(default_factory=dict)
    same_inputs: bool = True
    alone: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest error of what it computes; NaN if differing inputs may have caused it."""
        errors = [target.error for target in self.targets if not target.error <= target.rounding]
        judged = self.same_inputs and (
            errors or not any(target.rounding for target in self.targets)
        )
        return max(errors, default=0.0 if self.targets else np.nan) if judged else np.nan


def relative(flax: np.ndarray, torch: np.ndarray) -> float:
    """Return the relative error of one array."""
    return tolerance.relative({"": flax}, {"": torch})[""]


def rerun(found: Activations, outputs: Arrays) -> dict[str, Evidence]:
    """Return the evidence on every shared node; `outputs` of PyTorch judge the whole module.

    Every submodule of the Flax side is given what PyTorch's was given, and its output is compared
    and then replaced by PyTorch's. What remains is the error of each node alone. A container's own
    error is in what it does between its submodules: in their inputs, before those are replaced, or
    in its output.
    """
    observer = _Substitution(found)

    def computed(run: Any, reference: Any) -> list[Any]:
        observer.reference = reference
        observer.returned(run(observer), outputs)
        return [target.flax for target in observer.targets()]

    arrays = {
        name: (_inputs_for_flax(found, name), _for_flax(found, name)) for name in found.shared
    }
    values = found.traced.compiled(computed)(arrays)
    for target, value in zip(observer.targets(), values, strict=True):
        target.flax = numpy64(value)
    return observer.evidence


def _for_flax(found: Activations, name: str) -> np.ndarray:
    value = found.torch[name]
    return np.ascontiguousarray(found.axes[name].to_flax(value)) if name in found.axes else value


def _inputs_for_flax(found: Activations, name: str) -> tuple[np.ndarray, ...]:
    inputs = found.theirs[name].inputs
    axes = (*found.inputs.get(name, ()), *(None for _ in inputs))
    return tuple(
        np.ascontiguousarray(a.to_flax(x)) if a else x for x, a in zip(inputs, axes, strict=False)
    )


class _Substitution(Observer):
    """Compares and replaces.

    Attributes:
        reference: inputs and output of each shared node, as arrays of JAX in the layout of the Flax
            side.
    """

    def __init__(self, found: Activations):
        super().__init__("flax", found.names)
        self.found = found
        self.reference: Mapping[str, tuple[tuple[Any, ...], Any]] = {}
        self.evidence: dict[str, Evidence] = {}
        self.roundings: dict[str, float] = {}

    def targets(self) -> list[Target]:
        return [target for evidence in self.evidence.values() for target in evidence.targets]

    def entered(self, frame: Frame) -> tuple[Any, ...]:
        if frame.name not in self.reference:
            return frame.inputs
        theirs, given = self.found.theirs[frame.name].inputs, self.reference[frame.name][0]
        evidence = self.evidence[frame.name] = Evidence(frame.name, "module")
        for child, call in self._alone(frame.name):
            evidence.alone[child], evidence.sources[child] = call.inputs, call.output
        evidence.sources |= {_numbered("input", i): x for i, x in enumerate(theirs)}
        pairs = list(zip(frame.inputs, given, strict=False))
        evidence.same_inputs = bool(frame.inputs) == bool(given) and all(
            x.shape == r.shape for x, r in pairs
        )
        if not evidence.same_inputs:
            return frame.inputs
        if frame.name != ROOT:
            axes = (*self.found.inputs.get(frame.name, ()), *(None for _ in theirs))
            ours = [a.to_torch(x) if a else x for x, a in zip(frame.inputs, axes, strict=False)]
            self._passed_on(frame.name, ours, theirs)
        for (x, _), value in zip(pairs, theirs, strict=False):
            self._lost(frame.name, value, x.dtype)
        new = [reference.astype(x.dtype) for x, reference in pairs]
        return (*new, *frame.inputs[len(new) :])

    def _alone(self, name: str) -> Iterator[tuple[str, Activation]]:
        """Yield the submodules of a node that PyTorch alone calls, or calls with other shapes."""
        for path, call in self.found.theirs.items():
            if path not in self.reference and "#" not in path and call.kind == "module":
                inner = path.removeprefix("torch:")
                if self._around(inner) == name:
                    yield _within(inner, name), call

    def _around(self, path: str) -> str:
        """Return the innermost module around a submodule that both sides have."""
        while (path := path.rpartition(".")[0]) and path not in self.reference:
            pass
        return path or ROOT

    def _passed_on(self, name: str, ours: Sequence[Any], theirs: tuple[np.ndarray, ...]) -> None:
        parent, child = self.evidence.get(self.enclosing.name), _within(name, self.enclosing.name)
        if parent is not None:
            pairs = enumerate(zip(ours, theirs, strict=False))
            parent.targets += [
                self._target(f"{_numbered('input', i)} of {child}", x, r, child)
                for i, (x, r) in pairs
            ]

    def left(self, frame: Frame, output: Any) -> Any:
        if frame.name not in self.reference:
            return output
        ours = self._as_torch(frame.name, output)
        target = self._target_of(frame.name, "output", ours, self.found.torch[frame.name])
        self.evidence[frame.name].targets.append(target)
        return self._replaced(frame.name, output, known=frame.name != ROOT)

    def returned(self, ours: Mapping[str, Any], theirs: Arrays) -> None:
        """Compare what the whole module returns beside its first output."""
        floating = [name for name, x in ours.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        self.evidence[ROOT].targets += [
            self._target_of(ROOT, f"output {name!r}", ours[name], theirs[name])
            for name in floating[1:]
            if name in theirs and ours[name].shape == theirs[name].shape
        ]

    def stepped(self, name: str, value: Any) -> Any:
        if name not in self.reference:
            return value
        parent = self.evidence.get(self.enclosing.name)
        sources = self._earlier_steps(name) | (parent.sources if parent else {})
        target = self._target("output", self._as_torch(name, value), self.found.torch[name])
        self.evidence[name] = Evidence(name, "step", [target], sources)
        return self._replaced(name, value, known=True)

    def _as_torch(self, name: str, value: Any) -> Any:
        axes = self.found.axes.get(name)
        return axes.to_torch(value) if axes else value

    def _earlier_steps(self, name: str) -> Arrays:
        """Return PyTorch's steps before this one in the same call, including those that Flax lacks.

        A step that was taken several times counts with its last value: of two attentions in one
        call each has its own query.
        """
        steps = itertools.takewhile(lambda step: step != name, self.found.theirs)
        prefix = f"{self.enclosing.name}/"
        return {
            s.removeprefix(prefix).split("#")[0]: self.found.theirs[s].output
            for s in steps
            if s.startswith(prefix)
        }

    def _target(self, label: str, flax: Any, torch: np.ndarray, without: str = "") -> Target:
        return self._target_of(self.enclosing.name, label, flax, torch, without)

    def _target_of(
        self, node: str, label: str, flax: Any, torch: np.ndarray, without: str = ""
    ) -> Target:
        return Target(label, flax, torch, without, self.roundings.get(node, 0.0))

    def _replaced(self, name: str, value: Any, known: bool) -> Any:
        if not self.frames:
            return value
        if known and self.enclosing.name in self.evidence:
            sources = self.evidence[self.enclosing.name].sources
            sources[_within(name, self.enclosing.name)] = self.found.torch[name]
        self._lost(self.enclosing.name, self.found.torch[name], value.dtype)
        reference = jnp.asarray(self.reference[name][1])
        return reference.astype(value.dtype) if reference.shape == value.shape else value

    def _lost(self, node: str, array: np.ndarray, dtype: Any) -> None:
        """Note how far off a node may be if its dtype cannot hold the value from PyTorch."""
        if _loses(array, dtype):
            self.roundings[node] = max(
                self.roundings.get(node, 0.0), tolerance.REORDERED * float(jnp.finfo(dtype).eps)
            )


def _loses(array: np.ndarray, dtype: Any) -> bool:
    with np.errstate(over="ignore"):
        return not np.array_equal(array.astype(dtype).astype(np.float64), array, equal_nan=True)


def _within(name: str, parent: str) -> str:
    return name.removeprefix(parent).removeprefix(path_of(parent)).lstrip("./")


def _numbered(word: str, i: int) -> str:
    return word if i == 0 else f"{word} {i + 1}"
