"""The blocked backend itself: real tile sizes, skipped tiles, memory, and other derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout, Mask, dot_product_attention
from flax_attn.backends import derivatives
from flax_attn.backends.blocked import passes
from flax_attn.backends.registry import load
from flax_attn.parity import tolerance

from .conformance import FAST

jit = partial(jax.jit, compiler_options=FAST)
WORDS = np.array([3, 14], np.uint32)


def draw(name, *shape):
    return np.random.default_rng(sum(map(ord, name))).normal(size=shape)


def arrays(t, s, b=1, n=2, k=1, h=64, dtype="float32"):
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, h)}
    return {name: jnp.asarray(draw(name, *shape), dtype) for name, shape in shapes.items()}


def attend(arrays, backend="blocked", **options):
    return dot_product_attention(**arrays, backend=backend, **options)


@pytest.fixture
def tiles(monkeypatch):
    def patch(block=16, strip=8, platform="cpu"):
        monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: platform)
        monkeypatch.setattr(load("blocked"), "block", block)
        monkeypatch.setattr(load("blocked"), "edge", strip)

    return patch


def at_full_size(t, s, mask):
    """Return output and gradients in float32, and the rule for them.

    The rule comes from the formula in float32 and in float64.
    """

    def run(backend, dtype):
        with jax.enable_x64(dtype == "float64"):
            given = {name: x.astype(dtype) for name, x in arrays(t, s).items()}
            cotangent = jnp.asarray(draw("cotangent", *given["query"].shape), "float32").astype(
                dtype
            )

            @jax.jit
            def both(given, mask, cotangent):
                output, pull = jax.vjp(partial(attend, backend=backend, mask=mask), given)
                return {"output": output, **pull(cotangent)[0]}

            return {
                name: np.asarray(x, np.float64) for name, x in both(given, mask, cotangent).items()
            }

    sides = run("blocked", "float32"), [run("reference", "float32")], run("reference", "float64")
    eps = float(np.finfo(np.float32).eps)
    errors = tolerance.lower_dtype(*sides, tolerance.LOW_GRADIENT, eps)
    return errors | {"output": tolerance.lower_dtype(*sides, tolerance.LOW_FORWARD, eps)["output"]}


@pytest.mark.parametrize(
    ("t", "s", "mask"),
    [
        (1100, 1400, Mask.causal(300) & Mask.lengths(key=jnp.array([1350]))),
        (1300, 1030, Mask.window(1500, 100, -200)),
    ],
    ids=["padded", "window"],
)
def test_at_its_real_tile_sizes(t, s, mask):
    errors = at_full_size(t, s, mask)
    assert max(errors.values()) <= 1, errors


@pytest.fixture
def taken(monkeypatch):
    """How many scores were computed forward, and how many backward."""
    counts = {"forward": 0, "backward": 0}

    def count(name, function, at):
        def counted(*arguments):
            tile = arguments[at]
            jax.debug.callback(partial(add, name, tile.rows * tile.cols))
            return function(*arguments)

        monkeypatch.setattr(passes, f"_{name}_tile", counted)

    def add(name, scores):
        counts[name] += scores

    # What gives a backend forward mode leaves callbacks of its trace, and no product, in a program.
    monkeypatch.setattr(derivatives, "attend", lambda backend, call: backend.attend(call))
    count("forward", passes._forward_tile, 2)
    count("backward", passes._backward_tile, 2)
    return counts


LENGTH = 256
FULL = LENGTH * LENGTH
PACKED = np.arange(LENGTH) // 32
SKIPPING = {  # mask, and the share of all scores that may be taken
    "nothing": (Mask(), 1.0),
    "causal": (Mask.causal(), 0.57),
    "sliding window": (Mask.sliding_window(17), 0.13),
    "window wider than a block": (Mask.window(60, 20, 0), 0.45),
    "traced causal": (Mask.causal(jnp.array([0])), 0.57),
    "traced window": (Mask.window(16, 0, jnp.array([0])), 0.26),
    "key length": (Mask.lengths(key=40), 0.26),
    "traced key length": (Mask.lengths(key=jnp.array([40])), 0.26),
    "query length": (Mask.lengths(query=jnp.array([40])), 0.26),
    "packed": (Mask.segments(PACKED), 0.26),
    "packed and causal": (Mask.segments(PACKED) & Mask.causal(), 0.26),
    "prefix": (Mask.prefix(jnp.array([9]), offset=-100), 0.30),
    "function": (Mask.where(lambda b, n, i, j: i // 32 == j // 32), 1.0),
    "in coarse tiles": (
        Mask.where(lambda b, n, i, j: i // 32 == j // 32).summarise(LENGTH, LENGTH),
        0.51,
    ),
    "in finer tiles": (
        Mask.where(lambda b, n, i, j: i // 32 == j // 32).summarise(LENGTH, LENGTH, tile=16),
        0.13,
    ),
    "stripes": (
        Mask.where(lambda b, n, i, j: (i // 32 - j // 32) % 4 == 0).summarise(
            LENGTH, LENGTH, tile=8
        ),
        0.26,
    ),
    "stripes under a window": (
        Mask.where(lambda b, n, i, j: (i // 32 - j // 32) % 4 == 0).summarise(
            LENGTH, LENGTH, tile=32
        )
        & Mask.window(128, None),
        0.35,
    ),
    "empty": (Mask.causal(-LENGTH), 0.13),
    "no keys": (Mask.lengths(key=jnp.array([0])), 0.0),
}


@pytest.mark.parametrize("name", SKIPPING)
def test_hidden_tiles_are_not_computed(name, taken, tiles):
    tiles(32, 16)
    mask, share = SKIPPING[name]

    def run(given, mask):
        return jnp.square(attend(given, mask=mask)).sum()

    jax.block_until_ready(jit(jax.grad(run))(arrays(LENGTH, LENGTH, n=1, h=4), mask))
    jax.effects_barrier()
    seen = float(mask.materialise(1, 1, LENGTH, LENGTH).mean())
    for direction, scores in taken.items():
        assert seen <= scores / FULL <= share, direction


def temporaries(t, mask):
    """Return the bytes of temporaries of forward and backward together; nothing is run."""
    x = jax.ShapeDtypeStruct((1, t, 8, 64), jnp.float32)
    gradient = jax.grad(
        lambda q, k, v, mask: jnp.square(
            attend({"query": q, "key": k, "value": v}, mask=mask)
        ).sum()
    )
    compiled = jax.jit(gradient).lower(x, x, x, mask).compile({"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    half, whole = temporaries(4096, Mask.causal()), temporaries(8192, Mask.causal())
    assert whole < 100 * 2**20
    assert whole < 2 * half


@pytest.mark.parametrize(
    "mask",
    [
        Mask.segments(np.arange(8192) // 1000)
        & Mask.causal()
        & Mask.lengths(key=jnp.array([8000])),
        Mask.dense(np.arange(8192) % 3 > 0),
        Mask.where(lambda b, n, i, j: i // 1000 == j // 1000) & Mask.causal(),
    ],
    ids=["packed", "dense", "function"],
)
def test_masks_take_no_memory_of_their_own(mask):
    assert temporaries(8192, mask) < 100 * 2**20


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_drops_the_very_weights_that_the_formula_drops(platform, tiles):
    tiles(16, 8, platform)
    given = arrays(37, 40, b=2, h=40) | {
        "value": jnp.broadcast_to(jnp.eye(40)[None, :, None], (2, 40, 1, 40))
    }
    options = {"mask": Mask.causal(3), "dropout": KeyedDropout(0.4, jnp.asarray(WORDS))}
    ours, theirs = (
        jit(partial(attend, backend=name, **options))(given) for name in ("blocked", "reference")
    )
    np.testing.assert_array_equal(ours == 0, theirs == 0)
    assert 0.3 < (ours[:, -1] == 0).mean() < 0.5


@pytest.mark.parametrize(
    "mask",
    [
        Mask.segments(np.arange(48) // 21),
        Mask.window(7, 3, jnp.array([25])),
        Mask.window(9, None, jnp.array(4)),
    ],
    ids=["packed", "at a traced offset", "open to the right"],
)
def test_keys_that_begin_inside_the_last_chunk_are_their_own(mask, tiles):
    tiles()  # blocks and chunks of 16 divide the 48 keys, so that nothing lies behind them
    with jax.enable_x64(True):
        given = arrays(48, 48, h=5, dtype="float64")
        found, expected = (
            jit(partial(attend, mask=mask))(given),
            attend(given, "reference", mask=mask),
        )
        np.testing.assert_allclose(found, expected, rtol=tolerance.FORWARD, atol=tolerance.FORWARD)


HIDDEN = {
    "padding": Mask.lengths(query=17, key=jnp.array([17])),
    "to come": Mask.lengths(query=17) & Mask.causal(-3),
    "of no document": (
        Mask.segments(np.arange(37) // 17, np.where(np.arange(37) < 17, 0, 9))
        & Mask.lengths(query=17)
    ),
    "dense": Mask.dense((np.arange(37) < 17)[:, None] & (np.arange(37) < 17)),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize(
    "number", [np.nan, np.inf, -np.inf, 1e30, np.finfo(np.float32).max], ids=str
)
def test_what_stands_in_hidden_slots_is_as_good_as_zero(name, number, tiles, compiled):
    given = arrays(37, 37, h=5)
    spoilt, clean = (
        {key: x.at[:, 17:].set(fill) for key, x in given.items()} for fill in (number, 0)
    )
    ours, expected = compiled(name)(spoilt), compiled(name)(clean)
    for key, found in ours.items():
        assert np.isfinite(found).all(), key
        np.testing.assert_array_equal(found, expected[key])


@pytest.fixture(scope="module")
def compiled():
    """Return a function of a name in HIDDEN that returns a function of arrays, compiled once."""
    made = {}

    def function(name):
        if name not in made:
            made[name] = jit(both, static_argnums=1)
        return lambda given: made[name](given, name)

    def both(given, name):
        output, pull = jax.vjp(partial(attend, mask=HIDDEN[name], soft_cap=3.0), given)
        return {"output": output, **pull(jnp.ones_like(output))[0]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("blocked"), "block", 16)
        patch.setattr(load("blocked"), "edge", 8)
        yield function


def loss(arrays, backend):
    return jnp.square(attend(arrays, backend, mask=Mask.causal(5), soft_cap=3.0)).sum()


def test_forward_over_reverse_equals_the_reference(tiles, close):
    tiles()
    given, along = (
        arrays(21, 26, h=5),
        {name: jnp.flip(x) for name, x in arrays(21, 26, h=5).items()},
    )
    ours, theirs = (
        jit(partial(jax.jvp, jax.grad(partial(loss, backend=name))))((given,), (along,))
        for name in ("blocked", "reference")
    )
    close(ours, theirs)
