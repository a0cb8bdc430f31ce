"""Two adapters that hold the same weights, and the runs that the checks share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flax_attn.convert.entry import Entry
from flax_attn.convert.rules import Layout
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import (
    Adapter,
    AdapterError,
    Arrays,
    BothRaise,
    NotRun,
    Result,
    RunSpec,
    is_floating,
    returned,
)
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter
from flax_attn.parity.adapters.users_code import returning
from flax_attn.parity.training import Recipe, TrainingSpec

# What is computed once of the results of each side.
OF_TORCH = "plain", "cotangents", "reference", "null"
OF_FLAX = ("flax64",)
# Added to the seed of a pair, for each thing that is drawn from it.
COTANGENT, TARGET, TANGENT = 1, 2, 3
LOWER = ("float32", "bfloat16", "float16")


@dataclass
class Pair:
    """The two adapters of a comparison, with inputs.

    Args:
        flax: the adapter of JAX.
        torch: the adapter of PyTorch, or a recording of one.
        inputs: input arrays by name, in the order of the call.
        entries: pairs of parameters; empty where no weights are shared.
        seed: seed of everything that is drawn.
        recipe: recipe of the training check.
        extras: arguments of every call beside the inputs.
        redraw: whether all parameters are drawn, so that none keeps its initial 0 or 1.
        layout: layout that made the entries; one made by `convert.auto` prints as a table.
        notes: what was done to make both comparable, a sentence each.
        untested: what of the pairs is not certain, a sentence each.
    """

    flax: Adapter
    torch: Adapter
    inputs: Arrays
    entries: Sequence[Entry] = ()
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    redraw: bool = True
    layout: Layout | None = None
    notes: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._results: dict[tuple[str, str], Any] = {}
        # The two words of the dropout key that both calls get.
        self.key = np.random.default_rng(self.seed).integers(0, 2**32, 2)
        self.weights = self._drawn() if self.entries and self.redraw else self.torch.weights()
        if self.entries:
            self.torch.load(self.weights)
            self.flax.load(self.weights)

    def _drawn(self) -> Arrays:
        random = np.random.default_rng(self.seed)
        shared = {entry.theirs for entry in self.entries}
        weights = self.torch.weights()
        # Adapters of tests, and recordings, know no layers.
        summed = getattr(self.own_torch, "summed", {})
        for name, array in weights.items():
            # What a layout ignores is not shared and keeps its values.
            if name not in shared:
                continue
            width = array.shape[-1] if array.shape else 1
            drawn = _as_wide(array.shape, summed.get(name, width), random)
            is_statistic = name not in self.trainable
            # Those have to be positive.
            if is_statistic:
                size = np.abs(drawn)
                drawn = np.asarray(0.5 + size)
            weights[name] = drawn
        return weights

    @cached_property
    def trainable(self) -> set[str]:
        """The shared names of parameters; the other weights are running statistics."""
        return {entry.theirs for entry in self.entries if entry.trainable}

    @property
    def has_parameters(self) -> bool:
        """Whether either module has parameters."""
        return bool(self.torch.shapes or self.flax.shapes)

    @property
    def shares_weights(self) -> bool:
        """Whether it is known which parameter is which."""
        return bool(self.entries)

    @property
    def own_torch(self) -> Adapter | None:
        """The adapter that runs PyTorch itself; None where a recording is replayed."""
        if isinstance(self.torch, RecordingAdapter):
            return self.torch.adapter
        return None if isinstance(self.torch, Recording) else self.torch

    @property
    def halved(self) -> Arrays:
        """The inputs with floating ones halved, for a call beside the one that is compared."""
        return {name: x / 2 if is_floating(x) else x for name, x in self.inputs.items()}

    def shared(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return those of the shared parameters and of the inputs."""
        names = {*self.trainable, *self.inputs}
        return {name: array for name, array in arrays.items() if name in names}

    def takes(self, extra: str) -> bool:
        """Whether the calls of both take an extra."""
        return extra in self.flax.accepts and extra in self.torch.accepts

    def run(self, framework: str, spec: RunSpec) -> Result:
        """Return the result of `"flax"` or `"torch"`, run once for each name of a spec."""
        return self._once(framework, spec, "run")

    def forget(self, framework: str) -> None:
        """Forget the results of `"flax"` or `"torch"`, which is run in another way from here on."""
        kept = {key: result for key, result in self._results.items() if key[0] != framework}
        self._results = kept
        self._drop(OF_TORCH if framework == "torch" else OF_FLAX)

    def _once(self, framework: str, spec: RunSpec | TrainingSpec, method: str) -> Any:
        key = framework, spec.name
        if key not in self._results:
            self._results[key] = self._attempt(framework, spec, method)
        return returned(framework, self._results[key])

    def _attempt(self, framework: str, spec: RunSpec | TrainingSpec, method: str) -> Any:
        adapter = self.flax if framework == "flax" else self.torch
        try:
            # Its backward pass may end the process, too.
            with returning():
                return getattr(adapter, method)(spec)
        except NotRun:
            raise
        # Any error of a user's module is a result.
        except Exception as error:
            return error

    def both(self, spec: RunSpec) -> tuple[Result, Result]:
        """Return the results of Flax and of PyTorch.

        Raises:
            BothRaise: if both raise an error.
            AdapterError: if one does.
        """
        return self._both(spec, "run")

    def _both(self, spec: RunSpec | TrainingSpec, method: str) -> tuple[Any, Any]:
        try:
            ours = self._once("flax", spec, method)
        except AdapterError as error:
            # The other one runs all the same: where both raise, they agree.
            try:
                self._once("torch", spec, method)
            except AdapterError as other:
                raise BothRaise(f"both raise an error: {error}; {other}") from None
            raise
        return ours, self._once("torch", spec, method)

    def run_spec(self, name: str, **changes: Any) -> RunSpec:
        """Return a spec on the inputs of the pair; gradients need cotangents in `changes`."""
        return RunSpec(**{"name": name, "inputs": self.inputs, "extras": self.extras, **changes})

    @property
    def uncompiled(self) -> RunSpec:
        """Outputs alone in float64, in JAX without `jax.jit`."""
        return self.run_spec("outputs", eager=True)

    @property
    def as_users_compile(self) -> RunSpec:
        """Outputs alone in float64, in JAX by a plain `jax.jit`."""
        return self.run_spec("compiled", optimized=True)

    @cached_property
    def plain(self) -> Result:
        """The outputs of PyTorch in float64."""
        return self.run("torch", self.uncompiled)

    @cached_property
    def cotangents(self) -> Arrays:
        """A random cotangent for each floating output."""
        return self.cotangents_for(self.plain.outputs)

    def cotangents_for(self, outputs: Arrays) -> Arrays:
        """Return a random cotangent for each floating output."""
        random = np.random.default_rng(self.seed + COTANGENT)
        floating = {name: array for name, array in outputs.items() if is_floating(array)}
        if not floating:
            raise NotRun("no output is floating")
        # Under ones, as those of a sum, errors of both signs would cancel.
        return _normal(floating, random)

    @property
    def possible_cotangents(self) -> Arrays | None:
        """The cotangents; None where no output is floating, so that none has a gradient."""
        floating = any(is_floating(output) for output in self.plain.outputs.values())
        return self.cotangents if floating else None

    @property
    def float64(self) -> RunSpec:
        """Outputs in float64, and gradients where an output is floating."""
        return self.run_spec("float64", cotangents=self.possible_cotangents)

    @cached_property
    def reference(self) -> Result:
        """PyTorch in float64, with gradients."""
        return self.run("torch", self.float64)

    @cached_property
    def flax64(self) -> Result:
        """JAX in float64, compiled, with gradients."""
        return self.run("flax", self.float64)

    @cached_property
    def null(self) -> set[str]:
        """The parameters and inputs that do not change the outputs."""
        return tolerance.null_directions(self.reference.gradients)

    @property
    def second(self) -> RunSpec:
        """Derivatives of the gradients along `tangents`."""
        return self.run_spec("second", cotangents=self.cotangents, tangents=self.tangents)

    @property
    def lower(self) -> dict[str, RunSpec]:
        """Outputs and gradients in a lower dtype."""
        return {name: self.run_spec(name, dtype=name, cotangents=self.cotangents) for name in LOWER}

    def training(self) -> RunSpec:
        """Train mode under the pair's dropout key."""
        extras = {**self.extras, "dropout_key": self.key}
        return self.run_spec("train", mode="train", cotangents=self.cotangents, extras=extras)

    @cached_property
    def tangents(self) -> Arrays:
        """A random direction for every shared parameter and floating input."""
        random = np.random.default_rng(self.seed + TANGENT)
        leaves = {name: array for name, array in self.weights.items() if name in self.trainable}
        leaves |= {name: array for name, array in self.inputs.items() if is_floating(array)}
        return _normal(leaves, random)

    def training_spec(self) -> TrainingSpec:
        """Return the training run: fit each floating output to a random target."""
        random = np.random.default_rng(self.seed + TARGET)
        keys = random.integers(0, 2**32, (self.recipe.steps, 2))
        targets = {}
        for name, drawn in _normal(self.cotangents, random).items():
            finite = np.isfinite(self.plain.outputs[name])
            # One element that is not, such as a hidden score, would make the whole loss so.
            targets[name] = np.where(finite, drawn, np.nan)
        return TrainingSpec(
            name="training",
            recipe=self.recipe,
            inputs=self.inputs,
            extras=self.extras,
            targets=targets,
            keys=keys,
            mode="train" if self.takes("dropout_key") else "eval",
        )

    @property
    def trained(self) -> tuple[Arrays, Arrays]:
        """Final parameters and losses of Flax and of PyTorch."""
        return self._both(self.training_spec(), "train")

    def with_torch(self, torch: Adapter) -> Pair:
        """Return a pair with another PyTorch adapter, such as a faulty one, and the JAX results."""
        # What was computed in PyTorch goes, and what follows from it.
        other = self._without(OF_TORCH)
        other.torch = torch
        other._results = {key: self._results[key] for key in self._results if key[0] == "flax"}
        return other

    def with_flax(self, flax: Adapter) -> Pair:
        """Return a pair with another JAX adapter, such as an edited one, and PyTorch results."""
        other = self._without(OF_FLAX)
        other.flax = flax
        other._results = {key: self._results[key] for key in self._results if key[0] == "torch"}
        return other

    def with_inputs(self, inputs: Arrays, extras: Mapping[str, np.ndarray]) -> Pair:
        """Return a pair of the same modules with the same weights, on other inputs."""
        other = self._without((*OF_TORCH, *OF_FLAX, "tangents"))
        other.inputs, other.extras, other._results = inputs, extras, {}
        return other

    def _without(self, cached: Sequence[str]) -> Pair:
        other = copy.copy(self)
        other._drop(cached)
        return other

    def _drop(self, cached: Sequence[str]) -> None:
        for name in cached:
            vars(self).pop(name, None)


def _as_wide(shape: tuple[int, ...], width: int, random: np.random.Generator) -> np.ndarray:
    """Return weights that keep the output of a layer as large as its input of a width."""
    return np.asarray(random.normal(size=shape) / width**0.5)


def _normal(arrays: Arrays, random: np.random.Generator) -> Arrays:
    return {name: random.normal(size=array.shape) for name, array in arrays.items()}
