"""What the adapters of modules share: how a module is called, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from flax_attn.parity.adapters.adapter import PairingError
from flax_attn.parity.adapters.users_code import users_code


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
        """Return the outputs by name.

        Raises:
            PairingError: as `users_code` and `named` do.
        """
        keywords = {name: value for name, value in extras.items() if name in self.accepts}
        arguments = []
        if self.positional:
            # By number: JAX sorts the names of what it compiles, "input 10" before "input 2".
            arguments = [inputs[f"input {i}"] for i in range(len(inputs))]
        else:
            keywords = {**inputs, **keywords}
        with users_code():
            if self.function is None:
                return named(module(*arguments, **keywords))
            return named(self.function(module, *arguments, **keywords))


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
    problem = f"{rule}; got {type(module).__name__}"
    origin = _origin(module, foreign)
    if origin:
        raise PairingError(
            f"{problem}, of {origin}. The order is compare(flax_module, torch_module, inputs)"
        )
    if not callable(module):
        raise PairingError(
            f"{problem}, which cannot be called. Define __call__ in its class, or pass a function"
        )


def _origin(module: Any, foreign: Mapping[str, str]) -> str:
    """Return the other framework that a module is of; empty if it is of none."""
    # A class that is derived from theirs is theirs as well.
    packages = [base.__module__.partition(".")[0] for base in type(module).__mro__]
    return next((foreign[package] for package in packages if package in foreign), "")


def named(result: Any) -> dict[str, Any]:
    """Return the arrays that a call returned, by name; None is no output.

    Raises:
        PairingError: if something in it is not an array, or two outputs have one name.

    Example:
        >>> import numpy as np
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


def by_field(value: Any) -> Any:
    """Return a dataclass as a mapping of its fields, and all else as it is.

    Example:
        >>> import numpy as np
        >>> from flax_attn import Outputs
        >>> sorted(by_field(Outputs(np.ones(2))))
        ['cache', 'output', 'weights']
    """
    # The outputs of transformers are both: the mapping leaves out what is None.
    if isinstance(value, Mapping | type) or not is_dataclass(value):
        return value
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _walk(name: str, value: Any):
    # Such as weights that were not asked for.
    if value is None:
        return
    value = by_field(value)
    if isinstance(value, Mapping | tuple | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _walk(f"{name}.{key}" if name else str(key), inner)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield name or "output", value
    else:
        raise PairingError(
            "an output is an array, or a tuple, mapping or dataclass of arrays;"
            f" {name or 'the output'} is a {type(value).__name__}. Pass a call that returns arrays,"
            " such as torch_call=lambda m, x: m(x)[0]"
        )


def output_of(outputs: Mapping[str, Any], name: str, shape: Sequence[int]) -> Any:
    """Return an output by its name and shape in the other framework.

    Raises:
        ValueError: if there is none, or it has another shape.
    """
    if name not in outputs:
        found = ", ".join(map(repr, outputs)) or "nothing"
        raise ValueError(
            f"both must return outputs of the same names; there is no {name!r} among {found}. "
            "Pass calls that return the same names"
        )
    output = outputs[name]
    ours = tuple(output.shape)
    theirs = tuple(shape)
    if ours != theirs:
        raise ValueError(
            f"outputs must have the same shapes; {name} is {ours} here, {theirs} in PyTorch"
        )
    return output
