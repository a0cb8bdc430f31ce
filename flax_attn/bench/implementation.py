"""How an implementation is prepared and run, in JAX and in PyTorch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flax_attn.bench.workload import Workload, with_gradients
from flax_attn.convert import to_numpy

if TYPE_CHECKING:
    import torch

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PreparedCall:
    """An implementation with its inputs in place, not yet run.

    It is compiled already if it compiles ahead of time.

    Args:
        run: function that computes the given number of times, waits, and returns the last result.
        named: function that picks the arrays to compare out of a result.
        compile_seconds: seconds to trace, lower and compile; None where nothing is compiled.
        temporaries: bytes beside inputs and outputs, as XLA plans them; None where unknown.
    """

    run: Callable[[int], Any]
    named: Callable[[Any], Arrays]
    compile_seconds: float | None = None
    temporaries: int | None = None


@dataclass(frozen=True)
class Implementation:
    """One of the implementations that are measured side by side.

    Args:
        name: name in the tables.
        prepare: function that makes it ready for a workload.
        package: package that must be installed for it.
    """

    name: str
    prepare: Callable[[Workload], PreparedCall]
    package: str = "jax"


def prepare_jax(
    compute: Callable[..., Any], arguments: tuple, work: Workload, named: Callable[[Any], Any]
) -> PreparedCall:
    """Compile `compute(*arguments[:-1])` and its gradients, if any, ahead of time.

    The cotangent is `arguments[-1]`.
    """
    # Moving them to the device is no part of a call.
    arguments = jax.device_put(arguments)
    start = time.perf_counter()
    # Ahead of time, so that it is known what compiling takes, and what memory.
    compiled = jax.jit(with_gradients(compute, work.backward)).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    # On a CPU two calls in flight would run side by side; on an accelerator they queue, and waiting
    # leaves a gap.
    wait = jax.block_until_ready if jax.default_backend() == "cpu" else lambda result: result

    def run(repeats: int) -> Any:
        result = None
        for _ in range(repeats):
            result = wait(compiled(*arguments))
        return jax.block_until_ready(result)

    return PreparedCall(run, named, seconds, None if memory is None else memory.temp_size_in_bytes)


def prepare_torch(
    compute: Callable[..., Any], inputs: list, leaves: list, work: Workload, named: Callable
) -> PreparedCall:
    """Prepare `compute(*inputs[:-1])` and the gradients of `leaves`, the cotangent `inputs[-1]`."""
    import torch

    # As many threads as XLA has: PyTorch takes one for two hyperthreads.
    torch.set_num_threads(os.cpu_count() or 1)
    for leaf in leaves:
        leaf.requires_grad_(work.backward)

    def once() -> tuple:
        output = compute(*inputs[:-1])
        if not work.backward:
            return (output,)
        return output, *torch.autograd.grad(output, leaves, inputs[-1])

    def run(repeats: int) -> Any:
        result = None
        for _ in range(repeats):
            result = once()
        # On a GPU a call returns before it is computed.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return PreparedCall(run, named)


def torch_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor of the same dtype, on the GPU if there is one."""
    import torch

    # NumPy's bfloat16 is not one that PyTorch reads.
    dtype = getattr(torch, array.dtype.name)
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(dtype)
    return tensor.cuda() if torch.cuda.is_available() else tensor


def as_float64(array: Any) -> np.ndarray:
    """Return an array of any framework and dtype as float64 on the host."""
    return np.asarray(to_numpy(array), np.float64)
