"""cuDNN's fused attention on NVIDIA GPUs: half precision, memory linear in the number of tokens. Source: `jax.nn`."""

from collections.abc import Callable
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.xla import attend_dense, refuse_options
from flax_attn.functional.mask_parts import Causal, Lengths, Window
from flax_attn.functional.reference import _finite

_FILLS = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}  # what jax adds to a hidden score


def refuse(call: Call) -> str | None:
    """Return why cuDNN cannot honour the call, or None."""
    h, dtype = call.query.shape[-1], call.query.dtype.name
    if call.platform != "gpu":
        return f'cudnn runs on NVIDIA GPUs; got platform "{call.platform}". Pass backend="auto"'
    if not any(find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        return 'cudnn needs the CUDA plugin of JAX, which is not installed: pip install "jax[cuda]"'
    if dtype not in _FILLS:
        return f"cudnn needs bfloat16 or float16; got {dtype}"
    if h % 8 or h > 128:
        return f"cudnn needs a head width that is a multiple of 8 and at most 128 to run on every GPU; got h={h}"
    if isinstance(call.scale, jax.Array):
        return f"cudnn needs a scale that is known before tracing; got {call.scale}. Multiply it into the query"
    if call.soft_cap is not None:
        return f'cudnn has no soft cap; got soft_cap={call.soft_cap}. Pass backend="auto"'
    return refuse_options("cudnn", call) or (None if _keeps(call) else _refuse_array(call))


def _refuse_array(call: Call) -> str | None:
    _, _, t, s = call.shape
    if call.bias is not None and call.bias.dtype != call.query.dtype:
        return (
            f"cudnn adds a bias in the dtype of the query, {call.query.dtype.name}; got {call.bias.dtype.name}. "
            "Cast it where the loss of digits is welcome"
        )
    if t % 2 or s % 2:
        return f"cudnn needs even t and s for a bias or a mask that is an array; got t={t}, s={s}. Pad by one token"
    if s % 128 == 64:
        return (
            "cudnn has kernels that return NaN gradients for strongly negative scores under a bias or a mask that is "
            f"an array when s % 128 == 64; got s={s}. Pad the keys"
        )
    return None


def attend(call: Call) -> Array:
    """Return the output; causal masks, sliding windows and lengths stay structure, all others become an array."""
    try:
        if _keeps(call):
            return attend_band(call, _kernel)
        return attend_dense(call, partial(_array_kernel, call), _FILLS[call.query.dtype.name])
    except NotImplementedError as limit:  # of this GPU or of this version of cuDNN
        raise Unsupported(f"cudnn: {limit}") from limit


def memory(call: Call) -> int:
    """Return the bytes of finite copies of query, key and value and of the raw output, and of the array if any."""
    copies = sum(x.size for x in (call.query, call.query, call.key, call.value))
    array = 0 if _keeps(call) else array_size(call)
    return (copies + array) * call.query.dtype.itemsize


class Band(NamedTuple):
    """Query `i` sees key `j` when `i - left <= j <= i + right`, `i < query` and `j < key`; None is unbounded."""

    left: int | None
    right: int | None
    query: Array  # (b,): how many queries, from the first, see anything
    key: Array  # (b,)


def is_band(call: Call) -> bool:
    """Return whether the whole mask is a `Band`, so that no array has to be made of it."""

    def fits(part):
        return isinstance(part, Lengths) or (isinstance(part, Causal | Window) and _zero(part.offset))

    return call.bias is None and all(map(fits, call.mask.parts))


def sides(call: Call) -> tuple[int | None, int | None]:
    """Return how many keys a query sees to its left and to its right; None where that hides nothing."""
    _, _, t, s = call.shape
    windows = [part for part in call.mask.parts if isinstance(part, Window)]
    causal = [0 for part in call.mask.parts if isinstance(part, Causal)]
    left = min((w.left for w in windows if w.left is not None), default=t)
    right = min((*causal, *(w.right for w in windows if w.right is not None)), default=s)
    return left if left < t - 1 else None, right if right < s - 1 else None


def has_lengths(call: Call) -> bool:
    """Return whether the mask hides padding."""
    return any(isinstance(part, Lengths) for part in call.mask.parts)


def attend_band(call: Call, kernel: Callable[[Call, Band, Array, Array, Array], Array]) -> Array:
    """Return `kernel(call, band, query, key, value)` under the contract, without an array over (t, s).

    The kernel gets finite numbers and at least one query and one key a row; what it makes of padding is zeroed.
    """
    (query, query_ok), (key, key_ok), (value, value_ok) = map(_finite, (call.query, call.key, call.value))
    band = _band(call)
    real = jnp.maximum(band.query, 1), jnp.maximum(band.key, 1)
    output = kernel(call, Band(band.left, band.right, *real), query, key, value)
    sees = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :, None] < band.query[:, None, None]
    poisoned = sees & ~(query_ok & _all_ok(band, query.shape[1], query.shape[2], key_ok & value_ok))
    output = jnp.where(sees[..., None], output, 0)
    return output * jnp.where(poisoned, jnp.nan, 1).astype(output.dtype)[..., None]


def array_size(call: Call) -> int:
    """Return the elements of mask and bias as one array: axes b and n count only where one of them depends on them."""
    _, _, t, s = call.shape
    mask = jax.eval_shape(lambda mask: mask.block(jnp.arange(t), jnp.arange(s)), call.mask).shape
    bias = mask if call.bias is None else call.bias.shape
    return max(mask[0], bias[0]) * max(mask[1], bias[1]) * t * s


def _keeps(call: Call) -> bool:
    # cuDNN knows a left window only together with causal, and counts positions from other ends when t != s.
    _, _, t, s = call.shape
    return is_band(call) and (sides(call) == (None, None) or (t == s and sides(call)[1] == 0))


def _kernel(call: Call, band: Band, query: Array, key: Array, value: Array) -> Array:
    structure = {"is_causal": band.right == 0, "local_window_size": None if band.left is None else (band.left, 0)}
    return _attention(call, query, key, value, lengths=(band.query, band.key), **structure)


def _array_kernel(call: Call, *arrays: Array | None) -> Array:
    b, _, t, s = call.shape
    return _attention(call, *arrays, lengths=(jnp.full(b, t, jnp.int32), jnp.full(b, s, jnp.int32)))


def _attention(call: Call, *arrays: Any, lengths: tuple[Array, Array], **structure: Any) -> Array:
    _, _, t, s = call.shape
    # Lengths even where nothing is padded: without them cuDNN's gradients count slots past a last tile that is not full
    if has_lengths(call) or t % 128 or s % 128:
        structure |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    return jax.nn.dot_product_attention(*arrays, scale=float(call.scale), implementation="cudnn", **structure)


def _zero(offset) -> bool:
    return isinstance(offset, int) and offset == 0


def _band(call: Call) -> Band:
    _, _, t, s = call.shape
    (left, right), query, key = sides(call), _length(call, "query", t), _length(call, "key", s)
    # A window that ends left of the first padded key leaves later queries with nothing to see.
    query = query if left is None else jnp.minimum(query, key + left)
    return Band(left, right, jnp.where(key > 0, query, 0), key)


def _length(call: Call, name: str, size: int) -> Array:
    given = (getattr(part, name) for part in call.mask.parts if isinstance(part, Lengths))
    whole = jnp.full(call.query.shape[0], size, jnp.int32)
    rows = (jnp.asarray(length, jnp.int32).reshape(-1) for length in given if length is not None)
    return jnp.maximum(reduce(jnp.minimum, rows, whole), 0)


def _all_ok(band: Band, t: int, n: int, key_ok: Array) -> Array:
    # Whether all keys of a query's band are finite, `(b, t, n)`: a difference of two running counts.
    _, s, k = key_ok.shape
    rows = jnp.arange(t, dtype=jnp.int32)[None, :]
    first = jnp.zeros_like(rows) if band.left is None else jnp.clip(rows - band.left, 0, s)
    last = jnp.full_like(rows, s) if band.right is None else jnp.clip(rows + band.right + 1, 0, s)
    last = jnp.minimum(last, band.key[:, None])
    bad = jnp.pad(jnp.cumsum(~key_ok, axis=1), ((0, 0), (1, 0), (0, 0)))
    upto = jnp.take_along_axis(bad, last[..., None], axis=1), jnp.take_along_axis(bad, first[..., None], axis=1)
    return jnp.repeat(upto[0] == upto[1], n // k, axis=2)
