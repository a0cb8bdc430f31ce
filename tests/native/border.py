"""Call the C++ kernels through XLA at random: valid calls are computed, invalid ones refused.

    python border.py LIBRARY [CALLS] [SEED]

What a right call is, and its result, stands in `border_rules`. The program ends with status 1 at
the first call that is computed although it is wrong, refused although it is right, or wrong in a
number; under the address sanitizer it ends where a byte beyond an array is touched.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from border_rules import (
    NUMBERS,
    Array,
    Border,
    attend,
    gradients,
    grouped_products,
    products,
    right_attention,
    right_grouped,
    right_product,
    right_writing,
    written,
)

from flax_attn import native
from flax_attn.parity import tolerance

SIZES = (1, 1, 2, 3, 4, 5, 8, 9, 17, 33, 70)
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def known(name: str) -> bool:
    """Return whether JAX has arrays of a dtype."""
    try:
        return jnp.zeros(1, name).dtype.name == name
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        return False


def all_dtypes() -> list[str]:
    """Return the dtypes of NumPy and ml_dtypes that JAX has arrays of."""
    small = [
        name
        for name, kind in vars(ml_dtypes).items()
        if isinstance(kind, type) and hasattr(kind, "dtype")
    ]
    usual = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    names = ["bool", *usual, "float16", "float32", "float64", "complex64", "complex128", *small]
    return [name for name in dict.fromkeys(names) if known(name)]


class Draw:
    """What calls are drawn from."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def size(self) -> int:
        return self.one(*SIZES)

    def normal(self, dtype: str, *shape: int) -> Array:
        return Array(dtype, shape, self.random.normal(size=shape).astype(dtype))

    def whole(self, dtype: str, *shape: int) -> Array:
        """Return small integers, of which sums are exact in every dtype."""
        return Array(dtype, shape, self.random.integers(-1, 2, shape).astype(dtype))

    def ids(self, low: int, high: int, *shape: int) -> Array:
        return Array("int32", shape, self.random.integers(low, high, shape).astype("int32"))

    def ends(self, s: int, *shape: int) -> Array:
        """Return the ends of ranges of keys, some far outside of them."""
        near = self.random.integers(-3, s + 4, shape)
        far = self.random.choice([LEAST, -1, 0, s, MOST], shape)
        return Array(
            "int32", shape, np.where(self.random.random(shape) < 0.2, far, near).astype("int32")
        )


def attention(draw: Draw) -> Border:
    batch = tuple(draw.one(1, 2, 3) for _ in range(draw.one(1, 1, 2, 3)))
    t, s, k, h, v = (draw.size() for _ in range(5))
    n, dtype, first = k * draw.one(1, 2, 3), draw.one(*NUMBERS), draw.one(False, True)
    keys = (k, s) if first else (s, k)
    segments = [(t, s), (0, 0)][draw.one(0, 1)]
    rows = draw.one(batch, (*batch[:-1], 1))
    visible = draw.random.random((*rows, draw.one(1, n), draw.one(1, t), s)) < 0.5
    dense = draw.one({"dense": Array("bool", visible.shape, visible)}, {})
    arrays = {
        "query": draw.normal(dtype, *batch, t, n, h),
        "key": draw.normal(dtype, *batch, *keys, h),
        "value": draw.normal(dtype, *batch, *keys, v),
        "sinks": draw.normal("float32", *batch, draw.one(0, n)),
        "start": draw.ends(s, *batch, t),
        "stop": draw.ends(s, *batch, t),
        "query_segment": draw.ids(0, 2, *batch, segments[0]),
        "key_segment": draw.ids(0, 2, *batch, segments[1]),
    }
    rows = Array("float32", (*batch, n, t))
    few = draw.one(False, True)
    output = Array(dtype if few else draw.one(dtype, "float32"), (*batch, t, n, v))
    results = {"output": output, "top": rows, "total": rows}
    options = {
        "scale": np.float32(h**-0.5),
        "soft_cap": np.float32(draw.one(0, 2)),
        "heads_first": first,
    }
    forward = Border("attention_forward", arrays | dense, results, options | {"few": few})
    if draw.one(False, True):
        return replace(forward, options=forward.options | {"differentiated": draw.one(False, True)})
    found = attend(forward, "float64")
    arrays |= {
        name: Array(x.dtype, x.shape, found[name].astype(x.dtype)) for name, x in results.items()
    }
    arrays["cotangent"] = draw.normal(dtype, *batch, t, n, v)
    shapes = {"d_query": (t, n, h), "d_key": (s, k, h), "d_value": (s, k, v)}
    gradients = {name: Array(dtype, (*batch, *shape)) for name, shape in shapes.items()}
    return Border("attention_backward", arrays | dense, gradients | {"delta": rows}, options)


def matrix_product(draw: Draw) -> Border:
    m, d_in, d_out = (draw.size() for _ in range(3))
    dtype, transposed = draw.one(*NUMBERS), draw.one(False, True)
    matrix = (d_out, d_in) if transposed else (d_in, d_out)
    arrays = {"x": draw.whole(dtype, m, d_in), "matrix": draw.whole(dtype, *matrix)}
    results = {"result": Array(draw.one(dtype, "float32"), (m, d_out))}
    return Border("matrix_product", arrays, results, {"transposed": transposed})


def grouped_product(draw: Draw) -> Border:
    m, d_in, d_out, groups = (draw.size() for _ in range(4))
    dtype, form = draw.one(*NUMBERS), draw.one(0, 1, 2)
    sides = [
        ((m, d_in), (groups, d_in, d_out)),
        ((m, d_out), (groups, d_in, d_out)),
        ((m, d_in), (m, d_out)),
    ]
    result = [(m, d_out), (m, d_in), (groups, d_in, d_out)][form]
    sizes = draw.ids(0, 2 + 2 * m // groups, groups)
    if draw.one(False, False, True):
        sizes = Array(
            "int32",
            (groups,),
            draw.random.choice([LEAST, -1, 0, 1, m, MOST], groups).astype("int32"),
        )
    arrays = {
        "left": draw.whole(dtype, *sides[form][0]),
        "right": draw.whole(dtype, *sides[form][1]),
        "sizes": sizes,
    }
    return Border(
        "grouped_product", arrays, {"result": Array(dtype, result)}, {"form": np.int64(form)}
    )


def write_tokens(draw: Draw) -> Border:
    b, k, s, h, t = (draw.size() for _ in range(5))
    dtype = draw.one("bfloat16", "float16")
    arrays = {
        "cached": draw.normal(dtype, b, k, s, h),
        "new": draw.normal(dtype, b, t, k, h),
        "slots": draw.ends(s, b, t),
    }
    return Border("write_tokens", arrays, {"result": Array(dtype, (b, k, s, h))}, {})


def change(draw: Draw, call: Border) -> Border:
    """Return a call in which one thing is another, which may be right too."""
    kind = draw.one("options", "dtypes", *["array"] * 6)
    if kind == "options" and call.options:
        return replace(call, options=call.options | other_option(draw, call.options))
    if kind == "dtypes":
        return recast(call, next(iter(call.arrays.values())).dtype, draw.one(*DTYPES))
    side = draw.one("arrays", "arrays", "results")
    arrays = getattr(call, side)
    if not arrays:  # an earlier change has dropped its only one
        return call
    name = draw.one(*arrays)
    changed = arrays | {name: other_array(draw, arrays[name])}
    # A call without its dense mask is another one that is right, with the sums of the first.
    if name != "dense" and draw.one(*[False] * 7, True):
        changed.pop(name)
    return replace(call, **{side: changed})


def recast(call: Border, old: str, new: str) -> Border:
    """Return a call whose arrays of one dtype are of another: to each other they fit."""

    def cast(x: Array) -> Array:
        if x.dtype != old:
            return x
        return replace(
            x, dtype=new, values=None if x.values is None else np.ones(x.shape).astype(new)
        )

    arrays, results = (
        {name: cast(x) for name, x in side.items()} for side in (call.arrays, call.results)
    )
    return replace(call, arrays=arrays, results=results)


def other_option(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    name = draw.one(*options)
    if name == "form":
        return {name: np.int64(draw.one(-1, 0, 1, 2, 3, 2**32, 2**62))}
    if name == "soft_cap":
        return {name: np.float32(draw.one(-1, np.nan, 0, 1))}
    return {name: not options[name]} if isinstance(options[name], bool) else {}


def other_array(draw: Draw, x: Array) -> Array:
    kind = draw.one("dtype", "rank", "size", "size", "transposed")
    if kind == "transposed":
        return replace(x, transposed=len(x.shape) > 1)
    shape, dtype = x.shape, x.dtype
    if kind == "dtype":
        dtype = draw.one(*DTYPES)
    elif kind == "rank":
        shape = (draw.one(0, 1, 2),) * draw.one(0, 1, 2, 3) + shape
        shape = shape[draw.one(0, 0, 1, 2) :][: draw.one(0, 1, 2, 6)]
    elif shape:
        axis = draw.one(*range(len(shape)))
        shape = (
            *shape[:axis],
            draw.one(0, 1, 1, shape[axis] + 1, 2 * shape[axis], 257),
            *shape[axis + 1 :],
        )
    # Other numbers of the same shape would not go with the sums that backward is given.
    if (dtype, shape) == (x.dtype, x.shape):
        return x
    values = None if x.values is None else np.ones(shape).astype(dtype)
    return Array(dtype, shape, values)


@dataclass(frozen=True)
class Function:
    """A function of the library: how its calls are drawn, which are right, and what they return."""

    right: Callable[[Border], bool]
    formula: Callable[[Border, str], dict[str, np.ndarray]]
    factor: float | None  # of the error that is allowed, by tolerance.py; None for exact numbers


FUNCTIONS = {
    "attention_forward": Function(right_attention, attend, tolerance.LOW_FORWARD),
    "attention_backward": Function(right_attention, gradients, tolerance.LOW_GRADIENT),
    "matrix_product": Function(right_product, products, None),
    "grouped_product": Function(right_grouped, grouped_products, None),
    "write_tokens": Function(right_writing, written, None),
}


def run(call: Border) -> dict[str, np.ndarray]:
    """Return the results of a call that is made as any user of XLA may make it."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.results.values()]

    def computed(*arrays: jax.Array) -> Any:
        arrays = [
            x.swapaxes(-1, -2) if own.transposed else x
            for x, own in zip(arrays, given, strict=True)
        ]
        # With a side effect, the call is kept even if its results are not used.
        made = jax.ffi.ffi_call(native.target(call.function), shapes, has_side_effect=True)
        return made(*arrays, **call.options)

    given = list(call.arrays.values())
    stored = [np.swapaxes(x.values, -1, -2) if x.transposed else x.values for x in given]
    results = jax.jit(computed)(*(jnp.asarray(x) for x in stored))
    return {
        name: np.asarray(x).astype("float64") for name, x in zip(call.results, results, strict=True)
    }


def judge(call: Border, whole: bool) -> str | None:
    """Return what is wrong with the result of a call, or None.

    `whole` says whether all arrays of the call are there.
    """
    function = FUNCTIONS[call.function]
    right = whole and function.right(call)
    try:
        found = run(call)
    except jax.errors.JaxRuntimeError as error:
        ours = str(error).startswith(f"INVALID_ARGUMENT: flax_attn.{call.function}: ")
        return None if ours and not right else f"{'refused' if ours else 'another error'}: {error}"
    if not right:
        return "computed, although it is wrong"
    exact, plain = (function.formula(call, dtype) for dtype in ("float64", "float32"))
    names = [name for name, x in exact.items() if x.size and name not in ("top", "total")]
    if function.factor is None:
        return next(
            (f"{name} is off" for name in names if not np.array_equal(found[name], exact[name])),
            None,
        )
    eps = float(jnp.finfo(call.arrays["query"].dtype).eps)
    sides = (
        {name: side[name].astype("float64") for name in names} for side in (found, plain, exact)
    )
    ours, theirs, truth = sides
    excess = tolerance.lower_dtype(ours, [theirs], truth, function.factor, eps)
    wrong = {name: amount for name, amount in excess.items() if not amount <= 1}
    return f"off by {wrong} of what is allowed" if wrong else None


def described(call: Border) -> str:
    lines = [f"{side}: {name} {x.dtype}{list(x.shape)}" for side in ("arrays", "results")
             for name, x in getattr(call, side).items()]  # fmt: skip
    return "\n  ".join([call.function, str(call.options), *lines])


def main(library: str, calls: int = 300, seed: int = 0) -> int:
    """Run calls drawn from a seed, and return how many are wrong."""
    native.find_spec = lambda name: SimpleNamespace(origin=library)
    assert native.library() is not None
    refused = failed = 0
    for i in range(calls):
        draw = Draw([seed, i])
        kinds = (attention, attention, matrix_product, grouped_product, write_tokens)
        call = draw.one(*kinds)(draw)
        whole = (call.arrays.keys(), call.results.keys())
        for _ in range(draw.one(0, 1, 1, 2)):
            call = change(draw, call)
        complete = (call.arrays.keys(), call.results.keys()) == whole
        refused += not (complete and FUNCTIONS[call.function].right(call))
        wrong = judge(call, complete)
        if wrong is not None:
            failed += 1
            print(f"call {i} of seed {seed} was {wrong}\n  {described(call)}", flush=True)
    print(f"{calls} calls, {refused} of them wrong ones, {failed} not as they should be")
    return failed


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    DTYPES = all_dtypes()
    sys.exit(min(main(sys.argv[1], *map(int, sys.argv[2:])), 1))
