"""A port that is judged: what it is, and how both sides of it are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHECKS = ("weights", "forward", "gradients", "padded rows")


class FlaxError(Exception):
    """The JAX side cannot be built where the PyTorch side can."""


@dataclass(frozen=True)
class Built:
    """Both sides of a port, as `compare` takes them.

    Args:
        flax: the JAX module.
        torch: the PyTorch module, in eval mode.
        inputs: inputs of both, by position.
        layouts: names or layouts, or functions of both modules that return one. They are tried in
            order, and the first that pairs all parameters is used.
        flax_call: how to call the JAX module, `flax_call(module, *inputs, mask)`, where `mask` is
            boolean `(b, t)`, True for tokens, or None; a call without a parameter `mask` has no
            padding. None is `module(*inputs)`.
        torch_call: how to call the PyTorch module, in the same form.
        options: further arguments of `compare`.
    """

    flax: Any
    torch: Any
    inputs: Sequence[Any]
    layouts: Sequence[Any] = ("auto",)
    flax_call: Callable | None = None
    torch_call: Callable | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Port:
    """A row of the study.

    Args:
        name: `library/model/configuration`, unique.
        package: name of the installed package; its version is read at run time.
        configuration: description of the configuration.
        build: function from a dtype, `"float64"` or `"float32"`, to both sides.
        twin: description of the PyTorch side.
        checks: names of the checks to run.
    """

    name: str
    package: str
    configuration: str
    build: Callable[[str], Built]
    twin: str = "its PyTorch class"
    checks: Sequence[str] = CHECKS
