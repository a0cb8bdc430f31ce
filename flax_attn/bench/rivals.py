"""How a rival is made ready and run, in JAX and in PyTorch, each in the way that suits it best."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.bench.work import Work, with_gradients
from flax_attn.convert import to_numpy


@dataclass(frozen=True)
class Prepared:
    """A rival with its inputs in place, compiled where that is a step of its own, and not yet run.

    Args:
        run: computes so many times, waits, and returns the last result.
        named: picks the arrays to be judged out of a result.
        compile_seconds: to trace, lower and compile; None where nothing is compiled.
        temporaries: bytes beside inputs and outputs, as XLA plans them; None where they are not known.
    """

    run: Callable[[int], Any]
    named: Callable[[Any], dict[str, np.ndarray]]
    compile_seconds: float | None = None
    temporaries: int | None = None


@dataclass(frozen=True)
class Rival:
    """One who can do the work.

    Args:
        name: as it is known.
        prepare: makes it ready for a piece of work.
        package: what must be installed for it.
    """

    name: str
    prepare: Callable[[Work], Prepared]
    package: str = "jax"


def prepare_jax(compute: Callable[..., Any], arguments: tuple, work: Work, named: Callable[[Any], Any]) -> Prepared:
    """Compile `compute(*arguments[:-1])`, and its gradients under the cotangent `arguments[-1]`, ahead of time."""
    arguments = jax.device_put(arguments)
    start = time.perf_counter()
    compiled = jax.jit(with_gradients(compute, work.backward)).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    # On a CPU two calls in flight would run side by side; on an accelerator they queue, and to wait costs a gap.
    wait = jax.block_until_ready if jax.default_backend() == "cpu" else lambda result: result

    def run(repeats: int) -> Any:
        result = None
        for _ in range(repeats):
            result = wait(compiled(*arguments))
        return jax.block_until_ready(result)

    return Prepared(run, named, seconds, None if memory is None else memory.temp_size_in_bytes)


def prepare_torch(compute: Callable[..., Any], inputs: list, leaves: list, work: Work, named: Callable) -> Prepared:
    """Make `compute(*inputs[:-1])` ready, with the gradients of `leaves` under the cotangent `inputs[-1]`."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    for leaf in leaves:
        leaf.requires_grad_(work.backward)

    def once() -> tuple:
        output = compute(*inputs[:-1])
        return (output, *torch.autograd.grad(output, leaves, inputs[-1])) if work.backward else (output,)

    def run(repeats: int) -> Any:
        result = None
        for _ in range(repeats):
            result = once()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return Prepared(run, named)


def torch_tensor(array: np.ndarray) -> Any:
    """Return a tensor of the same dtype, on the GPU if there is one."""
    import torch

    dtype = getattr(torch, array.dtype.name)
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(dtype)
    return tensor.cuda() if torch.cuda.is_available() else tensor


def as_float64(array: Any) -> np.ndarray:
    """Return an array of any framework and dtype as float64 on the host."""
    return np.asarray(to_numpy(array), np.float64)


def matrix_limit(dtype: str, size: int, rounds: int = 5) -> float:
    """Return the most operations a second that XLA reached on this machine in one large square matrix product."""
    from flax_attn.bench.timing import measure

    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot).lower(x, x).compile()
    turn = lambda repeats: [jax.block_until_ready(product(x, x)) for _ in range(repeats)]  # noqa: E731
    turn(1)
    return 2 * size**3 / min(measure(turn) for _ in range(rounds))
