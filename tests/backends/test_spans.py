"""The tiles of `blocked` on accelerators: what they cover, and what programs are made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout, Mask
from flax_attn.backends.blocked import batched
from flax_attn.backends.blocked.spans import divided
from flax_attn.backends.call import prepare
from flax_attn.backends.registry import load
from flax_attn.bench.calls import MODEL_CALLS, forward, forward_and_backward

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def call(t=1000, s=1000, b=2, n=6, k=2, mask=None, **options):
    shapes = {"query": (b, t, n, 8), "key": (b, s, k, 8), "value": (b, s, k, 5)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = []

    def trace(arrays):
        found.append(prepare(**arrays, mask=mask, platform="gpu", **options))

    jax.eval_shape(trace, arrays)
    return found[0]


MASKS = {
    "none": None,
    "causal": Mask.causal(),
    "window": Mask.window(100, 30),
    "prefix": Mask.prefix(200),
    "lengths": Mask.lengths(key=700),
    "nothing": Mask.causal(-1000),
}


@pytest.mark.parametrize("unrolled", [64, 2])
@pytest.mark.parametrize("most", [2**24, 10**6, 10**5])
@pytest.mark.parametrize("name", MASKS)
def test_every_pair_that_is_seen_lies_in_one_tile(name, most, unrolled):
    mask = MASKS[name]
    one = call(mask=mask)
    division = divided(one, most, unrolled)
    taken = np.zeros((1000, 1000), int)
    for span in division.spans:
        rows = slice(span.row, span.row + span.rows * span.count)
        taken[rows, span.col : span.col + span.cols] += 1
    seen = Mask() if mask is None else mask
    visible = np.asarray(seen.materialise(1, 1, 1000, 1000))[0, 0]
    assert taken.max() == 1
    assert (taken[visible] == 1).all()
    assert division.parts * division.batch * division.heads == 2 * 2
    # A tile of 8 queries of one key/value head is the least.
    least = 8 * 1000 * 3
    heads = division.batch * division.heads * 3
    assert division.largest * heads <= max(most, least)


def test_a_causal_mask_saves_a_third_in_tiles_of_a_power_of_two():
    one = call(t=8192, s=8192, b=1, n=32, k=8, mask=Mask.causal())
    division = divided(one, 2**26, 64)
    pairs = sum(span.count * span.rows * span.cols for span in division.spans)
    assert pairs < 0.67 * 8192**2
    assert all(span.cols.bit_count() == 1 for span in division.spans)
    # In a window it would double what is computed.
    one = call(t=8192, s=8192, b=1, n=32, k=8, mask=Mask.sliding_window(4096))
    division = divided(one, 2**26, 64)
    pairs = sum(span.count * span.rows * span.cols for span in division.spans)
    assert pairs < 0.47 * 8192**2
    assert (division.batch, division.heads, division.parts) == (1, 8, 1)


def test_programs_stay_small_for_many_tokens():
    short, long = (call(t=t, s=t, mask=Mask.causal()) for t in (2**14, 2**17))
    for one in (short, long):
        assert len(divided(one, 2**24, 32).spans) <= 32


def lowered(function, *arguments):
    """Return the program for a GPU as text, which takes no GPU and no plugin."""
    devices = jax.sharding.AbstractMesh((1,), ("x",))
    with jax.sharding.use_abstract_mesh(devices):
        traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: "gpu")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("index", [0, 1])
def test_products_are_few_and_large_and_no_loop_waits(index):
    one = MODEL_CALLS[index]
    tiles = divided(load_call(one), batched.FORWARD, batched.UNROLLED)
    text = lowered(forward(one, "blocked"), one.arrays)
    count = tiles.parts * sum(span.count for span in tiles.spans)
    assert text.count("stablehlo.dot_general") == 2 * count <= 64
    assert "stablehlo.while" not in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert all("xbf16>, tensor<" in line and line.count("xbf16>") == 2 for line in products)
    both = lowered(forward_and_backward(one, "blocked"), one.arrays, one.cotangent)
    assert "stablehlo.case" not in both
    assert both.count("stablehlo.while") <= 8  # one a group of tiles, of a known length


def load_call(one):
    found = []
    arguments = one.arguments
    mask, rest = arguments.pop("mask"), arguments
    jax.eval_shape(
        lambda arrays: found.append(prepare(**arrays, mask=mask, platform="gpu")),
        {name: x for name, x in rest.items() if name in ("query", "key", "value")},
    )
    return found[0]


SMALL = {
    "one tile": (2**26, 2**26, 32),
    "a few": (3000, 2000, 32),
    "in loops": (1500, 1000, 1),
    "head by head": (300, 200, 1),
}
OPTIONS = {
    "causal": {"mask": Mask.causal(3)},
    "window and dropout": {
        "mask": Mask.window(9, 2, 3),
        "dropout": KeyedDropout(0.3, jnp.array([3, 14], jnp.uint32)),
    },
    "padded, capped, with sinks": {
        "mask": Mask.lengths(key=jnp.array([30, 0])),
        "soft_cap": 2.0,
        "sinks": jnp.linspace(-1, 1, 6),
    },
    "bias of every head": {"bias": jnp.sin(jnp.arange(6 * 37 * 40)).reshape(1, 6, 37, 40)},
    "bias of every row": {"bias": jnp.cos(jnp.arange(2 * 40)).reshape(2, 1, 1, 40)},
    "function": {
        "score": lambda score, b, n, i, j: jnp.where(i > j + n, score, score * 1.5 - 0.25)
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SMALL)
def test_every_division_equals_the_formula(sizes, options, monkeypatch, close):
    most = dict(zip(("FORWARD", "BACKWARD", "UNROLLED"), SMALL[sizes], strict=True))
    for name, number in most.items():
        monkeypatch.setattr(batched, name, number)
    monkeypatch.setattr("flax_attn.backends.blocked.spans.UNIT", 8)
    rng = np.random.default_rng(7)
    given = {
        "query": jnp.asarray(rng.normal(size=(2, 37, 6, 8)), jnp.float32),
        "key": jnp.asarray(rng.normal(size=(2, 40, 2, 8)), jnp.float32),
        "value": jnp.asarray(rng.normal(size=(2, 40, 2, 5)), jnp.float32),
    }
    found = dict(OPTIONS[options])
    floats = {name: found.pop(name) for name in ("bias", "sinks") if name in found}
    results = []
    for backend in ("blocked", "reference"):

        def run(given, backend=backend):
            one = prepare(**given, platform="gpu", **found)
            # Not the compiled function, which remembers the sizes of another test.
            return batched._attend(one) if backend == "blocked" else load(backend).attend(one)

        output, pull = jax.jit(lambda given, run=run: jax.vjp(run, given))(given | floats)
        (gradients,) = jax.jit(lambda pull, x: pull(x))(pull, jnp.cos(3 * output))
        results.append({"output": output} | gradients)
    close(*results)
