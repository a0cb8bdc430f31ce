"""`jax.jit` for programs that run a few times on small arrays, and as users have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

# Each program runs a few times on small arrays, so nearly all of the time is spent in compiling it.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# The defaults of XLA, which JAX_DISABLE_MOST_OPTIMIZATIONS changes.
_AS_USERS_HAVE_IT = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
# Known to some versions of XLA alone.
_FEWER_KERNELS = {"xla_cpu_use_fusion_emitters": False}


def compiled(function: Callable, **options: Any) -> Callable:
    """Return `jax.jit(function)`, compiled quickly on a CPU."""
    on_cpu = jax.jit(function, compiler_options=quick_options(), **options)
    anywhere = jax.jit(function, **options)

    def run(*arguments: Any, **keywords: Any) -> Any:
        # The device may have changed since the last run.
        program = on_cpu if _runs_on_cpu() else anywhere
        return program(*arguments, **keywords)

    return run


def optimized(function: Callable, **options: Any) -> Callable:
    """Return `jax.jit(function)`, compiled with the defaults of XLA whatever the environment is."""
    return jax.jit(function, compiler_options=_AS_USERS_HAVE_IT, **options)


def _runs_on_cpu() -> bool:
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
