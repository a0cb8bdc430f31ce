"""`jax.jit` for programs that run a few times on small arrays, and as users have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax

# Each program runs a few times on small arrays, so nearly all of the time is spent in compiling it.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: The defaults of XLA, which jax_disable_most_optimizations changes.
DEFAULTS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
# Known to some versions of XLA alone.
_FEWER_KERNELS = {"xla_cpu_use_fusion_emitters": False}


# XLA compiles outside Python's lock: beside Python, and on two cores while that waits.
_COMPILER = ThreadPoolExecutor(2, "compiler")


class Compiled:
    """A function compiled by `jax.jit`, which may begin to compile before it is called.

    Args:
        on_cpu: result of `jax.jit` that runs on a CPU.
        elsewhere: result of `jax.jit` that runs on another device.
    """

    def __init__(self, on_cpu: Any, elsewhere: Any):
        self._on_cpu, self._elsewhere = on_cpu, elsewhere
        # What is being compiled, by the identity of its jaxpr, which JAX keeps as long as the key.
        self._begun: dict[int, tuple[Any, Future]] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the function does."""
        if self._begun:
            jaxpr = self.trace(*arguments, **keywords).jaxpr
            _, begun = self._begun.pop(id(jaxpr), (None, None))
            if begun is not None:
                # What it raises is raised by the call.
                wait([begun])
        return self._program()(*arguments, **keywords)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the function traced, as `jax.jit` does: not again where it ran on such arrays."""
        return self._program().trace(*arguments, **keywords)

    def begin(self, *arguments: Any, **keywords: Any) -> None:
        """Trace the function, and compile it beside what runs until it is called.

        JAX keeps what it compiled, so the call finds it.
        """
        traced = self.trace(*arguments, **keywords)
        lowered = traced.lower()
        self._begun[id(traced.jaxpr)] = traced.jaxpr, _COMPILER.submit(lowered.compile)

    def _program(self) -> Any:
        # The device may have changed since the last run.
        return self._on_cpu if runs_on_cpu() else self._elsewhere


def compiled(function: Callable, **options: Any) -> Compiled:
    """Return a function compiled quickly on a CPU."""
    quick = jax.jit(function, compiler_options=quick_options(), **options)
    return Compiled(quick, jax.jit(function, **options))


def optimized(function: Callable, **options: Any) -> Compiled:
    """Return a function compiled with the defaults of XLA, whatever the environment is."""
    program = jax.jit(function, compiler_options=DEFAULTS, **options)
    return Compiled(program, program)


@contextmanager
def quick_operations() -> Iterator[None]:
    """Compile what names no options quickly: operations that run one by one, and draws.

    It holds for the whole process, whose operations stay compiled like this.

    Example:
        >>> with quick_operations():
        ...     jax.config.values["jax_disable_most_optimizations"]
        True
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def runs_on_cpu() -> bool:
    """Return whether JAX computes on a CPU where no other device is named.

    Example:
        >>> with jax.default_device(jax.devices("cpu")[0]):
        ...     runs_on_cpu()
        True
    """
    device = jax.config.values["jax_default_device"]
    return device is None or device.platform == "cpu"


@cache
def quick_options() -> dict[str, Any]:
    """Return the options of XLA with which programs compile quickly on a CPU."""
    options = {**_QUICK_TO_COMPILE, **_FEWER_KERNELS}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        # This version of XLA has no such option.
        return _QUICK_TO_COMPILE
    return options
