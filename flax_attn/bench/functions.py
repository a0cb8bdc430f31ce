"""Implementations of attention on query, key and value, and the formula to compare them with."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from flax_attn.attention import dot_product_attention
from flax_attn.bench.implementation import (
    Arrays,
    Implementation,
    PreparedCall,
    as_float64,
    prepare_jax,
    prepare_torch,
    torch_tensor,
)
from flax_attn.bench.workload import Workload, inputs, with_gradients
from flax_attn.parity.tolerance import DRAWS

JAX_LAYOUT, TORCH_LAYOUT = "b t n h", "b n t h"
NAMES = ("output", "query", "key", "value")  # the output, and the gradients of the inputs
ROWS = 512  # queries at a time, where the formula is computed in blocks


def functions(backends: Iterable[str], platform: str) -> list[Implementation]:
    """Return our backends, then the other implementations; ratios are about the first."""
    rest = _ON_GPU if platform == "gpu" else (Implementation("torch SDPA", _torch_sdpa(), "torch"),)
    return [*(ours(backend) for backend in backends), *rest, *_ANYWHERE]


def steps(platform: str) -> list[Implementation]:
    """Return what computes a step of decoding: ours, and PyTorch."""
    # `auto` takes another backend where there are few keys.
    mine = [over_cache(name) for name in ("auto", "decode")]
    return [*mine, *functions((), platform)[: -len(_ANYWHERE)]]


def ours(backend: str) -> Implementation:
    """Return `dot_product_attention` with a backend."""

    def attend(work: Workload, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, mask=work.mask(), backend=backend)

    return _in_jax(f"ours {backend}", attend)


def over_cache(backend: str) -> Implementation:
    """Return `dot_product_attention` of keys and values that are stored heads first."""

    def attend(work: Workload, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        # A cache stores heads first; the call transposes what it is given, as a layer does.
        arrays = [rearrange(x, f"{TORCH_LAYOUT} -> {JAX_LAYOUT}") for x in (query, key, value)]
        output = dot_product_attention(*arrays, mask=work.mask(), backend=backend)
        return rearrange(output, f"{JAX_LAYOUT} -> {TORCH_LAYOUT}")

    return _in_jax(f"ours {backend}", attend, TORCH_LAYOUT)


def probe(work: Workload) -> tuple[int, slice]:
    """Return the batch row and the heads that are compared.

    They are in the middle, so that reversing either axis changes them. One head, since the formula
    on all of them would take longer than the measurement; all heads of a decoding step, since the
    error of a single token is that of too few numbers.
    """
    middle = work.n // 2
    return work.b // 2, slice(None) if work.step else slice(middle, middle + 1)


def formula(work: Workload, dtype: str) -> Arrays:
    """Return output and gradients at the probe, computed by the reference backend in `dtype`."""
    row, heads = probe(work)
    # One row and one head are the same function as all of them.
    arrays = [jnp.asarray(x[row : row + 1, :, heads].astype(dtype)) for x in inputs(work)]
    # In blocks of rows, so that a long head fits in memory; not in lower dtypes, where gradients
    # summed over blocks are rounded each time, and the allowed error would grow.
    rows = ROWS if jnp.finfo(dtype).bits >= 32 else work.t
    found = jax.jit(with_gradients(lambda *x: _in_blocks(work, rows, *x), work.backward))(*arrays)
    return {name: np.asarray(x[0], np.float64) for name, x in zip(NAMES, found, strict=False)}


def _in_blocks(
    work: Workload, rows: int, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    if work.step:
        return dot_product_attention(query, key, value, mask=work.mask(), backend="reference")

    def block(start_and_query):
        start, query = start_and_query
        return dot_product_attention(query, key, value, mask=work.mask(start), backend="reference")

    count = -(-work.t // rows)
    rest = count * rows - work.t
    padded = jnp.pad(query, ((0, 0), (0, rest), (0, 0), (0, 0)))
    blocks = rearrange(padded, "b (i r) n h -> i b r n h", i=count)
    starts = rows * jnp.arange(count, dtype=jnp.int32)
    # Recomputed in the backward pass: else the scores of all blocks would be kept for it.
    output = jax.lax.map(jax.checkpoint(block), (starts, blocks))
    return rearrange(output, "i b r n h -> b (i r) n h")[:, : work.t]


def torch_steps(work: Workload) -> Iterator[Arrays]:
    """Return a step's output at the probe by the formula in PyTorch, for several orders of keys.

    The step sees all of them, so that their order changes nothing but the rounding.
    """
    row, _ = probe(work)
    query, key, value = (torch_tensor(x[row].swapaxes(0, 1)) for x in inputs(work)[:3])
    for seed in range(DRAWS):
        order = _order(work, seed)
        output = _step_in_order(query, key[:, order], value[:, order])
        yield {"output": as_float64(output).swapaxes(0, 1)}


def _order(work: Workload, seed: int) -> np.ndarray:
    # Of a window the last keys are seen.
    return work.t - 1 - np.random.default_rng(seed).permutation(work.pairs)


def _step_in_order(query: Any, key: Any, value: Any) -> Any:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


def _at_probe(work: Workload, layout: str) -> Callable[[Any], Arrays]:
    def named(result: tuple) -> Arrays:
        pairs = zip(NAMES, result, strict=False)  # without gradients the output alone
        return {name: as_float64(_pick(x, work, layout)) for name, x in pairs}

    return named


def _pick(x: Any, work: Workload, layout: str) -> Any:
    """Return what is compared of an array, `(t, n, h)`."""
    row, heads = probe(work)
    return x[row][:, heads] if layout == JAX_LAYOUT else x[row][heads].swapaxes(0, 1)


def _in_jax(
    name: str, attend: Callable[..., Any], layout: str = JAX_LAYOUT, package: str = "jax"
) -> Implementation:
    def prepare(work: Workload) -> PreparedCall:
        arguments = tuple(rearrange(x, f"{JAX_LAYOUT} -> {layout}") for x in inputs(work))
        return prepare_jax(lambda *x: attend(work, *x), arguments, work, _at_probe(work, layout))

    return Implementation(name, prepare, package)


def _jax_nn(implementation: Literal["cudnn"] | None) -> Callable[..., jax.Array]:
    return lambda work, q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation=implementation
    )


def _attnax(work: Workload, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    import attnax  # pyright: ignore[reportMissingImports]

    return attnax.flash_attention(query, key, value, mask=attnax.make_causal_mask(work.t))


def _torch_sdpa(kernel: str | None = None) -> Callable[[Workload], PreparedCall]:
    def prepare(work: Workload) -> PreparedCall:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attend(query, key, value):
            if kernel is None:
                # Of one query, the last, is_causal would say that it sees key 0 alone.
                causal = not work.step
                return scaled_dot_product_attention(query, key, value, is_causal=causal)
            one = getattr(SDPBackend, kernel)
            with sdpa_kernel(one):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        tensors = []
        for x in inputs(work):
            heads_first = rearrange(x, f"{JAX_LAYOUT} -> {TORCH_LAYOUT}")
            tensors.append(torch_tensor(heads_first))
        # The last is the cotangent, and no input.
        learned = tensors[:3]
        named = _at_probe(work, TORCH_LAYOUT)
        return prepare_torch(attend, tensors, learned, work, named)

    return prepare


_ANYWHERE = (
    _in_jax("jax.nn", _jax_nn(None)),
    _in_jax("attnax flash", _attnax, TORCH_LAYOUT, "attnax"),
)
_ON_GPU = (
    Implementation("torch SDPA flash", _torch_sdpa("FLASH_ATTENTION"), "torch"),
    Implementation("torch SDPA cudnn", _torch_sdpa("CUDNN_ATTENTION"), "torch"),
    Implementation("torch SDPA efficient", _torch_sdpa("EFFICIENT_ATTENTION"), "torch"),
    _in_jax("jax.nn cudnn", _jax_nn("cudnn")),
)
