"""The intermediate values of both sides of a pair, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.parity.adapters.adapter import Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.pair import NotRun, Pair
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.alignment import Axes, Shape, aligned, step_of
from flax_attn.parity.trace.hooks import (
    TABLE,
    Activation,
    ActivationRecorder,
    Frame,
    Observer,
    numpy64,
    outputs,
)
from flax_attn.parity.trace.jax_hooks import TracedModule
from flax_attn.parity.trace.pairing import pair_paths
from flax_attn.parity.trace.tables import tables_of_torch

Names = Mapping[str, str]
Lower = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Activations:
    """What both sides computed on the way, in float64 and eval mode.

    A node is a call of a submodule, or a step within one. Its name is the path on the PyTorch side,
    such as `"blocks.3.norm1"` or `"blocks.3.att/scores"`; the whole module is `"."`, a second call
    `"head#2"`. Nodes of one side alone start with `"flax:"` or `"torch:"`; nodes that the sides lay
    out differently are not here.

    Args:
        traced: the Flax side.
        ours: the nodes of the Flax side, in order of execution, those in `axes` with the axes of
            PyTorch.
        theirs: the nodes of the PyTorch side, including those that cannot be compared.
        names: the shared name of each submodule of the Flax side, by its path there.
        axes: axes of the outputs that have another order of axes on the Flax side.
        inputs: axes of the inputs of modules; None for inputs in the same order.
        differing: the shapes of both sides, where these cannot be compared.
        unpaired: what cannot be compared, one line each.
        ambiguous: scores whose axes can be read in two ways, neither of which agrees.
        cotangents: cotangents of the outputs of PyTorch's nodes, by name of the node.
        lower: for `"flax"` and `"torch"`, what each module computed below float64, and in which
            dtype.
    """

    traced: TracedModule
    ours: dict[str, Activation]
    theirs: dict[str, Activation]
    names: Names
    axes: Mapping[str, Axes]
    inputs: Mapping[str, tuple[Axes | None, ...]]
    differing: Mapping[str, tuple[Shape, Shape]]
    unpaired: tuple[str, ...]
    ambiguous: tuple[str, ...]
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
        names = [
            name for name in self.shared if step_of(name) == "weights" and self.flax[name].ndim == 4
        ]
        return {name: (self.flax[name], self.torch[name]) for name in names}


def record(pair: Pair) -> Activations:
    """Return what both sides compute on the way, each run once in float64 and eval mode.

    Raises:
        NotRun: if a side is the recording of an earlier run, which has no intermediate values.

    Example:
        >>> import jax, torch
        >>> from flax_attn.parity import compare
        >>> from flax_attn.parity.cpu import on_cpu
        >>> softmax = torch.nn.Softmax(-1).eval()
        >>> pair = compare(jax.nn.softmax, softmax, [(5, 3)], checks=["forward"]).pair
        >>> with on_cpu():
        ...     record(pair).shared
        ['./masked', './weights', '.']
    """
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter
    from flax_attn.parity.trace import torch_hooks

    if not isinstance(pair.flax, JaxAdapter) or not isinstance(pair.torch, TorchAdapter):
        raise NotRun(
            "the first difference is found by running both sides, and one of these is the recording"
            " of an earlier run. Compare where both frameworks are installed"
        )
    ours, theirs = (
        jax_hooks.paths(pair.flax.built(), pair.flax.shapes),
        torch_hooks.paths(pair.torch.module),
    )
    names = pair_paths(pair.entries, ours, theirs)
    there = {path: path for path in names.values()}
    torch = torch_hooks.record(pair.torch, pair.inputs, pair.extras, pair.cotangents, there)
    traced, flax = jax_hooks.trace(pair), ActivationRecorder("flax", names)
    _record_flax(traced, flax)
    found = aligned(flax.activations, torch.activations)
    for path in tables_of_torch(pair, torch_hooks.tensors(pair.torch.module), names.values()):
        torch.lower[path][TABLE] = "float32"
    lower = {"flax": flax.lower, "torch": torch.lower}
    return Activations(
        *(traced, found.flax, found.torch, names, found.axes, found.inputs),
        *(found.differing, found.unpaired, found.ambiguous),
        cotangents=torch.cotangents,
        lower=lower,
    )


def _record_flax(traced: TracedModule, recorder: ActivationRecorder) -> None:
    def recorded(run: Any) -> Any:
        run(recorder)
        return {name: (found.inputs, found.output) for name, found in recorder.activations.items()}

    arrays = jax.tree.map(numpy64, traced.compiled(recorded)())
    for name, (inputs, output) in arrays.items():
        recorder.activations[name] = replace(
            recorder.activations[name], inputs=inputs, output=output
        )


class _Probe(Observer):
    """Adds zeros to the output of every node, to differentiate with respect to them."""

    def __init__(self, names: Names, zeros: Mapping[str, Any]):
        super().__init__("flax", names)
        self.zeros = zeros

    def left(self, frame: Frame, output: Any) -> Any:
        return self.stepped(frame.name, output)

    def stepped(self, name: str, value: Any) -> Any:
        return (
            value + self.zeros[name] if name in self.zeros else value
        )  # those alone that can be compared


def flax_cotangents(pair: Pair, found: Activations) -> Arrays:
    """Return the cotangents of the Flax side, by name of the node at whose output they arrive."""
    axes = found.axes
    zeros = {
        name: np.zeros(value.shape, found.ours[name].dtype) for name, value in found.flax.items()
    }
    zeros = {
        name: axes[name].to_flax(zero) if name in axes else zero for name, zero in zeros.items()
    }

    def gradient(run: Any, zeros: Mapping[str, Any], cotangents: Mapping[str, Any]) -> Any:
        def weighted(zeros: Mapping[str, Any]) -> Any:
            outputs = run(_Probe(found.names, zeros))
            return sum(jnp.sum(outputs[name] * c) for name, c in cotangents.items())

        return jax.grad(weighted)(zeros)

    arrays = found.traced.compiled(gradient)(
        zeros, {n: jnp.asarray(c) for n, c in pair.cotangents.items()}
    )
    arrays = {name: numpy64(array) for name, array in arrays.items()}
    return {
        name: axes[name].to_torch(array) if name in axes else array
        for name, array in arrays.items()
    }
