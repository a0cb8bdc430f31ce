"""Kernels in Pallas for the whole contract: tiles of scores on chip, hidden tiles skipped.

Forward, a program takes a tile of queries over the tiles of keys that they see, with a running
maximum and sum. Backward has one kernel for the queries, and one for keys and values, which compute
the weights again from the maximum and the sum of each row.

`kernel` is a kernel as data; `gpu` and `tpu` run it, each with the grid, the blocks and the loops
of such a chip. `passes` holds the kernels, `scores` what they compute in a tile, with the functions
of `flax_attn.backends.tile`; `operands` says what they read, and `bounds` which tiles.

References:
    Dao 2023, FlashAttention-2 (arXiv:2307.08691).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends import rates
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import ARRAY_SCALE, Call, Floats
from flax_attn.backends.fused import bounds
from flax_attn.backends.fused.attend import Plan, attend, backward, forward
from flax_attn.backends.fused.functions import Halves
from flax_attn.backends.fused.kernel import Tiling
from flax_attn.backends.fused.operands import KNOWN, flat, score_halves
from flax_attn.backends.fused.tilings import tilings
from flax_attn.backends.platform import compute_capability
from flax_attn.backends.softmax import Softmax
from flax_attn.backends.work import KernelWork, fused
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.mask_function import Where

WIDEST = 256
AMPERE = 8.0  # the first GPUs that multiply bfloat16


class Interpreted(NamedTuple):
    """That Pallas's interpreter computes, and the sizes of its tiles."""

    tiling: Tiling


_INTERPRETED: ContextVar[Interpreted | None] = ContextVar("interpreted", default=None)


class Fused(Backend):
    """Kernels in Pallas."""

    name = "fused"
    dtypes = ("float32", "bfloat16", "float16")
    honours = ("bias", "soft_cap", "sinks", "dropout", "precision", "score", ARRAY_SCALE)
    in_parts = True
    any_sinks = True
    nonfinite = "in its kernel"
    source = "flax_attn, in Pallas"
    structure = "causal, windows, lengths, prefix, segments, functions: hidden tiles are skipped"
    limits = (
        "float16 on TPU, head widths above 256, functions that look up an array by both a query and"
        " a key or compute in 64 bits, a precision that is an algorithm"
    )

    @property
    def platforms(self) -> tuple[str, ...] | None:
        return ("gpu", "tpu") if _INTERPRETED.get() is None else None

    def preferred(self, call: Call) -> bool:
        return call.platform != "cpu"

    def refuse(self, call: Call) -> str | None:
        checks = _refuse_sizes, _refuse_chip, _refuse_numbers, _refuse_mask, _refuse_functions
        reasons = (check(call) for check in checks)
        return next(filter(None, reasons), None)

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`, differentiable once, in reverse mode."""
        if 0 in call.shape:
            return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
        return attend(self.plan(call), call)

    def forward(self, call: Call) -> Softmax:
        """Return the output `(b, t, n, v)`, and the softmax's maxima and sums `(b, n, t, 1)`."""
        return forward(self.plan(call), call, accumulation_dtype(call.query.dtype))

    def backward(self, call: Call, saved: Softmax, cotangent: Array) -> Floats:
        """Return the gradients, where `saved` is over these keys and maybe others."""
        return backward(self.plan(call), call, saved, cotangent)

    def memory(self, call: Call) -> int:
        """Return the bytes of the maxima and sums, and on TPU of the arrays with heads first.

        `16 b n t`, and `b (n t + k s) (h + v) itemsize` on TPU.
        """
        b, n, t, _ = call.shape
        rows = 16 * b * n * t
        return rows if call.platform != "tpu" else rows + _heads_first_bytes(call)

    def work(self, call: Call) -> KernelWork:
        """Return the work of a kernel, of what finds its tiles, and of copies that it reads.

        A program takes whole tiles of queries.
        """
        on_tpu = call.platform == "tpu"
        found = fused(
            call,
            rates.pallas(call),
            launches=10 if on_tpu else 4,
            apart=2 * self.memory(call) if on_tpu else 0,
        )
        rows, computed = _rows_computed(call)
        return found.over(computed, rows)

    def plan(self, call: Call) -> Plan:
        """Return how a call is computed."""
        form = "tpu" if call.platform == "tpu" else "gpu"
        interpreted = _INTERPRETED.get()
        if interpreted is not None:
            return Plan(form, *[interpreted.tiling] * 3, interpret=True)
        return Plan(form, *tilings(call), interpret=False)


@contextmanager
def interpreted(t: int = 16, s: int = 16, part: int = 32) -> Iterator[None]:
    """Run the kernels in Pallas's interpreter, on any platform and slowly: for tests.

    Args:
        t: queries of a tile.
        s: keys of a tile.
        part: keys of a part.

    Example:
        >>> with interpreted():
        ...     BACKEND.platforms is None
        True
    """
    token = _INTERPRETED.set(Interpreted(Tiling(t, s, part=part)))
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def _heads_first_bytes(call: Call) -> int:
    b, n, t, s = call.shape
    tokens = b * (n * t + call.key.shape[2] * s)
    width = call.query.shape[3] + call.value.shape[3]
    return call.query.dtype.itemsize * tokens * width


def _rows_computed(call: Call) -> tuple[int, int]:
    # How many queries a head has, and how many whole tiles of them have.
    _, n, t, _ = call.shape
    tile = tilings(call)[0].t
    # A tile of few queries holds all heads that share their keys.
    together = t * (n // call.key.shape[2])
    rows = max(together if together <= tile else t, 1)
    return rows, bounds.tiles(rows, tile) * tile


def _refuse_sizes(call: Call) -> str | None:
    h, v = call.query.shape[3], call.value.shape[3]
    if max(h, v) > WIDEST:
        return (
            f"fused takes head widths up to {WIDEST}, whose tiles fit every chip; got h={h}, v={v}."
            ' Pass backend="blocked"'
        )
    if not isinstance(call.shape[0], int):
        return (
            f"fused needs a batch that is a number; got {call.shape[0]}. Export for each size, or"
            ' pass backend="blocked"'
        )
    return None


def _refuse_chip(call: Call) -> str | None:
    if call.platform == "tpu":
        if call.query.dtype == jnp.float16:
            return (
                "fused has no float16 on TPU, which multiplies bfloat16; got dtype float16. Cast"
                " query, key and value to bfloat16"
            )
        return None
    if find_spec("jax.experimental.pallas.triton") is None:
        return (
            "fused needs a JAX that lowers Pallas to Triton, as 0.10 to 0.12 do; got JAX"
            f' {jax.__version__}. Pass backend="blocked"'
        )
    if 0 < compute_capability() < AMPERE:
        return (
            f"fused needs an NVIDIA GPU of compute capability {AMPERE} or newer; got"
            f' {compute_capability()}. Pass backend="blocked"'
        )
    return None


def _refuse_numbers(call: Call) -> str | None:
    if isinstance(call.precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return (
            "fused takes a precision that has a name; got the algorithm"
            f' {call.precision}. Pass "default", "high" or "highest"'
        )
    return None


def _refuse_mask(call: Call) -> str | None:
    for part in flat(call.mask).parts:
        if not isinstance(part, KNOWN):
            return (
                f"fused has no form for a mask of type {type(part).__name__}. Pass the mask as a"
                " boolean array"
            )
    return None


def _refuse_functions(call: Call) -> str | None:
    functions = [part.function for part in flat(call.mask).parts if isinstance(part, Where)]
    halves = [Halves(function, 0) for function in functions]
    score = score_halves(call)
    for one in halves if score is None else [*halves, score]:
        if one.refused is not None:
            return (
                "fused computes a function of indices where it is arithmetic of numbers that follow"
                f" from the query or from the key alone; got {one.refused} in"
                f" {one.function.__name__}. Pass what it looks up as a bias or a boolean array, or"
                ' backend="blocked"'
            )
        if one.wide is not None:
            return (
                f"fused computes functions of indices in 32 bits; got {one.wide} in"
                f" {one.function.__name__}. Cast what it captures and converts to int32 or float32,"
                ' or pass backend="blocked"'
            )
    return None


BACKEND = Fused()
