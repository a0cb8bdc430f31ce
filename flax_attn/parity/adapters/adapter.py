"""One interface for every framework: a run spec goes in, numpy arrays by name come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from flax_attn import convert

if TYPE_CHECKING:
    from flax_attn.parity.training import TrainingSpec

Arrays = dict[str, np.ndarray]
# In "statistics", modules are in train mode without dropout, and what they keep is returned, too.
Mode = Literal["eval", "train", "statistics"]
Shape = tuple[int, ...]


class PairingError(ValueError):
    """Two modules that cannot be compared: the message says why, and what to pass instead."""


class ReplacedError(PairingError):
    """A PyTorch whose own functions were replaced, which is no reference."""


class AdapterError(RuntimeError):
    """One framework raised an error where the other did not."""


def error_text(error: Exception) -> str:
    """Return the kind of an error and its message, as Python prints them."""
    return f"{type(error).__name__}: {error}"


def returned(framework: str, result: Any) -> Any:
    """Return a result, or raise what was raised in its place.

    Raises:
        AdapterError: with the message of an error.
    """
    if isinstance(result, Exception):
        raise AdapterError(f"{framework} raised {error_text(result)}") from result
    return result


class NotRun(Exception):  # noqa: N818, it is no error
    """A check that does not apply to a pair; the message says why."""


class Untested(NotRun):
    """A check that applies to a pair and could not be tried: "equal" does not extend to it."""


class BothRaise(NotRun):
    """A run in which both frameworks raise an error: their messages."""


class NothingCompared(Exception):  # noqa: N818, it is no error
    """A check that applies to a pair and has nothing to compare; the message says what to do."""


class Float32(Enum):
    """What a run in float64 computes in float64 although it is written in float32.

    `BY_LIBRARY` is what the framework makes float32 by itself: tensors of PyTorch that name no
    dtype, and the softmax of JAX's attention. `NAMED` is what the source of the module names, too.
    """

    AS_WRITTEN = "nothing"
    BY_LIBRARY = "what the library makes in float32"
    NAMED = "what the library makes in float32, and what the source names float32"


@dataclass(frozen=True)
class RunSpec:
    """One run of an adapter.

    Args:
        name: name of the run; results are cached and exported under it.
        inputs: input arrays by name, in the order of the call.
        extras: arguments of the call beside the inputs: `lengths`, `dropout_key`.
        dtype: dtype that floating inputs and all parameters are cast to.
        mode: mode of the module; in `"statistics"` the running statistics, as the run leaves them,
            are outputs by `kept_name`.
        cotangents: cotangents of the outputs, for gradients; None computes outputs alone.
        tangents: tangents of parameters and inputs, for directional derivatives of the gradients.
        step: how many tangents PyTorch moves parameters and inputs by, to return their gradients
            there and no derivatives of these; 0 is none.
        eager: whether JAX runs without `jax.jit`.
        optimized: whether JAX compiles as users do, and not as fast as it can.
        before: inputs of a call of the same module before this one; None is no such call.
        cached: whether the outputs are computed in steps with a cache, by the call given for that.
        rounding_seed: seed of stochastic rounding of all parameters and inputs, and in float64 of
            what every operation of PyTorch returns; 0 rounds to nearest.
        rounded_sums: whether each sum that JAX itself adds to a program is rounded once.
    """

    name: str
    inputs: Arrays
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    dtype: str = "float64"
    mode: Mode = "eval"
    cotangents: Arrays | None = None
    tangents: Arrays | None = None
    step: float = 0.0
    eager: bool = False
    optimized: bool = False
    before: Arrays | None = None
    cached: bool = False
    rounding_seed: int = 0
    rounded_sums: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a run, in float64 whatever it was computed in.

    Args:
        outputs: outputs by name.
        gradients: gradients of parameters and floating inputs, for the cotangents.
        second: derivatives of the gradients along the tangents.
        dtypes: dtypes in which the outputs were computed.
    """

    outputs: Arrays
    gradients: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def arrays(self) -> Arrays:
        """Outputs and gradients by name."""
        return {**self.outputs, **self.gradients}


@runtime_checkable
class Adapter(Protocol):
    """One implementation behind the interface.

    Attributes:
        framework: `"flax"` or `"torch"`.
        shapes: shapes of its parameters and running statistics, by its own names.
        accepts: names of the extras that its call takes.
        has_cache: whether it was given a call that computes in steps.
    """

    framework: str

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def accepts(self) -> frozenset[str]: ...

    @property
    def has_cache(self) -> bool: ...

    def weights(self) -> Arrays:
        """Return parameters and running statistics in float64, by their shared names."""
        ...

    def load(self, weights: Arrays) -> None:
        """Set parameters and running statistics, by their shared names."""
        ...

    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        ...

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters, and the losses as `loss`."""
        ...


def kept_name(statistic: str) -> str:
    """Return the name of the output that holds a running statistic after a run.

    Example:
        >>> kept_name("norm.running_var")
        'norm.running_var after the call'
    """
    return f"{statistic} after the call"


def is_floating(array: Any) -> bool:
    """Whether a numpy array is floating point, the dtypes of `ml_dtypes` included."""
    # To NumPy itself those of ml_dtypes are not floating.
    return np.issubdtype(array.dtype, np.floating) or array.dtype.name in ("bfloat16",)


def float64(arrays: Mapping[str, Any]) -> Arrays:
    """Return arrays of any framework as numpy, floating ones as float64.

    Raises:
        PairingError: if one does not hold numbers.
    """
    found = {}
    for name, value in arrays.items():
        array = convert.to_numpy(value)
        # V is the kind of the dtypes of ml_dtypes.
        if array.dtype.kind not in "biufcV":
            raise PairingError(
                f"arrays of numbers are compared; {name} has the dtype {array.dtype}. Pass a call"
                " that leaves it out"
            )
        found[name] = array.astype(np.float64) if is_floating(array) else array
    return found


def rounding_factors(seed: int, eps: float) -> Callable[[Shape], np.ndarray]:
    """Return a function that draws factors of about 1, in arrays of a shape.

    Each moves a number by up to half a rounding, so that the cast that follows rounds it up or down
    at random.
    """
    random = np.random.default_rng(seed)
    return lambda shape: np.asarray(1 + eps * random.uniform(-0.5, 0.5, shape))


def dtypes(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtype of each array, without the framework's name."""
    return {name: str(array.dtype).removeprefix("torch.") for name, array in arrays.items()}
