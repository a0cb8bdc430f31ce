"""Attention calls that say what they compute, in the place of computing it.

Only `flax-attn plan` traces them: a kernel's program does not tell its operations.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.interception import intercepted
from flax_attn.backends.work import pairs_in_band, products

# Its option `flops` holds the operations of the call. It is traced, and never run.
COUNTED = Primitive("counted_attention")


def counting() -> AbstractContextManager[None]:
    """Let the attention calls that are traced in this context be equations of `COUNTED`."""
    return intercepted(_count)


def _count(call: Call, backend: str) -> Array:
    flops = products(call, pairs_in_band(call))
    return COUNTED.bind(call.query, call.value, flops=flops)


@COUNTED.def_abstract_eval
def _shape(query: Any, value: Any, *, flops: int) -> Any:
    return ShapedArray((*query.shape[:-1], value.shape[-1]), query.dtype)


def _batch(arrays: Sequence[Array], dims: Sequence[Any], *, flops: int) -> tuple[Array, int]:
    pairs = list(zip(arrays, dims, strict=True))
    size = next(x.shape[dim] for x, dim in pairs if dim is not None)
    moved = [batching.bdim_at_front(x, dim, size) for x, dim in pairs]
    return COUNTED.bind(*moved, flops=size * flops), 0


batching.primitive_batchers[COUNTED] = _batch
