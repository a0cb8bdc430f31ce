"""A variant: how it is built from the parts of either package, and how it is called."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Shape = tuple[int, ...]
# The most devices of a mesh; each is simulated by threads of its own.
MOST_DEVICES = 64


class Package:
    """A package whose classes are given numerics where they take them.

    So a row composes parts of either package.

    Args:
        module: `flax_attn` or `torch_ref`.
        numerics: keyword arguments, such as `rngs` and `param_dtype`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import flax_attn
        >>> package = Package(flax_attn, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        >>> package.LayerNorm(4).scale.dtype, package.RoPE(500.0).base
        (dtype(bfloat16), 500.0)
    """

    def __init__(self, module: ModuleType, **numerics: Any):
        self.module, self.numerics = module, numerics

    def __getattr__(self, name: str) -> Callable:
        made = getattr(self.module, name, None) or getattr(_family(self.module, name), name)
        return partial(made, **accepted(made, self.numerics))


def accepted(made: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that a class or a function takes.

    Example:
        >>> accepted(Package, {"module": 1, "rngs": 2})
        {'module': 1}
    """
    function = made.__init__ if isinstance(made, type) else made
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names}


def _family(package: ModuleType, name: str) -> ModuleType:
    """Return the file of a family of models, such as `Qwen2`.

    A package does not export these files.
    """
    folder = Path(str(package.__file__)).with_name("models")
    files = [file.stem for file in folder.glob("*.py")]
    fitting = [file for file in files if name.lower().startswith(file.replace("_", ""))]
    # `Qwen2Config` begins with the names of both `qwen` and `qwen2`.
    return import_module(f"{package.__name__}.models.{max(fitting, key=len)}")


@dataclass(frozen=True)
class Variant:
    """One row: how a module is built, the shapes of its inputs, and the rest of the call.

    Args:
        name: name of the row.
        module: name of the class in both packages.
        make: function that builds the module from the parts of a `Package`.
        inputs: shapes of the inputs, batched.
        call: function that returns the keyword arguments of the call, from a package.
        vocab_size: exclusive upper bound of integer inputs `(b, t)`; other inputs are floats, and
            with None all are.
        chunks: number of tokens of each step with a cache, for all rows of the batch or for each
            row; empty without a cache.
        capacity: capacity of the cache; None is all tokens.
        dropout: whether the variant has dropout.
        function: function that returns what takes the module and the inputs, from a package; None
            calls the module.
        checks: names of the checks that a run makes where none are requested; empty is those of the
            table.
    """

    name: str
    module: str
    make: Callable[[Any], Any]
    inputs: tuple[Shape, ...]
    call: Callable[[Any], Mapping[str, Any]] = field(default=lambda package: {})
    vocab_size: int | None = None
    chunks: tuple[int | tuple[int, ...], ...] = ()
    capacity: int | None = None
    dropout: bool = False
    function: Callable[[Any], Callable] | None = None
    checks: tuple[str, ...] = ()

    def draw(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return inputs drawn at random, by name."""
        return {f"input {i}": self._draw(random, shape) for i, shape in enumerate(self.inputs)}

    def _draw(self, random: np.random.Generator, shape: Shape) -> np.ndarray:
        if self.vocab_size is None or len(shape) > 2:
            return random.normal(size=shape)
        return random.integers(0, self.vocab_size, shape)

    def build(self, package: ModuleType, **numerics: Any) -> Any:
        """Return the module of `package`; every part is given the numerics that it takes."""
        return self.make(Package(package, **numerics))


@dataclass(frozen=True)
class TableSizes:
    """The sizes of a table.

    Args:
        b: number of rows of the batch.
        t: number of tokens.
        s: number of tokens of the other sequence.
        heads: number of heads of the GPT-2.
        over: number of devices that divide the heads and the hidden features.
        experts: number of devices that divide the experts.
    """

    b: int = 3
    t: int = 5
    s: int = 7
    heads: int = 3
    over: int = 1
    experts: int = 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """Several tokens with an empty cache, one, and several after others."""
        return 2, 1, self.t - 3

    def times(self, heads: int) -> int:
        """Return how many times as many heads a row needs that has so many on one device.

        Example:
            >>> [TableSizes(over=8).times(heads) for heads in (2, 4, 16)], TableSizes().times(3)
            ([4, 2, 1], 1)
        """
        return math.lcm(heads, self.over) // heads


def sizes_for(mesh: Mapping[str, int]) -> TableSizes:
    """Return sizes that the axes of a mesh divide.

    Raises:
        ValueError: if the mesh has an axis that none of the table is, one of a size below 1, or one
            that is too large.

    Example:
        >>> sizes_for({"data": 2, "context": 2})
        TableSizes(b=4, t=6, s=8, heads=2, over=1, experts=1)
    """
    if min(mesh.values(), default=1) < 1 or math.prod(mesh.values()) > MOST_DEVICES:
        raise ValueError(
            f"the devices of a mesh are simulated, each axis of 1 at least, {MOST_DEVICES} devices"
            f" in all at most; got {dict(mesh)}. Change these sizes"
        )
    heads = mesh.get("tensor", 1)
    tokens = mesh.get("context", 1)
    experts = mesh.get("expert", 1)
    # Rows are divided over all axes that do not divide the heads or the tokens.
    rows = mesh.get("data", 1) * mesh.get("fsdp", 1) * experts
    unknown = mesh.keys() - {"data", "fsdp", "tensor", "context", "expert"}
    if unknown or not {heads, tokens, experts} <= {1, 2, 4, 8}:
        raise ValueError(
            "the table of variants can be divided over data and fsdp, and over tensor, context and"
            f" expert where these are 1, 2, 4 or 8, as its modules are small; got {dict(mesh)}. Use"
            " fewer devices"
        )
    return TableSizes(
        b=math.ceil(4 / rows) * rows,
        t={1: 5, 2: 6, 4: 4, 8: 8}[tokens],
        s=8,
        heads=2 * max(1, heads // 2),
        over=heads,
        experts=experts,
    )
