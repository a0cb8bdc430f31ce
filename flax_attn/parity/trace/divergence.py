"""Where two sides differ: the first node that differs, the locally wrong nodes, the causes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax_attn.parity import tolerance
from flax_attn.parity.check import finite
from flax_attn.parity.trace.causes import grouped
from flax_attn.parity.trace.hooks import spoken

LISTED = 8  # nodes that are listed in words


@dataclass(frozen=True)
class Node:
    """A submodule or a step that both sides have.

    Args:
        name: name that both sides share: `"blocks.3.norm1"`, `"blocks.3.att/scores"`; the whole
            module is `"."`.
        kind: `"module"` or `"step"`.
        order: position in the execution on the PyTorch side; a module comes after its content.
        error: the relative error of its output.
        local_error: relative error of its output when Flax gets the inputs of PyTorch's node, so
            that no error is inherited; NaN where that is impossible.
        backward_error: the relative error of the cotangent that arrives at its output; NaN where
            outputs differ.
        limit: the rule for `error` and `local_error`.
        shape: shape of its output.
        flax_dtype: dtype in which Flax computed it.
        torch_dtype: dtype in which PyTorch computed it.
    """

    name: str
    kind: str
    order: int
    error: float
    local_error: float
    backward_error: float
    limit: float
    shape: tuple[int, ...]
    flax_dtype: str
    torch_dtype: str

    @property
    def differs(self) -> bool:
        """Whether its output differs."""
        return self.error > self.limit

    @property
    def locally_wrong(self) -> bool:
        """Whether it adds an error of its own, as a container may between its submodules."""
        return self.local_error > self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return the node for JSON; what is infinite or NaN is None there."""
        state = {
            "shape": list(self.shape),
            "differs": self.differs,
            "locally_wrong": self.locally_wrong,
        }
        return finite(vars(self)) | state


@dataclass(frozen=True)
class Divergence:
    """Where two sides differ, and why.

    Args:
        nodes: nodes of both sides, in order of execution.
        unpaired: nodes that one side alone has, or lays out differently.
        causes: known causes of the difference, one sentence each.
    """

    nodes: tuple[Node, ...]
    unpaired: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def first(self) -> Node | None:
        """The first node whose output differs."""
        return next((node for node in self.nodes if node.differs), None)

    @property
    def locally_wrong(self) -> tuple[Node, ...]:
        """The nodes that add an error of their own, in order of execution."""
        return tuple(node for node in self.nodes if node.locally_wrong)

    @property
    def backward(self) -> Node | None:
        """The last node with a wrong cotangent, if the forward pass agrees."""
        wrong = [node for node in self.nodes if node.backward_error > tolerance.GRADIENT]
        return None if self.first or not wrong else wrong[-1]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON, the causes first."""
        return {
            "causes": list(self.causes),
            "first": self.first and self.first.name,
            "locally_wrong": [node.name for node in self.locally_wrong],
            "backward": self.backward and self.backward.name,
            "unpaired": list(self.unpaired),
            "nodes": [node.as_dict() for node in self.nodes],
        }

    def __str__(self) -> str:
        """Return a few lines, the causes first."""
        return "\n".join([*grouped(self.causes), *self.where()])

    def where(self) -> Iterator[str]:
        """Yield where the sides differ, a line each: the first node, then locally wrong nodes."""
        first, backward = self.first, self.backward
        if backward:
            yield (
                f"all outputs agree; the backward pass differs after {spoken(backward.name)}, the"
                f" last node with a wrong cotangent: error {backward.backward_error:.3g}, rule"
                f" {tolerance.GRADIENT:.0e}"
            )
        elif first is None:
            yield f"in float64 none of {len(self.nodes)} nodes differs"
        else:
            yield (
                f"first difference: {spoken(first.name)}, error {first.error:.3g}, rule"
                f" {first.limit:.0e}"
            )
        for node in self.locally_wrong[:LISTED]:
            yield (
                f"locally wrong: {spoken(node.name)}, error {node.local_error:.3g} on the same"
                " inputs"
            )
        if len(self.locally_wrong) > LISTED:
            yield f"locally wrong: {len(self.locally_wrong) - LISTED} more"
