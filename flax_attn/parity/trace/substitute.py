"""The error of each node by itself: the Flax side run again on what PyTorch computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.activations import Taps
from flax_attn.parity.trace.hooks import ROOT, Frame, Listener, Record, floats, numpy64, path_of, substitute


@dataclass(frozen=True)
class Target:
    """One thing that a node computes: its output, or what it hands to a submodule.

    Args:
        label: `"output"`, or `"input of W_query"`.
        flax: what Flax makes of the reference.
        torch: what PyTorch has.
        without: the source that this one is made for, and so not of.
    """

    label: str
    flax: np.ndarray
    torch: np.ndarray
    without: str = ""

    @property
    def error(self) -> float:
        """The relative error of Flax."""
        return relative(self.flax, self.torch)


@dataclass
class Evidence:
    """All that is known of a node when it is run by itself.

    Args:
        name: of the node.
        kind: `"module"` or `"step"`.
        targets: what it computes.
        sources: what it computes that from, as PyTorch has it: `"input"`, outputs of submodules, steps before.
        fed: whether it was given what PyTorch's was given.
    """

    name: str
    kind: str
    targets: list[Target] = field(default_factory=list)
    sources: Arrays = field(default_factory=dict)
    fed: bool = True

    @property
    def own(self) -> float:
        """The largest error of what it computes; NaN if that would be no error of its own."""
        return max((target.error for target in self.targets), default=np.nan) if self.fed else np.nan


def relative(flax: np.ndarray, torch: np.ndarray) -> float:
    """Return the relative error of one array."""
    return tolerance.relative({"": flax}, {"": torch})[""]


def resynchronise(pair: Pair, taps: Taps) -> dict[str, Evidence]:
    """Return the evidence on every shared node.

    Every submodule of the Flax side is handed what PyTorch's was handed, and what it returns is compared and then
    exchanged for what PyTorch's returned. What is left is the error of each node alone; that of a container is in
    what it does between its submodules: in their inputs, before those are exchanged, or in its output.
    """
    listener = _Resync(taps)
    with jax.numpy_dtype_promotion("standard"):  # the reference is float64 where a module may have a lower dtype
        jax_hooks.run(pair, listener)
    return listener.evidence


class _Resync(Listener):
    def __init__(self, taps: Taps):
        super().__init__("flax", taps.names)
        self.reference = {name: taps.theirs[name] for name in taps.shared}
        self.evidence: dict[str, Evidence] = {}

    def entered(self, frame: Frame, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        record = self.reference.get(frame.name)
        if record is None:
            return args, kwargs
        found = self.evidence[frame.name] = Evidence(frame.name, "module")
        found.sources |= {_numbered("input", i): x for i, x in enumerate(record.inputs)}
        pairs = list(zip(floats((args, kwargs)), record.inputs, strict=False))
        found.fed = bool(frame.inputs) == bool(record.inputs) and all(x.shape == r.shape for x, r in pairs)
        if not found.fed:
            return args, kwargs
        if frame.name != ROOT:
            self._handed_over(frame.name, pairs)
        return substitute((args, kwargs), {id(x): jnp.asarray(r) for x, r in pairs})

    def _handed_over(self, name: str, pairs: list[tuple[Any, np.ndarray]]) -> None:
        parent, child = self.evidence.get(self.enclosing.name), _within(name, self.enclosing.name)
        if parent is not None:
            parent.targets += [
                Target(f"{_numbered('input', i)} of {child}", numpy64(x), r, child) for i, (x, r) in enumerate(pairs)
            ]

    def left(self, frame: Frame, output: Any) -> Any:
        record = self.reference.get(frame.name)
        if record is None:
            return output
        self.evidence[frame.name].targets.append(Target("output", numpy64(output), record.output))
        if frame.name != ROOT:
            self._known(frame.name, record)
        return jnp.asarray(record.output)

    def stepped(self, name: str, value: Any) -> Any:
        record = self.reference.get(name)
        if record is None:
            return value
        sources = self.evidence[self.enclosing.name].sources if self.enclosing.name in self.evidence else {}
        self.evidence[name] = Evidence(name, "step", [Target("output", numpy64(value), record.output)], dict(sources))
        self._known(name, record)
        return jnp.asarray(record.output)

    def _known(self, name: str, record: Record) -> None:
        if self.enclosing.name in self.evidence:
            self.evidence[self.enclosing.name].sources[_within(name, self.enclosing.name)] = record.output


def _within(name: str, parent: str) -> str:
    return name.removeprefix(parent).removeprefix(path_of(parent)).lstrip("./")


def _numbered(word: str, i: int) -> str:
    return word if i == 0 else f"{word} {i + 1}"
