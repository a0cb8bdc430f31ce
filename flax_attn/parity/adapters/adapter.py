"""One interface for every framework: a run spec goes in, numpy arrays by name come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from flax_attn import convert

if TYPE_CHECKING:
    from flax_attn.parity.training import TrainingSpec

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]


class PairingError(ValueError):
    """Two modules that cannot be compared: the message says why, and what to pass instead."""


class AdapterError(RuntimeError):
    """One framework raised an error where the other did not."""


class NotRun(Exception):  # noqa: N818, it is no error
    """A check that does not apply to a pair; the message says why."""


class BothRaise(NotRun):
    """A run in which both frameworks raise an error: their messages."""


class NothingCompared(Exception):  # noqa: N818, it is no error
    """A check that applies to a pair and has nothing to compare; the message says what to do."""


@dataclass(frozen=True)
class RunSpec:
    """One run of an adapter.

    Args:
        name: name of the run; results are cached and exported under it.
        inputs: input arrays by name, in the order of the call.
        extras: arguments of the call beside the inputs: `lengths`, `dropout_key`.
        dtype: dtype that floating inputs and all parameters are cast to.
        train: whether the module is in train mode.
        cotangents: cotangents of the outputs, for gradients; None computes outputs alone.
        tangents: tangents of parameters and inputs, for directional derivatives of the gradients.
        eager: whether JAX runs without `jax.jit`.
        cached: whether the outputs are computed in steps with a cache, by the call given for that.
        rounding_seed: seed of stochastic rounding of all parameters and inputs; 0 rounds to
            nearest.
    """

    name: str
    inputs: Arrays
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    dtype: str = "float64"
    train: bool = False
    cotangents: Arrays | None = None
    tangents: Arrays | None = None
    eager: bool = False
    cached: bool = False
    rounding_seed: int = 0


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


class ModuleCall:
    """How a module is called: by the caller's function or plainly, with the extras it takes."""

    EXTRAS = ("lengths", "dropout_key")

    def __init__(self, call: Callable | None, method: Callable, positional: bool):
        self.function, self.positional = call, positional
        parameters = _parameters(method if call is None else call)
        self.accepts = frozenset(self.EXTRAS).intersection(parameters)

    def __call__(
        self, module: Any, inputs: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the outputs by name."""
        keywords = {name: value for name, value in extras.items() if name in self.accepts}
        arguments = []
        if self.positional:
            # By number: JAX sorts the names of what it compiles, "input 10" before "input 2".
            arguments = [inputs[f"input {i}"] for i in range(len(inputs))]
        else:
            keywords = {**inputs, **keywords}
        call = module if self.function is None else partial(self.function, module)
        return named(call(*arguments, **keywords))


class ModuleAdapter:
    """The base of the adapters of modules: calls the module, whole or in steps."""

    def __init__(
        self,
        method: Callable,
        call: Callable | None,
        cached_call: Callable | None,
        positional: bool,
    ):
        self._calls = {False: ModuleCall(call, method, positional)}
        if cached_call:
            self._calls[True] = ModuleCall(cached_call, method, positional)

    @property
    def accepts(self) -> frozenset[str]:
        """The extras that the call takes."""
        return self._calls[False].accepts

    @property
    def has_cache(self) -> bool:
        """Whether there is a call that computes in steps."""
        return True in self._calls

    def call(
        self,
        module: Any,
        inputs: Mapping[str, Any],
        extras: Mapping[str, Any],
        cached: bool = False,
    ) -> dict[str, Any]:
        """Return the outputs of a module of this kind, by name; computed in steps if `cached`."""
        return self._calls[cached](module, inputs, extras)


def _parameters(function: Callable) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # A function that is built in has no signature.
        return []


def check_kind(module: Any, rule: str, foreign: Mapping[str, str]) -> None:
    """Raise unless `module` is a callable of this framework, and not a class.

    Args:
        module: object that was passed as the module.
        rule: description of what it should be.
        foreign: names of other frameworks, by their packages.
    """
    if isinstance(module, type):
        raise PairingError(f"{rule}; got the class {module.__name__}: pass a module of it")
    for base in type(module).__mro__:
        package = base.__module__.partition(".")[0]
        if package in foreign:
            raise PairingError(
                f"{rule}; got {type(module).__name__}, of {foreign[package]}. "
                "The order is compare(flax_module, torch_module, inputs)"
            )
    if not callable(module):
        raise PairingError(f"{rule}; got {type(module).__name__}")


def named(result: Any) -> dict[str, Any]:
    """Return the arrays that a call returned, by name; None is no output.

    Raises:
        PairingError: if something in it is not an array, or two outputs have one name.

    Example:
        >>> sorted(named((np.ones(2), None)))
        ['output']
        >>> sorted(named({"logits": np.ones(2), "hidden": (np.ones(3), np.ones(4))}))
        ['hidden.0', 'hidden.1', 'logits']
    """
    found: dict[str, Any] = {}
    for name, value in _walk("", result):
        if name in found:
            raise PairingError(
                "outputs are compared by name, the keys around them joined by dots; two are called"
                f" {name!r}. Pass a call that returns them under different names"
            )
        found[name] = value
    # The only output has this name, wherever it stood; in a mapping it has one of its own.
    if len(found) == 1 and not isinstance(result, Mapping):
        return {"output": next(iter(found.values()))}
    return found


def _walk(name: str, value: Any):
    if value is None:
        return
    if isinstance(value, Mapping | tuple | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _walk(f"{name}.{key}" if name else str(key), inner)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield name or "output", value
    else:
        raise PairingError(
            f"an output is an array, or a tuple or mapping of arrays; {name or 'the output'} is a"
            f" {type(value).__name__}. Pass a call that returns arrays, such as torch_call=lambda"
            " m, x: m(x)[0]"
        )


def output_of(outputs: Mapping[str, Any], name: str) -> Any:
    """Return an output by its name in the other framework.

    Raises:
        ValueError: if there is none.
    """
    if name not in outputs:
        found = ", ".join(map(repr, outputs)) or "nothing"
        raise ValueError(
            f"both must return outputs of the same names; there is no {name!r} among {found}. "
            "Pass calls that return the same names"
        )
    return outputs[name]


def is_floating(array: Any) -> bool:
    """Whether a numpy array is floating point, the dtypes of `ml_dtypes` included."""
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
