"""The intermediate values of both sides of a pair, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import NotRun, Pair
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.hooks import ROOT, Activation, ActivationRecorder, Frame, Observer, numpy64, outputs
from flax_attn.parity.trace.jax_hooks import TracedModule
from flax_attn.parity.trace.pairing import pair_paths

Names = Mapping[str, str]
Lower = Mapping[str, Mapping[str, str]]

# How the axes of PyTorch's scores and weights, `b n t s` with n = k * g heads, may stand on the Flax side.
ORDERS = {4: ("b (k g) t s", "(k g) b t s"), 5: ("k b g t s", "b k g t s")}


@dataclass(frozen=True)
class Axes:
    """The order of the axes of scores or weights on the Flax side.

    Args:
        pattern: of `ORDERS`.
        heads: k in it.
    """

    pattern: str
    heads: int

    def to_torch(self, x: Any) -> Any:
        """Return an array of the Flax side with the axes of PyTorch, `(b, n, t, s)`."""
        return rearrange(x, f"{self.pattern} -> b (k g) t s", k=self.heads)

    def to_flax(self, x: Any) -> Any:
        """Return an array with the axes of PyTorch with those of the Flax side."""
        return rearrange(x, f"b (k g) t s -> {self.pattern}", k=self.heads)


@dataclass(frozen=True)
class Activations:
    """What both sides computed on the way, in float64 and eval mode.

    A node is a call of a submodule, or a step within one. Its name is the path on the PyTorch side, such as
    `"blocks.3.norm1"` or `"blocks.3.att/scores"`; the whole module is `"."`, a second call `"head#2"`. Nodes of one
    side alone start with `"flax:"` or `"torch:"`; nodes that the sides lay out differently are not here.

    Args:
        traced: the Flax side.
        ours: the nodes of the Flax side, in order of execution, those in `axes` with the axes of PyTorch.
        theirs: those of the PyTorch side.
        names: the shared name of each submodule of the Flax side, by its path there.
        axes: of steps whose axes stand in another order on the Flax side.
        unpaired: what cannot be compared, one line each.
        cotangents: of the PyTorch side, by name of the node at whose output they arrive.
        lower: for `"flax"` and `"torch"`, what each module computed below float64, and in which dtype.
    """

    traced: TracedModule
    ours: dict[str, Activation]
    theirs: dict[str, Activation]
    names: Names
    axes: Mapping[str, Axes]
    unpaired: tuple[str, ...]
    cotangents: Arrays
    lower: Mapping[str, Lower]

    @cached_property
    def flax(self) -> Arrays:
        """The outputs of all nodes of the Flax side, in order of execution."""
        return outputs(self.ours)

    @cached_property
    def torch(self) -> Arrays:
        """The outputs of all nodes of the PyTorch side, in order of execution."""
        return outputs(self.theirs)

    @cached_property
    def shared(self) -> list[str]:
        """The nodes of both sides, in PyTorch's order of execution."""
        return [name for name in self.theirs if name in self.ours]

    @cached_property
    def dtypes(self) -> dict[str, tuple[str, str]]:
        """The dtypes that Flax and PyTorch computed each shared node in."""
        return {name: (self.ours[name].dtype, self.theirs[name].dtype) for name in self.shared}

    @cached_property
    def attention(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The attention weights `(b, n, t, s)` of Flax and of PyTorch, where both have them."""
        names = [name for name in self.shared if _step(name) == "weights" and self.flax[name].ndim == 4]
        return {name: (self.flax[name], self.torch[name]) for name in names}


def record(pair: Pair) -> Activations:
    """Return what both sides compute on the way, each run once in float64 and eval mode.

    Raises:
        NotRun: if a side is the recording of an earlier run, which has no intermediate values.

    Example:
        >>> import jax, torch
        >>> from flax_attn.parity import compare
        >>> from flax_attn.parity.cpu import on_cpu
        >>> pair = compare(jax.nn.softmax, torch.nn.Softmax(-1).eval(), [(5, 3)], checks=["forward"]).pair
        >>> with on_cpu():
        ...     record(pair).shared
        ['./masked', './weights', '.']
    """
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter
    from flax_attn.parity.trace import torch_hooks

    if not isinstance(pair.flax, JaxAdapter) or not isinstance(pair.torch, TorchAdapter):
        raise NotRun(
            "the first difference is found by running both sides, and one of these is the recording of an earlier run. "
            "Compare where both frameworks are installed"
        )
    ours, theirs = jax_hooks.paths(pair.flax.built(), pair.flax.shapes), torch_hooks.paths(pair.torch.module)
    names = pair_paths(pair.entries, ours, theirs)
    there = {path: path for path in names.values()}
    torch = torch_hooks.record(pair.torch, pair.inputs, pair.extras, pair.cotangents, there)
    traced, flax = jax_hooks.trace(pair), ActivationRecorder("flax", names)
    _record_flax(traced, flax)
    here, there, axes, unpaired = _aligned(flax.activations, torch.activations)
    lower = {"flax": flax.lower, "torch": torch.lower}
    return Activations(traced, here, there, names, axes, unpaired, torch.cotangents, lower)


def _record_flax(traced: TracedModule, recorder: ActivationRecorder) -> None:
    def recorded(run: Any) -> Any:
        run(recorder)
        return {name: (found.inputs, found.output) for name, found in recorder.activations.items()}

    arrays = jax.tree.map(numpy64, traced.compiled(recorded)())
    for name, (inputs, output) in arrays.items():
        recorder.activations[name] = replace(recorder.activations[name], inputs=inputs, output=output)


class _Probe(Observer):
    """Adds zeros to the output of every node, to differentiate with respect to them."""

    def __init__(self, names: Names, zeros: Mapping[str, Any]):
        super().__init__("flax", names)
        self.zeros = zeros

    def left(self, frame: Frame, output: Any) -> Any:
        return self.stepped(frame.name, output)

    def stepped(self, name: str, value: Any) -> Any:
        return value + self.zeros[name] if name in self.zeros else value  # those alone that can be compared


def flax_cotangents(pair: Pair, found: Activations) -> Arrays:
    """Return the cotangents of the Flax side, by name of the node at whose output they arrive."""
    axes = found.axes
    zeros = {name: np.zeros(value.shape, found.ours[name].dtype) for name, value in found.flax.items()}
    zeros = {name: axes[name].to_flax(zero) if name in axes else zero for name, zero in zeros.items()}

    def gradient(run: Any, zeros: Mapping[str, Any], cotangents: Mapping[str, Any]) -> Any:
        def weighted(zeros: Mapping[str, Any]) -> Any:
            outputs = run(_Probe(found.names, zeros))
            return sum(jnp.sum(outputs[name] * c) for name, c in cotangents.items())

        return jax.grad(weighted)(zeros)

    arrays = found.traced.compiled(gradient)(zeros, {n: jnp.asarray(c) for n, c in pair.cotangents.items()})
    arrays = {name: numpy64(array) for name, array in arrays.items()}
    return {name: axes[name].to_torch(array) if name in axes else array for name, array in arrays.items()}


def _aligned(
    ours: dict[str, Activation], theirs: dict[str, Activation]
) -> tuple[dict[str, Activation], dict[str, Activation], dict[str, Axes], tuple[str, ...]]:
    """Return the nodes that can be compared, the axes of those that are turned, and a line for each of the others."""
    ours, theirs, axes = dict(ours), dict(theirs), {}
    for name in theirs:
        if name in ours and _step(name) in ("scores", "masked", "weights"):
            ours[name], theirs[name], turned = _aligned_scores(ours[name], theirs[name])
            axes |= {name: turned} if turned else {}
    other = [
        name
        for name in theirs
        if name != ROOT and name in ours and ours[name].output.shape != theirs[name].output.shape
    ]
    lines = [f"{name}: flax {ours[name].output.shape}, torch {theirs[name].output.shape}" for name in other]
    for framework, here, there in (("flax", ours, theirs), ("torch", theirs, ours)):
        alone = (name for name in here if name not in there)
        lines += [name if name.startswith(f"{framework}:") else f"{framework}:{name}" for name in alone]
    keep = [{name: x for name, x in nodes.items() if name not in other} for nodes in (ours, theirs)]
    return keep[0], keep[1], axes, tuple(lines)


def _aligned_scores(ours: Activation, theirs: Activation) -> tuple[Activation, Activation, Axes | None]:
    """Return both with the axes `b n t s`: of the orders that fit the shapes, the one with the smallest error."""
    fits = []
    for pattern in ORDERS.get(ours.output.ndim, ()):
        axes = Axes(pattern, 1 if "(k g)" in pattern else ours.output.shape[pattern.split().index("k")])
        flax, torch = axes.to_torch(ours.output), theirs.output
        if torch.ndim == 3 and torch.size == flax.size:  # torch.nn.MultiheadAttention folds batch and heads
            torch = rearrange(torch, "(b n) t s -> b n t s", b=flax.shape[0])
        if flax.shape == torch.shape:
            fits.append((tolerance.relative({"": flax}, {"": torch})[""], axes, flax, torch))
    if not fits:
        return ours, theirs, None
    _, axes, flax, torch = min(fits, key=lambda fit: fit[0])
    turned = None if axes.pattern == ORDERS[4][0] else axes
    return replace(ours, output=flax), replace(theirs, output=torch), turned


def _step(name: str) -> str:
    return name.partition("/")[2].split("#")[0]
