"""The native backend itself: kernels at every instruction level, derivatives, threads, refusals."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn import KeyedDropout, Mask, dot_product_attention, explain, native
from flax_attn.backends.call import Unsupported
from flax_attn.parity import tolerance

from .conformance import CASES, FAST
from .test_conformance import LEFT_OUT, LOWER, Run, check, pairs, results

jit = partial(jax.jit, compiler_options=FAST)
built = pytest.mark.skipif(
    native.library() is None, reason="the library was not built: no C++ compiler"
)
LEVELS = native.levels()


def parts(case):
    return [
        type(part).__name__ for part in (case.mask(Mask, jnp.asarray).parts if case.mask else ())
    ]


REFUSES = {
    "native takes no bias": lambda case: case.bias is not None,
    "native takes no dropout": lambda case: case.rate > 0 and case.bias is None,
    "native takes causal masks, windows": lambda case: (
        "Where" in parts(case) and not case.rate and case.bias is None
    ),
}
FLOAT32 = [
    Run(
        "native",
        "float32",
        refuses=REFUSES,
        cases=tuple(name for name in CASES if name not in LEFT_OUT),
    )
]
LOW = [Run("native", dtype, refuses=REFUSES, cases=LOWER) for dtype in ("bfloat16", "float16")]


@pytest.fixture
def level():
    """Choose an instruction level, and go back to the first when done."""
    yield native.choose_level
    native.choose_level(LEVELS[0])


@built
@pairs(FLOAT32)
def test_equals_the_reference(run, case):
    check(case, results(case, run.backend, run.dtype), run.dtype)


@built
@pairs(LOW)
def test_is_as_near_the_truth_in_a_lower_dtype(run, case):
    check(case, results(case, run.backend, run.dtype), run.dtype)


@built
@pairs(FLOAT32, refused=True)
def test_refuses_by_name_what_it_cannot_honour(run, case):
    with pytest.raises(
        Unsupported, match=r"^backend 'native' does not support this call: "
    ) as refusal:
        results(case, run.backend, run.dtype)
    assert any(phrase in str(refusal.value) for phrase in run.phrases(case))


def draw(name, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(map(ord, name))).normal(size=shape), dtype)


def arrays(t, s, b=2, n=4, k=2, h=8, v=6, dtype="float32"):
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    return {name: draw(name, *shape, dtype=dtype) for name, shape in shapes.items()}


def attend(given, backend="native", **options):
    return dot_product_attention(**given, backend=backend, **options)


def both(given, backend, **options):
    """Return the outputs of a call alone and of a differentiated one, and gradients.

    The cotangent is random.
    """
    output, pull = jax.vjp(lambda given: attend(given, backend, **options), given)
    alone = attend(given, backend, **options)
    return {
        "output": output,
        "alone": alone,
        **pull(draw("cotangent", *output.shape).astype(output.dtype))[0],
    }


def errors(given, dtype="float32", **options):
    """Return the error over the allowed one, by the formula in a dtype and in float64."""
    ours = jit(partial(both, backend="native", **options))(given)
    plain = jit(partial(both, backend="reference", **options))(given)
    with jax.enable_x64(True):
        wide = {name: x.astype("float64") for name, x in given.items()}
        truth = jit(partial(both, backend="reference", **options))(wide)
    sides = [
        {name: np.asarray(x, np.float64) for name, x in side.items()}
        for side in (ours, plain, truth)
    ]
    eps = float(jnp.finfo(dtype).eps)
    rule = partial(tolerance.lower_dtype, sides[0], [sides[1]], sides[2])
    forward = rule(tolerance.LOW_FORWARD, eps)
    return rule(tolerance.LOW_GRADIENT, eps) | {name: forward[name] for name in ("output", "alone")}


MASKS = {
    "none": lambda t, s: Mask(),
    "causal": lambda t, s: Mask.causal(s - t),
    "sliding": lambda t, s: Mask.sliding_window(1 + s // 3, s - t),
    "lengths": lambda t, s: Mask.lengths(key=jnp.array([s, s // 2])),
    "packed": lambda t, s: (
        Mask.segments(np.arange(t) // 20, np.arange(s) // 20) & Mask.causal(max(s - t, 0))
    ),
    "array": lambda t, s: Mask.dense(np.tri(t, s, s - t, bool)),
    "arrays": lambda t, s: (
        Mask.dense(np.random.default_rng(0).random((2, t, s)) < 0.3)
        & Mask.dense(np.arange(s)[None, None, None] < np.array([s, s // 2])[:, None, None, None])
    ),
}


@built
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    t=st.integers(1, 150), s=st.integers(8, 300),
    widths=st.tuples(st.integers(4, 70), st.integers(4, 70)),
    mask=st.sampled_from(sorted(MASKS)), soft_cap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_random_calls_equal_the_reference(t, s, widths, mask, soft_cap, dtype):
    found = errors(
        arrays(t, s, 2, 2, 1, *widths, dtype=dtype),
        dtype,
        mask=MASKS[mask](t, s),
        soft_cap=soft_cap,
    )
    assert max(found.values()) <= 1, found


def query_gradient_errors(given, mask):
    """Return the mean error of each query's gradient in float32, of native and of the formula."""
    cotangent = draw("cotangent", 2, 70, 4, 16)

    def gradient(backend, dtype):
        cast = {key: x.astype(dtype) for key, x in given.items()}
        return jax.grad(lambda x: (attend(x, backend, mask=mask) * cotangent.astype(dtype)).sum())(
            cast
        )["query"]

    with jax.enable_x64(True):
        exact = np.asarray(gradient("reference", "float64"))
    return (
        np.abs(np.asarray(gradient(b, "float32")) - exact).mean((0, 2, 3))
        for b in ("native", "reference")
    )


@built
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["all", "causal"])
def test_what_all_keys_share_costs_the_gradient_of_the_query_no_digits(name, mask, level):
    # The gradients of the scores of a row add up to 0, which rounding must not multiply by what all
    # keys share.
    level(name)
    given = {
        key: 0.1 * x + (5 if key != "query" else 0) for key, x in arrays(70, 70, h=16, v=16).items()
    }
    ours, plain = query_gradient_errors(given, mask)
    assert ours.mean() <= plain.mean() / 4


@built
@pytest.mark.parametrize("name", LEVELS)
def test_a_large_key_costs_the_queries_no_digits_that_do_not_see_it(name, level):
    level(name)
    given = arrays(70, 70, h=16, v=16)
    given |= {x: given[x].at[:, -1].multiply(1e6) for x in ("key", "value")}
    ours, plain = query_gradient_errors(given, Mask.causal())
    assert ours[:-1].mean() <= 2 * plain[:-1].mean()


@built
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("t", [3, 140])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_instruction_level(name, dtype, t, level):
    level(name)
    found = errors(
        arrays(t, 200, h=24, v=17, dtype=dtype), dtype, mask=Mask.causal(200 - t), soft_cap=3.0
    )
    assert max(found.values()) <= 1, found


@built
def test_a_level_that_the_processor_does_not_have_is_refused():
    with pytest.raises(
        ValueError,
        match=r"instruction level must be one of \['.*'baseline'\] on this machine; got 'mmx'",
    ):
        native.choose_level("mmx")


@built
@pytest.mark.parametrize("t", [1, 40])
def test_a_subnormal_number_in_float16_is_not_flushed(t):
    given = arrays(t, 50, dtype="float16") | {"value": jnp.full((2, 50, 2, 6), 3e-6, jnp.float16)}
    np.testing.assert_array_equal(jit(attend)(given), given["value"][0, 0, 0, 0])


@built
def test_16_calls_at_once_from_8_threads():
    calls = [(arrays(t, 180), Mask.causal(180 - t)) for t in (1, 9, 40, 180)] * 4
    run = jax.jit(lambda given, mask: both(given, "native", mask=mask))
    alone = [run(*call) for call in calls[:4]]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda call: jax.block_until_ready(run(*call)), calls))
    for i, found in enumerate(together):
        jax.tree.map(np.testing.assert_array_equal, found, alone[i % 4])


def scalar(given, backend, t=19):
    mask = Mask.causal(4) & Mask.lengths(key=jnp.array([23, 17]))
    return jnp.square(attend(given, backend, mask=mask, soft_cap=3.0, sinks=draw("sinks", 4))).sum()


SMALL = arrays(19, 23, h=5)
ALONG = {name: jnp.flip(x) for name, x in SMALL.items()}
TRANSFORMS = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (ALONG,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(0.3)),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (ALONG,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (ALONG,))[1]),
    "grad of grad": lambda f: jax.grad(
        lambda x: sum((g * ALONG[name]).sum() for name, g in jax.grad(f)(x).items())),
    "jvp of jvp": lambda f: lambda x: jax.jvp(
        lambda x: jax.jvp(f, (x,), (ALONG,))[1], (x,), (ALONG,)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](ALONG),
}  # fmt: skip


@built
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_equal_those_of_the_reference(name, close):
    ours, theirs = (
        jit(TRANSFORMS[name](partial(scalar, backend=b)))(SMALL) for b in ("native", "reference")
    )
    close(ours, theirs)


@built
def test_hessian(close):
    x = arrays(3, 4, b=1, n=1, k=1, h=2, v=2)
    ours, theirs = (
        jit(jax.hessian(lambda x, b=b: jnp.sin(attend(x, b, mask=Mask.causal(1))).sum()))(x)
        for b in ("native", "reference")
    )
    close(ours, theirs)


AXES = [{"query": 0}, {"key": 1}, {"value": -1}, {"query": 2, "key": 0, "value": 3}]


@built
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", ["grad of vmap", "vmap of jvp of grad"])
def test_vmap_over_each_operand(axes, kind, close):
    x = {k: jnp.stack([v, -v, 2 * v], axes[k]) if k in axes else v for k, v in SMALL.items()}
    axes = {name: axes.get(name) for name in x}

    def apply(backend):
        f = partial(scalar, backend=backend)
        return {
            "grad of vmap": jax.grad(lambda x: jax.vmap(f, (axes,))(x).sum()),
            "vmap of jvp of grad": jax.vmap(
                lambda x: jax.jvp(jax.grad(f), (x,), (ALONG,)), (axes,)
            ),
        }[kind]

    close(*(jit(apply(backend))(x) for backend in ("native", "reference")))


@built
def test_vmap_over_a_mask_alone(close):
    lengths = jnp.array([[23, 9], [0, 4]])
    ours, theirs = (
        jit(jax.vmap(lambda one, b=b: attend(SMALL, b, mask=Mask.lengths(key=one))))(lengths)
        for b in ("native", "reference")
    )
    close(ours, theirs)


@built
def test_vmap_over_an_array_alone(close):
    arrays = jnp.asarray(np.random.default_rng(0).random((3, 1, 1, 19, 23)) < 0.4)
    ours, theirs = (
        jit(jax.vmap(lambda one, b=b: attend(SMALL, b, mask=Mask.dense(one))))(arrays)
        for b in ("native", "reference")
    )
    close(ours, theirs)


# Whole tiles hidden and shown, tiles on the diagonal, and a part of each.
@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("t", "s"), [(300, 300), (70, 300), (9, 300)])
def test_a_triangle_as_an_array_gives_the_bits_of_a_causal_mask(t, s, dtype):
    given = arrays(t, s, h=32, v=32, dtype=dtype)
    triangle = Mask.dense(np.tri(t, s, s - t, bool))
    causal = jit(partial(both, backend="native", mask=Mask.causal(s - t)))(given)
    array = jit(partial(both, backend="native", mask=triangle))(given)
    jax.tree.map(np.testing.assert_array_equal, array, causal)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P
from flax_attn import Mask, dot_product_attention
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 40, 4, 8)), "float32")
def loss(x):
    mask = Mask.causal() & Mask.lengths(key=jnp.arange(16) * 3) & Mask.dense(jnp.tri(40) > 0)
    return jnp.square(dot_product_attention(*x, mask=mask, backend="native"))
rows = NamedSharding(mesh, P(None, "data"))
alone = np.asarray(jax.jit(loss)(x))
jitted = jax.jit(loss, in_shardings=rows, out_shardings=NamedSharding(mesh, P("data")))
compiled = jitted.lower(x).compile()
for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
    assert name not in compiled.as_text(), name
np.testing.assert_array_equal(compiled(jax.device_put(x, rows)), alone)
def shard(q, k, v, lengths):
    mask = Mask.causal() & Mask.lengths(key=lengths)
    return dot_product_attention(q, k, v, mask=mask, backend="native")
mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
found = jax.jit(lambda *a: jnp.square(mapped(*a)))(*x, jnp.arange(16) * 3)
np.testing.assert_array_equal(found, alone)
"""


@built
def test_a_batch_that_is_split_over_devices_needs_no_collective():
    code = "import jax; jax.config.update('jax_num_cpu_devices', 8)\n" + SHARDED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def refusal(dtype="float32", **options):
    with jax.enable_x64(dtype == "float64"):
        return explain(*arrays(20, 30, dtype=dtype).values(), platform="cpu", **options).refusals[
            "native"
        ]


REFUSALS = {
    "native takes float32, bfloat16, float16; got dtype float64": {"dtype": "float64"},
    "native takes no bias; got shape (1, 1, 20, 30)": {"bias": np.zeros((20, 30), np.float32)},
    "native takes no dropout; got rate 0.5": {
        "dropout": KeyedDropout(0.5, jnp.zeros(2, jnp.uint32))
    },
    "native takes causal masks, windows, lengths, prefixes, arrays and one pair of segments; got": {
        "mask": Mask.where(lambda b, n, i, j: i != j, offset=0)
    },
    "native computes in float32 alone; got precision=": {
        "precision": jax.lax.DotAlgorithmPreset.F32_F32_F32
    },
}


@built
@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_name_what_is_refused_and_leave_advice_to_the_error(message):
    found = refusal(**REFUSALS[message])
    assert message in found
    assert "auto" not in found


@built
def test_segment_ids_of_64_bits_are_refused():
    with jax.enable_x64(True):
        found = refusal(mask=Mask.segments(jnp.zeros(20, "int64"), jnp.zeros(30, "int64")))
    assert found == "native compares segment ids of up to 32 bits; got 64. Cast them to int32"


@pytest.mark.parametrize(("t", "s", "other"), [(600, 600, "blocked"), (1, 600, "decode")])
def test_without_the_library_the_others_run_and_explain_says_how_to_get_it(
    t, s, other, monkeypatch, tmp_path
):
    monkeypatch.setattr("flax_attn.backends.native.library", lambda: None)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    found = explain(*arrays(t, s).values(), mask=Mask.causal(s - t), platform="cpu")
    assert found.backend == other
    assert (
        "takes a C++ compiler when flax_attn is installed: install one" in found.refusals["native"]
    )
    with pytest.raises(
        Unsupported, match="backend 'native' does not support this call: its library was not built"
    ):
        attend(arrays(t, s))


@built
def test_auto_takes_it_where_it_was_built():
    assert (
        explain(*arrays(600, 600).values(), mask=Mask.causal(), platform="cpu").backend == "native"
    )
    assert explain(*arrays(600, 600).values(), platform="gpu").backend == "fused"


def test_no_library_has_no_levels(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.levels() == []
    with pytest.raises(ValueError, match=r"must be one of \[\] on this machine; got 'baseline'"):
        native.choose_level("baseline")


def gradients_of_nearly_equal_weights(dtype, backend):
    """Return the gradients where all keys count nearly the same, as in a model before training."""
    random = np.random.default_rng(0)
    arrays = 0.1 * random.normal(size=(4, 1, 96, 2, 8)) + np.reshape([0, 0, 1, 1], (4, 1, 1, 1, 1))
    query, key, value, cotangent = jnp.asarray(arrays, jnp.bfloat16).astype(dtype)
    attend = partial(dot_product_attention, backend=backend)
    found = jax.vjp(attend, query, key, value)[1](cotangent)
    names = "query", "key", "value"
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in zip(names, found, strict=True)}


@built
@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_gradients_of_nearly_equal_weights_are_not_those_of_rounded_outputs(backend):
    ours, plain = (
        gradients_of_nearly_equal_weights(jnp.bfloat16, name) for name in (backend, "reference")
    )
    exact = gradients_of_nearly_equal_weights(jnp.float32, "reference")
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    errors = tolerance.lower_dtype(ours, [plain], exact, tolerance.LOW_GRADIENT, eps)
    assert max(errors.values()) <= 1, errors
