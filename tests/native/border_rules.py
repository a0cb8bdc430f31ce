"""Define valid calls of the C++ kernels and their results independently, in NumPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

NUMBERS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Array:
    """An array of a call, or the shape of a result, where `values` is None."""

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray | None = None
    transposed: bool = False  # as XLA stores it before the call

    def is_(self, dtype: str, *shape: int) -> bool:
        return (self.dtype, self.shape) == (dtype, shape)

    def wide(self, dtype: str = "float64") -> np.ndarray:
        return np.asarray(self.values).astype(dtype)


@dataclass(frozen=True)
class Border:
    """One call: a function of the library, its arrays and results by name, and its options."""

    function: str
    arrays: dict[str, Array]
    results: dict[str, Array]
    options: dict[str, Any]


def attend(call: Border, dtype: str) -> dict[str, np.ndarray]:
    """Return the results of forward, computed in a dtype."""
    x = call.arrays
    *_, value, scores, visible = scores_of(call, dtype)
    log_e = np.log2(np.e).astype(dtype)
    scores = np.where(visible, scores * log_e, -np.inf)
    sinks = x["sinks"].wide(dtype)[..., None] * log_e
    has_sinks = x["sinks"].shape[-1] > 0
    top = scores.max(axis=-1, initial=-np.inf)
    top = np.maximum(top, sinks) if has_sinks else top
    top = np.where(np.isfinite(top), top, 0)
    exps = np.exp2(scores - top[..., None])
    total = exps.sum(axis=-1) + (np.exp2(sinks - top) if has_sinks else 0)
    weights = exps / np.where(total == 0, 1, total)[..., None]
    return {
        "output": np.einsum("...nts,...snv->...tnv", weights, value),
        "top": top,
        "total": total,
    }


def scores_of(call: Border, dtype: str) -> tuple[np.ndarray, ...]:
    """Return query, key and value by head, tokens first, the capped scores and their visibility."""
    x, options = call.arrays, call.options
    query, key, value = (x[name].wide(dtype) for name in ("query", "key", "value"))
    if options["heads_first"]:
        key, value = (np.swapaxes(one, -3, -2) for one in (key, value))
    group = query.shape[-2] // key.shape[-2]
    key, value = (np.repeat(one, group, axis=-2) for one in (key, value))
    scores = np.einsum("...tnh,...snh->...nts", query, key) * options["scale"].astype(dtype)
    if options["soft_cap"] > 0:
        scores = options["soft_cap"].astype(dtype) * np.tanh(
            scores / options["soft_cap"].astype(dtype)
        )
    j = np.arange(key.shape[-3])
    visible = (j >= x["start"].values[..., None]) & (j < x["stop"].values[..., None])
    if x["key_segment"].shape[-1]:
        visible &= x["query_segment"].values[..., None] == x["key_segment"].values[..., None, :]
    visible = visible[..., None, :, :]
    if "dense" in x:
        visible = visible & x["dense"].values
    return query, key, value, scores, visible


def gradients(call: Border, dtype: str) -> dict[str, np.ndarray]:
    """Return the results of backward, computed in a dtype."""
    x, options = call.arrays, call.options
    query, key, value, scores, visible = scores_of(call, dtype)
    cotangent, top, total = (
        x[name].wide(dtype)[..., None] for name in ("cotangent", "top", "total")
    )
    cotangent = cotangent[..., 0]
    exponents = np.where(visible, scores * np.log2(np.e).astype(dtype), -np.inf) - top
    weights = np.exp2(exponents) / np.where(total == 0, 1, total)
    delta = np.moveaxis((x["output"].wide(dtype) * cotangent).sum(axis=-1), -1, -2)
    change = weights * (np.einsum("...tnv,...snv->...nts", cotangent, value) - delta[..., None])
    if options["soft_cap"] > 0:
        change = change * (1 - np.square(scores / options["soft_cap"].astype(dtype)))
    change = change * options["scale"].astype(dtype)
    d_key = np.einsum("...nts,...tnh->...snh", change, query)
    d_value = np.einsum("...nts,...tnv->...snv", weights, cotangent)
    k = x["key"].shape[-3 if options["heads_first"] else -2]
    d_key, d_value = (_sum_of_groups(one, k) for one in (d_key, d_value))
    return {
        "d_query": np.einsum("...nts,...snh->...tnh", change, key),
        "d_key": d_key,
        "d_value": d_value,
        "delta": delta,
    }


def _sum_of_groups(x: np.ndarray, k: int) -> np.ndarray:
    return x.reshape(*x.shape[:-2], k, x.shape[-2] // k, x.shape[-1]).sum(axis=-2)


def products(call: Border, dtype: str) -> dict[str, np.ndarray]:
    x = call.arrays["x"].wide(dtype)
    matrix = call.arrays["matrix"].wide(dtype)
    return {"result": x @ (matrix.T if call.options["transposed"] else matrix)}


def grouped_products(call: Border, dtype: str) -> dict[str, np.ndarray]:
    left, right = (call.arrays[name].wide(dtype) for name in ("left", "right"))
    form, start = int(call.options["form"]), 0
    result = np.zeros(call.results["result"].shape, dtype)
    for group, size in enumerate(call.arrays["sizes"].values):
        stop = min(start + max(int(size), 0), len(left))
        if form == 2:
            result[group] = left[start:stop].T @ right[start:stop]
        else:
            result[start:stop] = left[start:stop] @ (right[group].T if form else right[group])
        start = stop
    return {"result": result}


def written(call: Border, dtype: str) -> dict[str, np.ndarray]:
    """Return a cache with new tokens in it."""
    result = call.arrays["cached"].wide(dtype).copy()
    new, slots = call.arrays["new"].wide(dtype), call.arrays["slots"].values
    for row, slots_of_row in enumerate(slots):
        for token, slot in enumerate(slots_of_row):
            if 0 <= slot < result.shape[2]:
                result[row, :, slot] = new[row, token]
    return {"result": result}


def right_attention(call: Border) -> bool:
    """Return whether a call of forward or backward keeps every rule."""
    x, y, options = call.arrays, call.results, call.options
    if len(x["query"].shape) < 4 or x["query"].dtype not in NUMBERS or not options["soft_cap"] >= 0:
        return False
    *batch, t, n, h = x["query"].shape
    dtype, key, value = x["query"].dtype, x["key"].shape, x["value"].shape
    if len(key) < 3 or not value:
        return False
    s, k = (key[-2], key[-3]) if options["heads_first"] else (key[-3], key[-2])
    v, keys, segments = value[-1], key[-3:-1], call.arrays["query_segment"].shape[-1:] != (0,)
    if min(t, n, h, s, k, v) == 0 or n % k:
        return False
    rows = [y["top"], y["total"]] if "top" in y else [x["top"], x["total"], y["delta"]]
    output = y["output"] if "output" in y else x["output"]
    wide = not options.get("few", False) and output.dtype == "float32"
    outputs = [output.is_("float32" if wide else dtype, *batch, t, n, v)]
    if "cotangent" in x:
        outputs.append(x["cotangent"].is_(dtype, *batch, t, n, v))
    ranges = [x["start"].is_("int32", *batch, t), x["stop"].is_("int32", *batch, t)]
    own = [
        x["key"].is_(dtype, *batch, *keys, h),
        x["value"].is_(dtype, *batch, *keys, v),
        x["sinks"].is_("float32", *batch, n) or x["sinks"].is_("float32", *batch, 0),
        x["query_segment"].is_("int32", *batch, t if segments else 0),
        x["key_segment"].is_("int32", *batch, s if segments else 0),
    ]
    if "dense" in x:
        own.append(right_dense(x["dense"], batch, n, t, s))
    made = {"d_query": (t, n, h), "d_key": (s, k, h), "d_value": (s, k, v)}
    own += [y[name].is_(dtype, *batch, *shape) for name, shape in made.items() if name in y]
    own += [one.is_("float32", *batch, n, t) for one in rows]
    return all(ranges + own + outputs)


def right_dense(dense: Array, batch: list[int], n: int, t: int, s: int) -> bool:
    """Return whether a dense mask fits a call."""
    if len(dense.shape) != len(batch) + 3:
        return False
    *leading, heads, queries, _ = dense.shape
    leading_fit = leading[:-1] == batch[:-1] and leading[-1] in (1, batch[-1])
    sizes_fit = heads in (1, n) and queries in (1, t)
    return leading_fit and sizes_fit and dense.is_("bool", *leading, heads, queries, s)


def right_product(call: Border) -> bool:
    x, matrix, result = call.arrays["x"], call.arrays["matrix"], call.results["result"]
    if x.dtype not in NUMBERS or len(x.shape) != 2 or len(result.shape) != 2:
        return False
    m, d_in, d_out = *x.shape, result.shape[1]
    shape = (d_out, d_in) if call.options["transposed"] else (d_in, d_out)
    return matrix.is_(x.dtype, *shape) and (
        result.is_(x.dtype, m, d_out) or result.is_("float32", m, d_out)
    )


def right_grouped(call: Border) -> bool:
    left, right, sizes = (call.arrays[name] for name in ("left", "right", "sizes"))
    result, form = call.results["result"], call.options["form"]
    matrices, rows = (result, right) if form == 2 else (right, result)
    if (
        form not in (0, 1, 2)
        or left.dtype not in NUMBERS
        or len(left.shape) != 2
        or len(matrices.shape) != 3
    ):
        return False
    m, (groups, d_in, d_out) = left.shape[0], matrices.shape
    own, other = (d_out, d_in) if form == 1 else (d_in, d_out)
    shapes = left.is_(left.dtype, m, own) and rows.is_(left.dtype, m, other)
    return shapes and matrices.is_(left.dtype, groups, d_in, d_out) and sizes.is_("int32", groups)


def right_writing(call: Border) -> bool:
    """Return whether a call of write_tokens keeps every rule."""
    cached, new, slots = (call.arrays[name] for name in ("cached", "new", "slots"))
    if cached.dtype not in ("bfloat16", "float16") or len(cached.shape) != 4 or not slots.shape:
        return False
    b, k, _, h = cached.shape
    t = slots.shape[-1]
    own = new.is_(cached.dtype, b, t, k, h) and slots.is_("int32", b, t)
    return own and call.results["result"].is_(cached.dtype, *cached.shape)
