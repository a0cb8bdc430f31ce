"""The cases that every backend has to compute as the reference does, and the reference for them."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import KeyedDropout, Mask
from flax_attn.functional.nonfinite import without_nonfinite_sinks
from flax_attn.functional.reference import reference_attention

HIDE = -np.inf
KEY = np.array([3, 14], np.uint32)
FAR = 2**40  # beyond every key
NEAR_THE_LARGEST = 1e30


def _fast() -> dict[str, int | bool]:
    # Every case is compiled, and run once. Older versions of XLA have emitters that take most of
    # that time.
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(jnp.negative, compiler_options=options)(0.0)
    except jax.errors.JaxRuntimeError:
        del options["xla_cpu_use_fusion_emitters"]
    return options


FAST = _fast()


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call, by the letters of `functional/shapes.py`."""

    b: int = 2
    t: int = 38
    s: int = 50
    n: int = 4
    k: int = 2
    h: int = 3
    v: int = 6

    @property
    def scores(self):
        return self.b, self.n, self.t, self.s


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        name: unique name in the table.
        mask: function of a class `Mask` and of the array constructor of its framework; None hides
            nothing.
        sizes: sizes of query, key and value.
        tiles: sizes of blocks and edge tiles for the blocked backend.
        bias: shape of the bias.
        hides: share of the bias that is -inf.
        sinks: logits of the sinks; True draws them at random.
        rate: dropout rate.
        change: function that changes the arrays, for numbers that are not finite or huge.
        nonfinite: whether a row sees a number that is not finite.
    """

    name: str
    mask: Callable | None = None
    sizes: Sizes = Sizes()
    tiles: tuple[int, int] = (16, 8)
    bias: tuple[int, ...] | None = None
    hides: float = 0.0
    sinks: Any = None
    rate: float = 0.0
    scale: float | None = None
    soft_cap: float | None = None
    change: Callable | None = None
    nonfinite: bool = False

    def draw(self, array: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(f"{self.name} {array}".encode())).normal(size=shape)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Query, key and value, and bias and sinks where there are any, in float64."""
        z = self.sizes
        shapes = {
            "query": (z.b, z.t, z.n, z.h),
            "key": (z.b, z.s, z.k, z.h),
            "value": (z.b, z.s, z.k, z.v),
        }
        shapes |= {} if self.bias is None else {"bias": self.bias}
        shapes |= {} if self.sinks is None else {"sinks": (z.n,)}
        made = {name: self.draw(name, shape) for name, shape in shapes.items()}
        if self.hides:
            made["bias"][np.random.default_rng(9).random(self.bias) < self.hides] = HIDE
        if self.sinks not in (None, True):
            made["sinks"] = np.array(self.sinks)
        if self.change is not None:
            self.change(**made)
        return made

    @property
    def cotangent(self) -> np.ndarray:
        z = self.sizes
        return self.draw("cotangent", (z.b, z.t, z.n, z.v))

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "soft_cap": self.soft_cap}

    def masked(self, kind: type, array: Callable) -> Any:
        return None if self.mask is None else self.mask(kind, array)

    @property
    def visible(self) -> np.ndarray:
        """What may be seen, the bias included."""
        mask = Mask() if self.mask is None else self.mask(Mask, jnp.asarray)
        bias = self.arrays.get("bias", np.zeros(()))
        return np.asarray(mask.materialise(*self.sizes.scores)) & (bias != HIDE)

    @property
    def empty_rows(self) -> np.ndarray:
        """Which rows of the output, `(b, t, n)`, may see nothing."""
        return ~self.visible.any(axis=-1).transpose(0, 2, 1)


def lengths(*values):
    return np.array(values, np.int32)


def random_mask(*shape, share=0.4):
    return np.random.default_rng(3).random(shape) < share


def put(at, number, *names):
    """Return a function that puts a number into those arrays, at some tokens of some rows."""

    def change(**arrays):
        for name in names:
            arrays[name][at] = number

    return change


def twins(query, key, **_):
    """Make every other key score as much as the one before.

    The largest score of a row is then shared, and has a gradient.
    """
    query[..., 0] = 0
    key[:, 1::2, :, 1:] = key[:, ::2, :, 1:]


SQUARE, TALL, LONE = Sizes(t=38, s=38), Sizes(t=50, s=22), Sizes(t=1, s=38)
SORTED = np.arange(38) // 9
UNSORTED = np.array([SORTED[::-1] % 3, (7 * np.arange(38)) % 4])
ENDS = lengths(2**31 - 1, -(2**31))
NOBODY, SOMEBODY = np.s_[1, 17:], np.s_[0, 5, 1]

IDS = np.random.default_rng(4).integers(0, 3, (2, 4, 50))


def _by_arrays(ids, other):
    return lambda b, n, i, j: (ids[b, n, j] == other[i % 30] % 3) & (i >= n)


MASKS = [
    Case("no mask"),
    Case("causal", lambda Mask, _: Mask.causal(), SQUARE),
    Case("causal, blocks of one strip", lambda Mask, _: Mask.causal(), SQUARE, (8, 8)),
    Case("causal, many strips", lambda Mask, _: Mask.causal(), Sizes(t=64, s=64), (32, 4)),
    Case("causal from the bottom", lambda Mask, _: Mask.causal(13)),
    Case("causal from the top", lambda Mask, _: Mask.causal(0)),
    Case("causal with empty rows", lambda Mask, _: Mask.causal(-5)),
    Case("causal, more queries than keys", lambda Mask, _: Mask.causal(-3), TALL),
    Case("causal that shows one key to one query", lambda Mask, _: Mask.causal(-37)),
    Case("causal that shows nothing", lambda Mask, _: Mask.causal(-38)),
    Case("causal at a traced offset", lambda Mask, array: Mask.causal(array(np.int32(-4)))),
    Case("causal at an offset a row", lambda Mask, array: Mask.causal(array(lengths(13, -8)))),
    Case(
        "two causal masks", lambda Mask, array: Mask.causal(5) & Mask.causal(array(lengths(9, 2)))
    ),
    Case("window within a block", lambda Mask, _: Mask.window(3, 2), SQUARE),
    Case("window beyond a block", lambda Mask, _: Mask.window(21, 18, 4)),
    Case("window to the left of its queries", lambda Mask, _: Mask.window(30, 1, -9)),
    Case("window to the right of its queries", lambda Mask, _: Mask.window(1, 30, 11)),
    Case("window open to the left", lambda Mask, _: Mask.window(None, 4, 3)),
    Case("window open to the right", lambda Mask, _: Mask.window(5, None, 3)),
    Case(
        "window open to the right, more queries than keys",
        lambda Mask, _: Mask.window(2, None, 0),
        TALL,
    ),
    Case("window without ends", lambda Mask, _: Mask.window(FAR, FAR, 3)),
    Case("window at an offset a row", lambda Mask, array: Mask.window(6, 3, array(lengths(0, 12)))),
    Case("sliding window", lambda Mask, _: Mask.sliding_window(7), SQUARE),
    Case("sliding window of one", lambda Mask, _: Mask.sliding_window(1), SQUARE),
    Case("sliding window that leaves the keys", lambda Mask, _: Mask.sliding_window(4, 1), TALL),
    Case("band that shows nothing", lambda Mask, _: Mask.causal(0) & Mask.window(0, None, 9)),
    Case(
        "band of three parts",
        lambda Mask, _: Mask.causal(9) & Mask.window(None, 3, 4) & Mask.window(20, None, 5),
    ),
    Case("key length", lambda Mask, _: Mask.lengths(key=23)),
    Case("query length", lambda Mask, _: Mask.lengths(query=20)),
    Case("lengths beyond the tokens", lambda Mask, _: Mask.lengths(query=FAR, key=FAR)),
    Case("key lengths, one of them 0", lambda Mask, array: Mask.lengths(key=array(lengths(29, 0)))),
    Case(
        "lengths",
        lambda Mask, array: Mask.lengths(query=array(lengths(11, 38)), key=array(lengths(50, 16))),
    ),
    Case(
        "causal lengths",
        lambda Mask, array: Mask.causal(4) & Mask.lengths(key=array(lengths(19, 50)), query=30),
    ),
    Case(
        "window over lengths",
        lambda Mask, array: Mask.window(6, 3, 2) & Mask.lengths(key=array(lengths(19, 40))),
    ),
    Case("segments", lambda Mask, array: Mask.segments(array(SORTED)), SQUARE),
    Case(
        "causal segments", lambda Mask, array: Mask.segments(array(SORTED)) & Mask.causal(), SQUARE
    ),
    Case("segments in any order", lambda Mask, array: Mask.segments(array(UNSORTED)), SQUARE),
    Case(
        "segments of other keys, some without any",
        lambda Mask, array: Mask.segments(
            array(np.arange(38) // 5 - 2), array(np.arange(50) // 13 * 2 - 2)
        ),
    ),
    Case(
        "segments of two integer types",
        lambda Mask, array: Mask.segments(
            array(UNSORTED.astype(np.int8) * 127),
            array((UNSORTED % 2).astype(np.uint32) * 127 + IDS[:, 0, :38] // 2),
        ),
        SQUARE,
    ),
    Case("causal at the ends of the integers", lambda Mask, array: Mask.causal(array(ENDS))),
    Case(
        "window at the ends of the integers",
        lambda Mask, array: Mask.window(2**31 - 10, FAR, array(ENDS)),
    ),
    Case(
        "prefix and lengths at the ends of the integers",
        lambda Mask, array: (
            Mask.prefix(array(ENDS[::-1].copy()), offset=array(ENDS))
            & Mask.lengths(query=array(ENDS), key=array(ENDS))
        ),
    ),
    Case("prefix", lambda Mask, _: Mask.prefix(19), SQUARE),
    Case("prefix with empty rows", lambda Mask, _: Mask.prefix(0, offset=-9)),
    Case(
        "prefix and offset a row",
        lambda Mask, array: Mask.prefix(array(lengths(22, 3)), offset=array(lengths(2, -5))),
    ),
    Case("window under a prefix", lambda Mask, _: Mask.prefix(19) & Mask.window(12, 9), SQUARE),
    Case("dense", lambda Mask, array: Mask.dense(array(random_mask(38, 50)))),
    Case("dense by head", lambda Mask, array: Mask.dense(array(random_mask(4, 38, 50)))),
    Case("dense by row", lambda Mask, array: Mask.dense(array(random_mask(2, 1, 38, 50)))),
    Case(
        "dense by row and head",
        lambda Mask, array: Mask.dense(array(random_mask(2, 4, 38, 50, share=0.1))),
    ),
    Case("dense over keys", lambda Mask, array: Mask.dense(array(random_mask(2, 1, 1, 50)))),
    Case("dense over queries", lambda Mask, array: Mask.dense(array(random_mask(4, 38, 1)))),
    Case(
        "dense that shows nothing", lambda Mask, array: Mask.dense(array(np.zeros((38, 50), bool)))
    ),
    Case(
        "function",
        lambda Mask, _: Mask.where(lambda b, n, i, j: (i // 7 == j // 9) | ((i + 2 * j) % 11 == 0)),
    ),
    Case(
        "function by row and head at an offset a row",
        lambda Mask, array: (
            Mask.where(_by_arrays(array(IDS), array(SORTED)), array(lengths(3, -2)))
            & Mask.lengths(key=47)
        ),
    ),
    Case(
        "everything at once",
        lambda Mask, array: (
            Mask.sliding_window(33)
            & Mask.prefix(array(lengths(9, 20)))
            & Mask.lengths(key=array(lengths(30, 38)))
            & Mask.segments(array(SORTED // 2))
            & Mask.dense(array(random_mask(4, 38, 38, share=0.7)))
        ),
        SQUARE,
        bias=(1, 4, 38, 38),
        hides=0.2,
        sinks=True,
        rate=0.3,
        scale=0.7,
        soft_cap=4.0,
    ),
]

SHAPES = [
    Case("one query", sizes=LONE),
    Case("one query, causal", lambda Mask, _: Mask.causal(37), LONE),
    Case("one query in a window", lambda Mask, _: Mask.sliding_window(5, 20), LONE),
    Case("one query and one key", lambda Mask, _: Mask.causal(), Sizes(t=1, s=1)),
    Case("one key", lambda Mask, _: Mask.causal(-4), Sizes(t=23, s=1)),
    Case("blocks that fit", lambda Mask, _: Mask.causal(32), Sizes(t=32, s=64)),
    Case("one head", lambda Mask, _: Mask.causal(), Sizes(b=1, t=19, s=19, n=1, k=1)),
    Case("multi-head", lambda Mask, _: Mask.causal(2), Sizes(t=21, s=23, n=3, k=3)),
    Case(
        "multi-query",
        lambda Mask, array: Mask.lengths(key=array(lengths(9, 21))),
        Sizes(t=19, s=23, n=6, k=1),
    ),
    *(
        Case(
            f"head width {h}",
            lambda Mask, _: Mask.causal(3),
            Sizes(b=1, t=18, s=22, n=2, k=1, h=h, v=h),
        )
        for h in (1, 7, 64, 80, 128, 256)
    ),
    Case(
        "values wider than queries",
        lambda Mask, _: Mask.causal(3),
        Sizes(b=1, t=18, s=22, n=2, k=1, h=8, v=80),
    ),
    Case("no batch rows", lambda Mask, _: Mask.causal(13), Sizes(b=0)),
    Case("no queries", lambda Mask, _: Mask.lengths(key=7), Sizes(t=0)),
]

OPTIONS = [
    Case("scale", scale=-1.7),
    Case("large logits", lambda Mask, _: Mask.causal(13), scale=1e4, change=twins),
    Case("soft cap", lambda Mask, _: Mask.causal(13), scale=3.0, soft_cap=1.5),
    Case(
        "soft cap and empty rows",
        lambda Mask, array: Mask.lengths(key=array(lengths(0, 9))),
        soft_cap=1.5,
    ),
    Case("sinks", sinks=True),
    Case("sinks and empty rows", lambda Mask, _: Mask.causal(-9), sinks=True),
    Case("sinks of minus infinity", lambda Mask, _: Mask.causal(-9), sinks=(HIDE, 0.3, HIDE, -2.0)),
    Case("sinks that take all", lambda Mask, _: Mask.causal(13), sinks=(1e4, -1e4, 40.0, 0.5)),
    Case("dropout", rate=0.4),
    Case("dropout in a window", lambda Mask, _: Mask.window(21, 3, 4), rate=0.6, sinks=True),
    Case(
        "dropout and empty rows",
        lambda Mask, array: Mask.lengths(key=array(lengths(0, 30))),
        rate=0.2,
    ),
    Case("bias", bias=(2, 4, 38, 50)),
    Case("bias of all rows", lambda Mask, _: Mask.causal(-6), bias=(38, 50), hides=0.3),
    Case("bias of every head", lambda Mask, _: Mask.causal(), SQUARE, bias=(4, 38, 38), hides=0.3),
    Case("bias of every row", lambda Mask, _: Mask.window(9, 4, 8), bias=(2, 1, 38, 50), hides=0.6),
    Case("bias of every key", lambda Mask, _: Mask.causal(7), bias=(2, 1, 1, 50), hides=0.5),
    Case(
        "bias of every query",
        lambda Mask, _: Mask.window(2, None, -7),
        bias=(1, 4, 38, 1),
        hides=0.3,
    ),
    Case("bias of one number", bias=(1, 1, 1, 1)),
    Case(
        "bias that hides all of some rows",
        lambda Mask, _: Mask.causal(4),
        bias=(2, 4, 38, 50),
        hides=0.9,
    ),
    Case(
        "bias under a soft cap",
        lambda Mask, _: Mask.causal(-3),
        bias=(4, 38, 50),
        hides=0.4,
        soft_cap=2.0,
    ),
    Case("bias that hides all, under a soft cap", bias=(1, 1, 38, 1), hides=0.4, soft_cap=2.0),
    Case(
        "bias under lengths",
        lambda Mask, array: Mask.lengths(key=array(lengths(31, 4))),
        bias=(2, 4, 38, 50),
    ),
    Case(
        "bias and dropout", lambda Mask, _: Mask.causal(5), bias=(2, 1, 38, 50), hides=0.3, rate=0.3
    ),
]


def hidden_slots(**arrays):
    """NaN, infinity and huge numbers where `Mask.lengths(query=17, key=17)` lets nobody look."""
    for name, number in (("query", np.nan), ("key", np.inf), ("value", np.nan)):
        arrays[name][0, 17:] = number
        arrays[name][1, 17:] = NEAR_THE_LARGEST


def hidden_by_bias(bias, key, value, **_):
    bias[..., 17:] = HIDE
    key[:, 17:], value[:, 30:] = np.nan, np.inf


NUMBERS = [
    Case(
        "sinks that are not finite",
        lambda Mask, _: Mask.causal(-9),
        sinks=(np.nan, 0.3, np.inf, HIDE),
        nonfinite=True,
    ),
    Case(
        "what a bias hides", lambda Mask, _: Mask.causal(5), bias=(4, 38, 50), change=hidden_by_bias
    ),
    Case(
        "what a bias hides of every query", bias=(2, 1, 1, 50), change=hidden_by_bias, soft_cap=2.0
    ),
    Case("what nobody sees", lambda Mask, _: Mask.lengths(query=17, key=17), change=hidden_slots),
    Case(
        "what nobody sees, causal",
        lambda Mask, _: Mask.causal(13) & Mask.lengths(query=17, key=17),
        change=hidden_slots,
    ),
    Case(
        "what nobody sees, dense",
        lambda Mask, array: Mask.dense(array((np.arange(38) < 17)[:, None] & (np.arange(50) < 17))),
        soft_cap=2.0,
        sinks=True,
        change=hidden_slots,
    ),
    Case(
        "what is to come",
        lambda Mask, _: Mask.causal(-21),
        change=put(np.s_[:, 17:], np.nan, "key", "value"),
    ),
    Case(
        "nan in a query whose weights are all dropped",
        lambda Mask, _: Mask.causal(),
        SQUARE,
        rate=0.999,
        change=put(SOMEBODY, np.nan, "query"),
        nonfinite=True,
    ),
    Case(
        "huge to come",
        lambda Mask, _: Mask.causal(-21),
        change=put(np.s_[:, 17:], NEAR_THE_LARGEST, "key", "value"),
    ),
    *(
        Case(
            f"{number} in a {name} that is seen, {how}",
            mask,
            SQUARE,
            change=put(SOMEBODY, number, name),
            nonfinite=True,
        )
        for number, name, how, mask in (
            (np.nan, "query", "causal", lambda Mask, _: Mask.causal()),
            (np.inf, "key", "sliding", lambda Mask, _: Mask.sliding_window(7)),
            (
                -np.inf,
                "value",
                "padded",
                lambda Mask, array: Mask.lengths(query=array(lengths(9, 3))),
            ),
            (np.nan, "key", "packed", lambda Mask, array: Mask.segments(array(SORTED))),
            (
                np.nan,
                "value",
                "dense",
                lambda Mask, array: Mask.dense(array(random_mask(4, 38, 38))),
            ),
        )
    ),
]

CASES = {case.name: case for case in (*MASKS, *SHAPES, *OPTIONS, *NUMBERS)}


def as_array(values: np.ndarray, *dtypes: str) -> jax.Array:
    """Return values of NumPy, cast to one dtype after another, without compiling a program."""
    for dtype in dtypes:
        values = values.astype(jnp.dtype(dtype))
    return jax.device_put(values)


def reference_results(case: Case, dtype: str, data: str | None = None) -> dict[str, np.ndarray]:
    """Return the output and all gradients of the formula, in float64.

    They are computed in `dtype`, from arrays rounded to `data`.

    Compiled for the sizes of a case alone: mask, bias, sinks and scale are arrays.
    """
    z, given = case.sizes, case.arrays
    full = {"bias": np.zeros(z.scores), "sinks": np.full(z.n, HIDE)} | given
    full["bias"] = np.broadcast_to(full["bias"], z.scores)
    with jax.enable_x64("float64" in (dtype, data)), np.errstate(over="ignore"):
        arrays = {name: as_array(x, data or dtype, dtype) for name, x in full.items()}
        cotangent = as_array(case.cotangent, data or dtype, dtype)
        mask = Mask() if case.mask is None else case.mask(Mask, jnp.asarray)
        visible = mask.materialise(*z.scores)
        scale = jnp.asarray(
            z.h**-0.5 if case.scale is None else case.scale,
            "float64" if dtype == "float64" else "float32",
        )
        found = _reference(
            arrays, cotangent, visible, scale, KEY, soft_cap=case.soft_cap, rate=case.rate
        )
    found = {
        name: np.asarray(x, np.float64) for name, x in found.items() if name in ("output", *given)
    }
    if "bias" in given:
        found["bias"] = _summed(found["bias"], given["bias"].shape)
    return found


@partial(jax.jit, static_argnames=("soft_cap", "rate"), compiler_options=FAST)
def _reference(arrays, cotangent, visible, scale, key_data, soft_cap, rate):
    dropout = KeyedDropout(rate, key_data) if rate else None
    options = {"scale": scale, "soft_cap": soft_cap, "dropout": dropout, "precision": None}

    def attend(arrays):
        query, key, value, bias, sinks = (
            arrays[name] for name in ("query", "key", "value", "bias", "sinks")
        )
        query, sinks = without_nonfinite_sinks(query, sinks)
        return reference_attention(
            query, key, value, bias, Mask.dense(visible), sinks=sinks, **options
        )[0]

    output, pull = jax.vjp(attend, arrays)
    return {"output": output, **pull(cotangent)[0]}


def _summed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    # The gradient of what was broadcast.
    padded = (1,) * (gradient.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return gradient.sum(axis=axes, keepdims=True).reshape(shape)
