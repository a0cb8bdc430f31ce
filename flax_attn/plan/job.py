"""What is planned: a model, a batch of tokens, and how both lie on the chips."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod

from flax import nnx

from attn_spec.checks import check_positive
from flax_attn.plan.models import PlannedModel
from flax_attn.plan.topology import Topology
from flax_attn.sharding.axes import rules, table


@dataclass(frozen=True)
class Job:
    """What is planned.

    Args:
        name: name of the model.
        model: model, a `LibraryModel` or an `OwnModel`.
        topology: chips and how they are joined.
        mesh: size of each axis of the mesh; together they are the number of devices.
        batch: number of sequences, on all chips together.
        tokens: number of tokens of each sequence; in generation, of the prompt and so of the cache.
        train: whether it is trained; else it generates.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        dtype: dtype of the parameters and the computation; the optimizer works in float32. None is
            the default of the model: bfloat16 for a `LibraryModel`, its own for an `OwnModel`.
        backend: backend of the attention calls; `"auto"` or the name of one.
        rules: lines of the table of axes that are replaced, see `flax_attn.sharding.rules`.

    Raises:
        ValueError: if the table has no line for a name, the mesh has an axis that the table does
            not, its product is not the number of devices, its axes do not divide the batch, the
            tokens, the heads or the experts, or there are more tokens than positions.

    Example:
        >>> from flax_attn.plan.models import MODELS
        >>> from flax_attn.plan.topology import topology
        >>> chips, mesh = topology("v5e:4x4"), {"fsdp": 8, "tensor": 2}
        >>> Job("llama3-8b", MODELS["llama3-8b"], chips, mesh, 8, 4096).axis("fsdp")
        8
    """

    name: str
    model: PlannedModel
    topology: Topology
    mesh: Mapping[str, int]
    batch: int
    tokens: int
    train: bool = True
    remat: bool = False
    dtype: str | None = None
    backend: str = "auto"
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self):
        check_positive(batch=self.batch, tokens=self.tokens, **self.mesh)
        with self.table():
            self.model.check(self)
            self._check_devices()
            self._check_divides("the batch", "batch", self.batch, "--batch or --mesh")
            tokens = "the tokens of a sequence"
            self._check_divides(tokens, "tokens", self.tokens, "--tokens or --mesh")
            divided = self.model.divided
            for what, (name, size) in divided.items():
                self._check_divides(what, name, size, "--mesh")

    def axis(self, name: str) -> int:
        """Return the size of an axis of the mesh; 1 if the mesh does not have it."""
        return self.mesh.get(name, 1)

    def table(self) -> AbstractContextManager[None]:
        """Return what puts the rules of this job in use."""
        return rules(**self.rules)

    def build(self) -> Callable[[nnx.Rngs], nnx.Module]:
        """Return a function that makes the model from random streams."""
        return self.model.build(self)

    def _check_devices(self) -> None:
        devices = prod(self.mesh.values())
        if devices != self.topology.size:
            raise ValueError(
                f"the axes of the mesh must multiply to the {self.topology.size} devices of"
                f" {self.topology.name}; got {_product(self.mesh)} = {devices}. Change --mesh or"
                " --topology"
            )

    def _check_divides(self, what: str, name: str, size: int, option: str) -> None:
        axes = {axis: self.axis(axis) for axis in table()[name] if self.axis(axis) > 1}
        if size % prod(axes.values()):
            raise ValueError(
                f"{what} must be divisible by {_product(axes)} of the mesh; got {size}. Change"
                f" {option}"
            )


def _product(axes: Mapping[str, int]) -> str:
    return " * ".join(f"{axis}={size}" for axis, size in axes.items())


def parse_rules(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the lines of the table of axes in texts such as `embed=fsdp,context`.

    Nothing behind the sign is no axis.

    Raises:
        ValueError: if one is not written so.

    Example:
        >>> parse_rules(["embed=fsdp,context", "vocab="])
        {'embed': ('fsdp', 'context'), 'vocab': ()}
    """
    found = {}
    for text in texts:
        name, sign, axes = text.partition("=")
        if not sign or "=" in axes:
            raise ValueError(
                "a rule is written as the name of an axis and the axes of the mesh that it is split"
                f" over; got {text!r}. Write for example embed=fsdp,context"
            )
        found[name] = tuple(filter(None, axes.split(",")))
    return found


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of a mesh that is written as `data=2,fsdp=4`.

    Raises:
        ValueError: if it is not written so, a size is below 1, or an axis comes twice.

    Example:
        >>> parse_mesh("data=2,fsdp=4")
        {'data': 2, 'fsdp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        # Spaces around a comma are let be.
        written = part.strip()
        name, _, size = written.partition("=")
        if not name or name in found or not _is_size(size):
            raise ValueError(
                f"a mesh is written as its axes and their sizes, each axis once; got {text!r}. "
                "Write for example data=2,fsdp=4, with sizes from 1"
            )
        found[name] = int(size)
    return found


def _is_size(text: str) -> bool:
    # Signs are no decimals; an axis of size 0 has no devices.
    return text.isdecimal() and int(text) > 0
