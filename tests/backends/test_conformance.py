"""One suite for every backend.

Each computes a case of the table as the reference does, or refuses it as listed here.

The reference gets the mask of a case as an array, so that one compiled function serves all cases of
one size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import KeyedDropout, Mask, MultiHeadAttention, attend, dot_product_attention
from flax_attn.backends import tokamax
from flax_attn.backends.band import is_band
from flax_attn.backends.call import Unsupported, prepare
from flax_attn.backends.dense import array_size
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.functional.mask_part import MaskPart
from flax_attn.parity import tolerance

from .conformance import CASES, FAST, KEY, Case, Sizes, as_array, reference_results

LOW = {"float32", "bfloat16", "float16"}
COMMON = {  # of all kernels behind the interface of jax.nn
    "at least one batch row and one query token": lambda case: 0 in case.sizes.scores,
    "one head width": lambda case: case.sizes.h != case.sizes.v,
    "takes no sinks": lambda case: case.sinks is not None,
    "takes no dropout": lambda case: case.rate > 0,
}
jit = partial(jax.jit, compiler_options=FAST)
NO_CAP = {"takes no soft_cap": lambda case: case.soft_cap is not None}


@dataclass(frozen=True)
class Run:
    """A backend in one dtype, as on one platform, and what it may refuse.

    A refusal is a phrase and the cases it is true of.
    """

    backend: str
    dtype: str
    platform: str = "cpu"
    refuses: Mapping[str, Callable[[Case], bool]] = field(default_factory=dict)
    cases: tuple[str, ...] = tuple(CASES)
    width: int | None = None  # queries and values get one head width, a multiple of this

    def widened(self, case: Case) -> Case:
        z = case.sizes
        if self.width is None or (z.h == z.v and z.h % self.width == 0):
            return case
        width = max(self.width, z.h - z.h % self.width)
        return replace(case, sizes=replace(z, h=width, v=width))

    def __str__(self):
        return f"{self.backend} as on {self.platform} in {self.dtype}"

    def phrases(self, case: Case) -> list[str]:
        return [phrase for phrase, holds in self.refuses.items() if holds(case)]


# They differ by their ends alone: test_tiling holds those of `blocked` to the mask, for all sizes.
BANDS = {
    "causal, blocks of one strip", "causal from the bottom", "causal from the top",
    "causal that shows nothing", "causal that shows one key to one query",
    "window to the left of its queries", "window to the right of its queries",
    "window open to the right", "window open to the right, more queries than keys",
    "window without ends", "sliding window", "sliding window of one",
    "sliding window that leaves the keys", "band that shows nothing", "band of three parts",
}  # fmt: skip
IN_OTHERS = {  # whose mask or sizes another case has, along with more
    "query length", "lengths beyond the tokens", "window over lengths", "segments",
    "causal segments", "prefix", "prefix with empty rows", "dense", "dense by head", "dense by row",
    "dense that shows nothing", "one query, causal", "blocks that fit", "multi-head",
    "head width 1", "head width 7", "head width 64", "head width 128", "head width 256", "bias",
    "bias of one number", "sinks",
}  # fmt: skip
HIDDEN = {  # test_blocked has more numbers in hidden slots
    "what nobody sees", "what nobody sees, dense", "what is to come", "huge to come",
}  # fmt: skip
LEFT_OUT = BANDS | IN_OTHERS | HIDDEN
TOGETHER = (  # what heads share or do not share when they are taken together
    "causal at an offset a row", "two causal masks", "window beyond a block", "lengths",
    "segments in any order", "prefix and offset a row", "dense by head", "dense by row and head",
    "everything at once", "multi-query", "function by row and head at an offset a row",
    "segments of two integer types", "window at the ends of the integers",
    "prefix and lengths at the ends of the integers", "sinks that are not finite", "no queries",
    "sinks and empty rows", "dropout in a window", "bias of every head", "bias of every row",
    "bias of every key", "bias under a soft cap", "what nobody sees, causal", "what a bias hides",
    "-inf in a value that is seen, padded", "nan in a key that is seen, packed",
)  # fmt: skip
DECODE = {"takes no dropout": lambda case: case.rate > 0}
RUNS = [
    Run("decode", "float64", refuses=DECODE, cases=TOGETHER),
    Run("blocked", "float64", cases=tuple(name for name in CASES if name not in LEFT_OUT)),
    Run("blocked", "float64", "gpu", cases=TOGETHER[::2]),
]
GPU = COMMON | {"at most 128 to run on every GPU": lambda case: case.sizes.h > 128}
ODD = {  # where the mask is not one that cuDNN knows as structure
    "needs even t and s": lambda case: (
        (case.sizes.t % 2 or case.sizes.s % 2)
        and case.name not in ("one query", "one query and one key", "one head", "multi-query")
    )
}
if (
    jax.default_backend() == "gpu"
):  # elsewhere these are not run at all, and must not look as if they were
    RUNS += [
        Run("cudnn", dtype, "gpu", GPU | ODD | NO_CAP, width=8) for dtype in ("bfloat16", "float16")
    ]
    if find_spec("tokamax"):
        cap = (
            {}
            if tokamax.implementation() == "mosaic"
            else {"gradient of the soft cap": NO_CAP["takes no soft_cap"]}
        )
        RUNS += [
            Run("tokamax", dtype, "gpu", COMMON | cap, width=8) for dtype in ("bfloat16", "float16")
        ]

OWN_FILES = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
RUNS += [  # a new backend computes every case, until a run above lists what it refuses
    Run(name, "float32", jax.default_backend(), cases=TOGETHER)
    for name in BACKENDS
    if name not in {"reference", *OWN_FILES, *(run.backend for run in RUNS)}
]


def results(case: Case, backend: str, dtype: str) -> dict[str, np.ndarray]:
    """Return the output and the gradients of all arrays under a random cotangent."""
    with (
        jax.enable_x64(dtype == "float64"),
        np.errstate(over="ignore"),
    ):  # what is huge is infinite in float16
        arrays = {name: as_array(x, dtype) for name, x in case.arrays.items()}
        cotangent = as_array(case.cotangent, dtype)

        def both(arrays, cotangent, key_data, mask):
            options = {
                "mask": mask,
                "dropout": dropout(case, key_data),
                "backend": backend,
                **case.options,
            }
            call = partial(dot_product_attention, **options)
            output, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
            if (
                backend == "decode"
            ):  # differentiated it is the formula: its own output is that of a plain call
                output = call(**arrays)
            return {"output": output, **pull(cotangent)[0]}

        mask = case.masked(Mask, jnp.asarray)
        return dict(jit(both)(arrays, cotangent, KEY, mask))


def dropout(case: Case, key_data: jax.Array) -> KeyedDropout | None:
    return KeyedDropout(case.rate, key_data) if case.rate else None


@cache
def truth(case: Case, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Return the reference in float64, of data that was rounded to a dtype."""
    return reference_results(case, "float64", dtype)


@cache
def plain(case: Case, dtype: str) -> dict[str, np.ndarray]:
    return reference_results(case, dtype)


def wide(arrays) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def check(case: Case, ours: dict[str, jax.Array], dtype: str) -> None:
    """Hold results to the rules of their dtype, and rows that see nothing to zeros."""
    assert {x.dtype.name for x in ours.values()} == {dtype}
    sides = wide(ours), plain(case, dtype) if dtype in LOW else {}, dict(truth(case, dtype))
    if (
        case.nonfinite
    ):  # what was seen is NaN for all that a row reads, so only what stands by queries is compared
        sides = tuple(
            {name: side[name] for name in ("output", "query") if name in side} for side in sides
        )
        assert np.isnan(sides[0]["output"]).any()
        assert not np.isnan(sides[0]["output"]).all()
    else:
        assert all(np.isfinite(x).all() for x in sides[0].values())
    assert not sides[0]["output"][case.empty_rows].any()
    assert not sides[0]["query"][case.empty_rows].any()
    errors = low_errors(*sides, dtype) if dtype in LOW else high_errors(sides[0], sides[2])
    assert max(errors.values()) <= 1, errors


def high_errors(ours, truth) -> dict[str, float]:
    forward = tolerance.relative({"output": ours.pop("output")}, {"output": truth.pop("output")})
    backward = tolerance.gradient_errors(ours, truth)
    return {name: error / tolerance.FORWARD for name, error in forward.items()} | {
        name: error / tolerance.GRADIENT for name, error in backward.items()
    }


def low_errors(ours, theirs, truth, dtype) -> dict[str, float]:
    for name in truth:
        np.testing.assert_array_equal(np.isnan(ours[name]), np.isnan(truth[name]))
    eps = float(jnp.finfo(dtype).eps)
    errors = tolerance.lower_dtype(ours, [theirs], truth, tolerance.LOW_GRADIENT, eps)
    return errors | {
        "output": tolerance.lower_dtype(ours, [theirs], truth, tolerance.LOW_FORWARD, eps)["output"]
    }


@pytest.fixture
def on(monkeypatch):
    """Compute as on a platform; what is plain JAX runs anywhere."""

    def patch(platform: str, tiles: tuple[int, int] = (16, 8)):
        monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: platform)
        monkeypatch.setattr(load("blocked"), "block", tiles[0])
        monkeypatch.setattr(load("blocked"), "edge", tiles[1])

    return patch


def pairs(runs=RUNS, refused=False):
    found = [(run, run.widened(CASES[name])) for run in runs for name in dict.fromkeys(run.cases)]
    found = [(run, case) for run, case in found if bool(run.phrases(case)) == refused]
    return pytest.mark.parametrize(
        ("run", "case"), [pytest.param(run, case, id=f"{run}-{case.name}") for run, case in found]
    )


@pairs()
def test_equals_the_reference(run, case, on):
    on(run.platform, case.tiles)
    check(case, results(case, run.backend, run.dtype), run.dtype)


@pairs(refused=True)
def test_refuses_by_name_what_it_cannot_honour(run, case, on):
    on(run.platform, case.tiles)
    refused = pytest.raises(
        Unsupported, match=f"^backend '{run.backend}' does not support this call: "
    )
    with jax.enable_x64(run.dtype == "float64"), refused as refusal:
        arrays = {name: jnp.asarray(x).astype(run.dtype) for name, x in case.arrays.items()}
        options = {
            "mask": case.masked(Mask, jnp.asarray),
            "dropout": dropout(case, jnp.asarray(KEY)),
        }
        dot_product_attention(**arrays, **options, **case.options, backend=run.backend)
    assert any(phrase in str(refusal.value) for phrase in run.phrases(case))


def test_what_is_left_out_is_in_the_table():
    assert CASES.keys() > LEFT_OUT


def test_every_backend_has_a_run_here_or_a_file_of_its_own():
    assert {run.backend for run in RUNS} | OWN_FILES | {"reference"} >= set(BACKENDS)


LOWER = (
    "causal from the top", "window beyond a block", "causal lengths", "causal segments",
    "dense by head", "multi-query", "head width 80", "sinks and empty rows",
    "bias under a soft cap", "dropout in a window", "what nobody sees, causal",
    "nan in a query that is seen, causal",
)  # fmt: skip


LOWER_RUNS = [
    Run("decode", "bfloat16", refuses=DECODE, cases=LOWER[1::4]),
    Run("blocked", "bfloat16", cases=LOWER[::4]),
    Run("blocked", "float16", "gpu", cases=LOWER[2::4]),
    Run("blocked", "bfloat16", "tpu", cases=LOWER[3::4]),
]


@pairs(LOWER_RUNS)
def test_is_as_near_the_truth_in_a_lower_dtype(run, case, on):
    on(run.platform, case.tiles)
    check(case, results(case, run.backend, run.dtype), run.dtype)


class Diagonals(MaskPart):
    """A kind of part that no backend knows.

    It defines `allow` alone, and differs between batch rows and heads.
    """

    def __init__(self, period: jax.Array):
        self.period = period

    def allow(self, rows, cols):
        return (rows + cols) % self.period[:, :, None, None] > 0


def diagonals(Mask, array):
    period = array(np.arange(2, 10, dtype=np.int32).reshape(2, 4))
    return Mask((Diagonals(period),)) & Mask.window(30, 20, 4)


UNKNOWN = Case("an unknown part in a window", diagonals, Sizes(v=3))


SAFE = [
    Run("blocked", "float64"),
    Run("blocked", "float64", "gpu"),
    Run("decode", "float64"),
]


@pytest.mark.parametrize("run", SAFE, ids=str)
def test_a_part_that_a_backend_does_not_know_is_safe(run, on):
    on(run.platform)
    check(UNKNOWN, results(UNKNOWN, run.backend, run.dtype), run.dtype)


def test_a_part_that_splash_does_not_know_is_refused():
    x = [jnp.asarray(x, jnp.float32) for x in UNKNOWN.arrays.values()]
    call = prepare(*x, mask=UNKNOWN.masked(Mask, jnp.asarray), platform="tpu")
    assert (
        load("splash").refuse(call)
        == "splash has no form for a mask of type Diagonals. Pass the mask as a boolean array"
    )


@pytest.mark.parametrize("name", ["cudnn", "tokamax"])
def test_a_part_that_a_gpu_kernel_does_not_know_is_no_band(name):
    call = prepare(
        *[jnp.asarray(x, jnp.bfloat16) for x in UNKNOWN.arrays.values()],
        mask=UNKNOWN.masked(Mask, jnp.asarray),
    )
    assert not is_band(call)
    assert array_size(call) == 2 * 4 * 38 * 50
    assert load(name).memory(call) > array_size(call)


HERE = [Run("blocked", "float32"), Run("blocked", "float32", "gpu")]


@pytest.fixture(params=HERE, ids=str)
def run(request, on):
    on(request.param.platform)
    return request.param


SMALL = Case("transforms", sizes=Sizes(b=3, t=19, s=23, v=3))


def small(dtype="float32", b=slice(None)):
    return [jnp.asarray(x[b], dtype) for x in SMALL.arrays.values()]


def total(backend, arrays, lengths, weigh=1.0):
    mask = Mask.causal(2) & Mask.lengths(key=lengths)
    return (dot_product_attention(*arrays, mask=mask, backend=backend) * weigh).sum()


def test_eager_equals_jit(on, close):
    on("cpu", (8, 8))
    arrays = [jnp.asarray(x[:1, :9], jnp.float32) for x in SMALL.arrays.values()]
    attend = partial(
        dot_product_attention,
        mask=Mask.causal() & Mask.lengths(key=jnp.array([7])),
        backend="blocked",
    )
    close(attend(*arrays), jit(attend)(*arrays))


def test_vmap_over_rows_and_lengths_equals_the_batch(run, close):
    arrays, lengths = small(run.dtype), jnp.array([23, 9, 0])
    one = jax.value_and_grad(partial(total, run.backend))
    value, gradients = jit(one)(arrays, lengths)
    row = jax.vmap(lambda arrays, length: one([x[None] for x in arrays], length[None]))
    values, each = jit(row)(arrays, lengths)
    close(values.sum(), value)
    close([x[:, 0] for x in each], gradients)


def test_unbatched_is_a_row_of_the_batch(run, close):
    attend = jit(partial(dot_product_attention, mask=Mask.causal(2), backend=run.backend))
    close(attend(*small(run.dtype, 1)), attend(*small(run.dtype))[1])


def test_remat_changes_nothing(on, close):
    on("cpu")
    weighed = partial(total, "blocked", lengths=jnp.array([23, 9, 0]), weigh=jnp.float32(0.3))
    plainly, again = (jit(jax.grad(f))(small()) for f in (weighed, jax.checkpoint(weighed)))
    close(again, plainly)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asking_for_weights_does_not_change_the_output(run, dtype):
    options = {"mask": Mask.causal(2), "backend": run.backend}
    weighing = partial(attend, return_weights=True)
    found = jit(partial(weighing, **options))(*small(dtype))
    alone = jit(partial(dot_product_attention, **options))(*small(dtype))
    np.testing.assert_array_equal(found.output, alone)
    reference = partial(weighing, mask=Mask.causal(2), backend="reference")
    np.testing.assert_array_equal(found.weights, jit(reference)(*small(dtype)).weights)


@pytest.mark.usefixtures("no_shape_checks")  # the scale of a call is annotated as a number
def test_gradient_of_a_traced_scale(run, close):
    def scaled(scale, backend):
        call = prepare(*small(), mask=Mask.causal(2))
        output = load(backend).attend(replace(call, scale=scale))
        return (output * jnp.asarray(SMALL.cotangent, output.dtype)).sum()

    ours, theirs = (
        jit(jax.grad(partial(scaled, backend=name)))(0.7) for name in (run.backend, "reference")
    )
    close(ours, theirs)


def test_a_stack_of_layers_in_a_scan(on, close):
    on("cpu")

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return MultiHeadAttention(12, 12, 23, 0.0, 4, num_kv_heads=2, backend="blocked", rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def scan(x, layer):
        return layer(x)

    def loss(stack, x):
        return jnp.square(scan(x, stack)).mean()

    x = jnp.asarray(SMALL.draw("tokens", (3, 23, 12)), jnp.float32)
    stack = create(nnx.Rngs(0))
    graph, state = nnx.split(stack)
    gradients = jax.tree.leaves(nnx.jit(nnx.grad(loss))(stack, x))

    def loop(state, x):
        for i in range(2):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
            layer.backend = "reference"
            x = layer(x)
        return jnp.square(x).mean()

    close(gradients, jax.tree.leaves(jit(jax.grad(loop))(state, x)))
