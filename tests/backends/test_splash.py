import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.backends import splash
from flax_attn.backends.call import Call
from flax_attn.backends.choose import refusal
from flax_attn.backends.reference import BACKEND as REFERENCE
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask
from flax_attn.parity import tolerance

B, T, S, N, K, H, V = 2, 128, 256, 4, 2, 16, 24
NAMES = ("output", "query", "key", "value", "sinks")
RANDOM = np.random.default_rng(0)
SINKS = RANDOM.normal(size=N)
SEGMENTS = Mask.segments(np.arange(T) // 50 * 7 - 5, np.arange(S) // 50 * 7 - 5)
LENGTHS = Mask.lengths(query=np.array([100, 5]), key=np.array([77, 0]))
DENSE = np.random.default_rng(1).random((N, T, S)) < 0.3
DENSE[1:3] = False
DENSE[:, 40] = False

MASKS = {
    "empty": Mask(),
    "causal": Mask.causal(S - T),
    "causal from the top with empty rows": Mask.causal(-50),
    "two-sided window": Mask.window(10, 5, 30),
    "sliding window": Mask.sliding_window(9, 100),
    "several diagonals": Mask.causal(100) & Mask.window(None, 3, 90) & Mask.window(17, None, 90),
    "window far beyond the keys": Mask.window(2**40, 2**40, 3),
    "nothing": Mask.causal(-T),
    "nothing in common": Mask.causal(0) & Mask.window(0, None, 9),
    "lengths": LENGTHS,
    "static lengths": Mask.lengths(query=2**40, key=130) & Mask.lengths(key=200),
    "segments": SEGMENTS,
    "segments and lengths": SEGMENTS & Mask.lengths(key=np.array([200, 60])) & Mask.causal(70),
    "prefix": Mask.prefix(20, offset=3),
    "dense": Mask.dense(DENSE[0]),
    "dense by head": Mask.dense(DENSE) & Mask.causal(90) & LENGTHS,
    "nothing dense": Mask.dense(np.zeros((T, S), bool)),
}


IN_OTHERS = {"two-sided window", "nothing", "static lengths", "segments", "dense"}


@pytest.fixture
def interpreted():
    with splash.interpreted():
        yield


def arrays(t=T, s=S, k=K, sinks=False):
    draw = np.random.default_rng(2)
    shapes = ((B, t, N, H), (B, s, k, H), (B, s, k, V), *([(N,)] * sinks))
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def make(query, key, value, sinks=None, mask=None, **options):
    b, t, n, _ = query.shape
    mask = (Mask() if mask is None else mask).resolve(b, n, t, key.shape[1])
    defaults = {
        "bias": None,
        "scale": 0.3,
        "soft_cap": None,
        "dropout": None,
        "precision": None,
        "platform": "cpu",
    }
    return Call(query, key, value, mask=mask, sinks=sinks, **{**defaults, **options})


def compiled(attend, **options):
    """Return a function of the arrays for the output and the gradients under a random cotangent."""

    @jax.jit  # of the arrays: the mask stays known
    def compute(inputs):
        output, pullback = jax.vjp(lambda *inputs: attend(make(*inputs, **options)), *inputs)
        return output, *pullback(
            jnp.asarray(np.random.default_rng(3).normal(size=output.shape), output.dtype)
        )

    return compute


def run(attend, inputs, **options):
    return dict(zip(NAMES, compiled(attend, **options)(inputs), strict=False))


def both(inputs, **options):
    assert splash.BACKEND.refuse(make(*inputs, **options)) is None
    return run(splash.BACKEND.attend, inputs, **options), run(REFERENCE.attend, inputs, **options)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in IN_OTHERS])
def test_interpreted_masks_mean_what_they_mean_in_the_reference(interpreted, close, name):
    close(*both(arrays(), mask=MASKS[name]))


@pytest.mark.parametrize(
    ("t", "s", "k", "mask"),
    [
        (100, 70, 1, "empty"),
        (3, 130, 4, "causal"),
        (130, 130, 1, "segments"),
        (100, 70, 4, "dense"),
    ],
)
def test_interpreted_any_number_of_tokens_and_key_value_heads(interpreted, close, t, s, k, mask):
    parts = {
        "empty": Mask(),
        "causal": Mask.causal(s - t),
        "segments": Mask.segments(np.arange(t) % 3, np.arange(s) % 3),
        "dense": Mask.dense(np.random.default_rng(1).random((t, s)) < 0.3),
    }
    close(*both(arrays(t, s, k), mask=parts[mask]))


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_interpreted_sinks_and_soft_cap(interpreted, close, soft_cap):
    close(*both(arrays(sinks=True), mask=Mask.causal(-50), soft_cap=soft_cap))


def test_interpreted_a_sink_of_minus_infinity_is_none(interpreted, close):
    *inputs, sinks = arrays(sinks=True)
    close(*both([*inputs, sinks.at[1].set(-jnp.inf)], mask=Mask.causal(-50)))


@pytest.mark.parametrize("name", ["causal from the top with empty rows", "lengths"])
def test_interpreted_rows_that_see_nothing_give_zeros(interpreted, name):
    hidden = ~np.asarray(MASKS[name].materialise(B, N, T, S)).any(axis=-1).transpose(0, 2, 1)
    ours = run(splash.BACKEND.attend, arrays(), mask=MASKS[name])
    assert not np.asarray(ours["output"])[hidden].any()
    assert not np.asarray(ours["query"])[hidden].any()
    assert hidden.any()


@pytest.mark.parametrize(
    ("bad", "name", "mask"),
    [
        (-np.inf, "query", "causal"),
        (np.nan, "key", "dense by head"),
        (np.inf, "value", "segments and lengths"),
    ],
)
def test_interpreted_what_is_not_finite_reaches_the_rows_that_see_it(
    interpreted, close, bad, name, mask
):
    inputs = arrays()
    inputs[NAMES.index(name) - 1] = inputs[NAMES.index(name) - 1].at[0, 60, 1, 3].set(bad)
    ours, truth = both(inputs, mask=MASKS[mask])
    close(*({name: side[name] for name in ("output", "query")} for side in (ours, truth)))
    nan = np.isnan(ours["output"])
    assert nan.any()
    assert not nan.all()


@pytest.mark.parametrize(
    ("how", "numbers"), [("lengths", (np.nan, np.finfo(np.float32).max)), ("causal", (np.inf,))]
)
def test_interpreted_what_nobody_sees_reaches_nothing(interpreted, how, numbers):
    mask = {
        "lengths": Mask.lengths(query=90, key=jnp.array([50, 70])),
        "causal": Mask.lengths(query=90),
    }[how]
    mask = mask & Mask.causal(-20)  # no query below 90 stands beyond key 70
    compute = compiled(splash.BACKEND.attend, mask=mask, soft_cap=2.0)

    def filled(number):
        hidden = zip(arrays(), (90, 70, 70), strict=True)
        return dict(
            zip(NAMES, compute([x.at[:, start:].set(number) for x, start in hidden]), strict=False)
        )

    clean = filled(0)
    for number in numbers:
        for name, result in filled(number).items():
            assert np.isfinite(result).all(), name
            np.testing.assert_array_equal(result, clean[name])


def test_interpreted_extreme_and_wide_segment_ids(interpreted, close):
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    mask = Mask.segments(np.array([low, -1, -2, high], np.int32).repeat(T // 4)) & Mask.lengths(
        key=100
    )
    close(*both(arrays(s=T), mask=mask))


@pytest.mark.parametrize("sinks", [jnp.bfloat16, jnp.float32])
def test_interpreted_in_bfloat16_is_as_near_as_the_reference(interpreted, sinks):
    *inputs, given = arrays(sinks=True)
    inputs = [*(x.astype(jnp.bfloat16) for x in inputs), given.astype(sinks)]
    truth = run(REFERENCE.attend, [x.astype(jnp.float32) for x in inputs], mask=Mask.causal(-50))
    ours, theirs = both(inputs, mask=Mask.causal(-50))
    assert [x.dtype for x in ours.values()] == [jnp.bfloat16, *(x.dtype for x in inputs)]
    ours, theirs, truth = (
        {name: np.asarray(x, np.float64) for name, x in side.items()}
        for side in (ours, theirs, truth)
    )
    sides = ours, [theirs], truth
    errors = tolerance.lower_dtype(
        *sides, tolerance.LOW_GRADIENT, float(jnp.finfo(jnp.bfloat16).eps)
    )
    errors["output"] = tolerance.lower_dtype(
        *sides, tolerance.LOW_FORWARD, float(jnp.finfo(jnp.bfloat16).eps)
    )["output"]
    assert max(errors.values()) <= 1, errors


def test_interpreted_under_vmap(interpreted, close):
    inputs, lengths = arrays(s=T), jnp.array([50, 0])

    def one(query, key, value, length):
        mask = Mask.causal() & Mask.lengths(key=length)
        return splash.BACKEND.attend(make(query[None], key[None], value[None], mask=mask))[0]

    def each(query):
        output = jax.vmap(one)(query, *inputs[1:], lengths)
        return output.sum(), output

    def batch(query):
        output = REFERENCE.attend(
            make(query, *inputs[1:], mask=Mask.causal() & Mask.lengths(key=lengths))
        )
        return output.sum(), output

    close(*(jax.jit(jax.grad(function, has_aux=True))(inputs[0]) for function in (each, batch)))


def test_interpreted_a_traced_scale(interpreted, close):
    scaled = jax.jit(lambda scale, *inputs: splash.BACKEND.attend(make(*inputs, scale=scale)))
    close(scaled(0.7, *arrays()), REFERENCE.attend(make(*arrays(), scale=0.7)))


@pytest.mark.parametrize("empty", [(0, T), (B, 0)])
def test_interpreted_no_rows(interpreted, empty):
    query, key, value = arrays()
    query, key, value = query[: empty[0], : empty[1]], key[: empty[0]], value[: empty[0]]
    assert splash.BACKEND.attend(make(query, key, value)).shape == (*empty, N, V)


def test_interpreted_higher_derivatives_fail_loudly(interpreted):
    query, key, value = arrays(s=T)

    def total(query):
        return splash.BACKEND.attend(make(query, key, value)).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (query,), (query,))
    with pytest.raises(NotImplementedError):
        jax.grad(lambda query: jax.grad(total)(query).sum())(query)


REFUSALS = {
    "precision": (
        {"precision": "highest"},
        r"default precision; got precision=highest\..*jax\.default_matmul_precision",
    ),
    "bias": (
        {"bias": jnp.zeros((1, 1, T, S))},
        rf"takes no bias; got shape \(1, 1, {T}, {S}\)",
    ),
    "dropout": (
        {"dropout": KeyedDropout(0.1, jax.random.key(0))},
        r"takes no dropout; got rate 0\.1",
    ),
    "offset": (
        {"mask": Mask.causal(jnp.array(3))},
        "offset of a mask as a Python int; got an array",
    ),
    "prefix": (
        {"mask": Mask.prefix(jnp.array(3), offset=0)},
        "length of a prefix as a Python int; got an array",
    ),
    "segments": ({"mask": SEGMENTS & SEGMENTS}, r"one Mask\.segments; got several\. Join"),
    "dense": (
        {"mask": Mask.dense(np.ones((B, 1, T, S), bool))},
        rf"one dense mask for all batch rows; got shape \({B}, 1, {T}, {S}\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(no_shape_checks, options, message):
    reason = refusal(splash.BACKEND, make(*arrays(), **{"platform": "tpu", **options}))
    assert re.search(message, reason or "runs")


def test_refusal_of_x64(x64):
    assert "does not compile with jax_enable_x64" in (
        splash.BACKEND.refuse(make(*arrays(), platform="tpu")) or "runs"
    )


def test_refusal_of_a_traced_dense_mask():
    reasons = []
    jax.jit(
        lambda mask: reasons.append(
            splash.BACKEND.refuse(make(*arrays(), mask=mask, platform="tpu"))
        )
    )(MASKS["dense"])
    assert re.search(
        r"known before tracing; got a traced one\. Build it outside jax\.jit", reasons[0] or "runs"
    )


def test_what_is_refused_and_estimated_needs_no_arrays(no_shape_checks):
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays()]
    for mask in MASKS.values():
        call = make(*inputs, mask=mask, platform="tpu")
        assert splash.BACKEND.refuse(call) is None
        assert splash.BACKEND.memory(call) >= sum(x.size * x.dtype.itemsize for x in inputs)
