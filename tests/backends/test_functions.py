"""Functions of indices as masks and scores: in tiles, with other arguments, under transforms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    KeyedDropout,
    Mask,
    ScoreFunction,
    Unsupported,
    attend,
    dot_product_attention,
    explain,
)
from flax_attn.backends.blocked.heads import attend_heads
from flax_attn.backends.call import prepare
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.backends.splash import interpreted
from flax_attn.functional.mask_function import Where
from flax_attn.parity import tolerance

from .conformance import FAST

jit = partial(jax.jit, compiler_options=FAST)
B, N, K, T, S, H = 2, 4, 2, 22, 37, 3
DRAW = np.random.default_rng(0)
IDS = jnp.asarray(DRAW.integers(0, 3, (B, S)))
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
OTHERS = {"table": (N, T + S), "gate": (T,), "bias": (1, N, T, S), "sinks": (N,)}


@pytest.fixture
def tiles(monkeypatch):
    def patch(platform="cpu"):
        monkeypatch.setattr("flax_attn.backends.call.platform_of", lambda _: platform)
        monkeypatch.setattr(
            load("blocked"), "block", 16 if platform == "cpu" else 64
        )  # there a block is a quarter
        monkeypatch.setattr(load("blocked"), "edge", 8)

    return patch


def arrays(names=(*SHAPES, *OTHERS), dtype="float64"):
    found = {
        name: np.random.default_rng(len(name)).normal(size=(SHAPES | OTHERS)[name])
        for name in names
    }
    if "bias" in found:
        found["bias"][np.random.default_rng(9).random(found["bias"].shape) < 0.2] = -np.inf
    return {name: jnp.asarray(x, dtype) for name, x in found.items()}


def sees(b, n, i, j):
    return ((IDS[b, i] == IDS[b, j]) | ((i + j + n) % 5 == 0)) & (i != 4)  # query 4 sees nothing


def rescored(table, gate):
    def function(score, b, n, i, j):
        return jnp.where(j == 3 * i, -jnp.inf, jnp.tanh(score) * table[n, j - i + T] + gate[i])

    return function


def everything(arrays, backend, mask):
    others = {name: arrays[name] for name in (*SHAPES, "bias", "sinks")}
    dropout = KeyedDropout(0.2, jnp.array([3, 4], jnp.uint32))
    score = rescored(arrays["table"], arrays["gate"])
    return dot_product_attention(
        **others, mask=mask, score=score, soft_cap=2.0, dropout=dropout, backend=backend
    )


def both(function, arrays):
    output, pull = jax.vjp(function, arrays)
    return {"output": output, **pull(jnp.cos(3 * output))[0]}


def assert_close(found, expected, allowed=tolerance.GRADIENT):
    for name, ours in found.items():
        assert np.abs(ours - expected[name]).max() <= allowed * max(
            np.abs(expected[name]).max(), 1
        ), name


PLAIN = Mask.where(sees)
MASKED = {
    "plain": PLAIN & Mask.causal(7),
    "summarised": PLAIN.summarise(T, S, b=B, n=N, tile=8) & Mask.window(None, 20, 2),
    "alone": PLAIN.summarise(T, S, b=B, n=N, tile=5),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "platform"), [(name, "cpu") for name in MASKED] + [("summarised", "gpu")], ids=str
)
def test_with_everything_else_a_call_may_have(name, platform, tiles):
    tiles(platform)
    ours, theirs = (
        jit(partial(both, partial(everything, backend=backend, mask=MASKED[name])))(arrays())
        for backend in ("blocked", "reference")
    )
    assert_close(ours, theirs)
    assert not ours["output"][:, 4].any()
    assert all(np.abs(theirs[name]).max() > 1e-3 for name in theirs)


@pytest.mark.usefixtures("x64")
def test_a_function_is_told_of_positions(tiles):
    tiles()
    given, offset, order = arrays(SHAPES), jnp.array([3, 15]), jnp.asarray(DRAW.permutation(S))
    late = ScoreFunction(
        lambda score, b, n, i, j: score * (1 + (i + 2 * j) % 7).astype(score.dtype), None, order
    )
    late = ScoreFunction(late.function, jnp.arange(T)[None] + offset[:, None], order)
    i, j = (jnp.arange(T)[None] + offset[:, None])[:, None, :, None], order[None, None, None]
    factor = 1 + (i + 2 * j) % 7
    mask = Mask.where(lambda b, n, i, j: (i - j) % 3 > 0, offset)
    seen = (
        jnp.arange(T)[None, None, :, None]
        + offset[:, None, None, None]
        - jnp.arange(S)[None, None, None]
    ) % 3 > 0

    def by_hand(given):
        keys, values = (jnp.repeat(given[name], N // K, axis=2) for name in ("key", "value"))
        scores = jnp.einsum("bthd,bshd->bhts", given["query"], keys).swapaxes(1, 1) * H**-0.5
        weights = jax.nn.softmax(
            jnp.where(seen, scores * factor.astype(scores.dtype), -jnp.inf), axis=-1
        )
        return jnp.einsum("bhts,bshd->bthd", weights, values)

    def ours(backend, given):
        return dot_product_attention(**given, mask=mask, score=late, backend=backend)

    expected = jit(partial(both, by_hand))(given)
    for backend in ("reference", "blocked", "decode"):
        assert_close(jit(partial(both, partial(ours, backend)))(given), expected)


def test_what_stands_in_hidden_slots_does_not_reach_captured_arrays(tiles):
    tiles()
    given = arrays((*SHAPES, "table"), "float32")
    hidden = Mask.lengths(key=jnp.array([20, 9]))

    def attend(given, backend):
        qkv, table = {name: given[name] for name in SHAPES}, given["table"]
        score = lambda score, b, n, i, j: score * table[n, j]  # noqa: E731
        return dot_product_attention(**qkv, mask=hidden, score=score, backend=backend)

    largest = float(jnp.finfo(jnp.float32).max)
    for backend in ("blocked", "reference", "decode"):
        run = jit(partial(both, partial(attend, backend=backend)))
        found, expected = (
            run(given | {name: given[name].at[1, 9:].set(fill) for name in ("key", "value")})
            for fill in (largest, 0.0)
        )
        for name, ours in found.items():
            np.testing.assert_array_equal(ours, expected[name])


@pytest.mark.usefixtures("x64")
def test_queries_that_fill_up_a_block_do_not_reach_gradients(tiles):
    """What a function answers there may be so large that its exponent overflows."""
    tiles()
    given = arrays(SHAPES) | {"slope": jnp.float64(40.0)}

    def loss(given, backend):
        qkv, slope = {name: given[name] for name in SHAPES}, given["slope"]
        far = lambda score, b, n, i, j: score + slope * abs(i - j).astype(score.dtype)  # noqa: E731
        return (
            dot_product_attention(**qkv, mask=Mask.causal(0), score=far, backend=backend) ** 2
        ).sum()

    found, reference = (
        jit(jax.grad(partial(loss, backend=backend)))(given) for backend in ("blocked", "reference")
    )
    assert_close(found, reference)


@pytest.mark.usefixtures("x64")
def test_captured_arrays_are_seen_by_transforms(tiles):
    tiles()
    given = arrays((*SHAPES, "table", "gate"))
    tables = jnp.stack([given["table"], given["table"] ** 2])

    def loss(table, given, backend):
        qkv = {name: given[name] for name in SHAPES}
        score = rescored(table, given["gate"])
        return jnp.square(
            dot_product_attention(**qkv, mask=PLAIN, score=score, backend=backend)
        ).sum()

    found = jit(jax.vmap(jax.grad(partial(loss, backend="blocked")), (0, None)))(tables, given)
    for ours, table in zip(found, tables, strict=True):
        np.testing.assert_allclose(
            ours, jax.grad(loss)(table, given, "reference"), rtol=0, atol=1e-11
        )
    along = jnp.cos(given["table"])
    curvatures = [
        jit(lambda t, b=backend: jax.jvp(lambda t: jax.grad(loss)(t, given, b), (t,), (along,))[1])(
            given["table"]
        )
        for backend in ("blocked", "reference")
    ]
    np.testing.assert_allclose(*curvatures, rtol=0, atol=tolerance.SECOND)


def test_a_function_that_is_made_anew_is_compiled_once(tiles):
    tiles()
    given, traced = arrays(SHAPES, "float32"), []

    @jax.jit
    def attend(given, mask):
        traced.append(mask)
        return dot_product_attention(**given, mask=mask, backend="blocked")

    def of(ids, distance):
        return Mask.where(lambda b, n, i, j: (ids[b, i] == ids[b, j]) & (i - j < distance))

    outputs = [attend(given, of(IDS + 5 * i, 9)) for i in range(2)] + [
        attend(given, of(IDS.at[0, :9].set(7), 9))
    ]
    assert len(traced) == 1  # arrays are arguments
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] != outputs[2]).any()
    attend(given, of(IDS, 10))
    assert len(traced) == 2


def test_what_a_function_reads_is_read_in_every_call():
    table, x = nnx.Param(jnp.zeros(3)), jnp.eye(3)[None, :, None]

    def score(score, b, n, i, j):  # the same object each time, as that of a module
        return score + table[j]

    def first_row():
        return attend(x, x, x, score=score, return_weights=True).weights[0, 0, 0]

    before, inside = first_row(), jax.jit(first_row)()
    table[...] = jnp.array([0.0, 5.0, -5.0])
    after, inside_again = first_row(), jax.jit(lambda: first_row())()
    np.testing.assert_allclose(inside, before, rtol=1e-6)
    np.testing.assert_allclose(inside_again, after, rtol=1e-6)
    assert after[1] > 0.9 > before[1]


def test_an_eager_call_compiles_its_loops_once(tiles):
    tiles()
    given = arrays((*SHAPES, "table"), "float32")
    qkv = {name: given[name] for name in SHAPES}

    def compiled(score):
        before = attend_heads._cache_size()
        dot_product_attention(**qkv, score=score, mask=PLAIN, backend="blocked")
        return attend_heads._cache_size() - before

    def added(table):
        return lambda score, b, n, i, j: jnp.tanh(score) + table[n, j]

    def kept(score, b, n, i, j):
        return jax.nn.relu(score)  # which has a rule of its own for derivatives

    assert [compiled(added(given["table"] * i)) for i in range(3)] == [1, 0, 0]
    assert [compiled(kept) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("name", [name for name in BACKENDS if "score" not in load(name).honours])
def test_other_backends_refuse_a_function_of_scores_by_its_name(name):
    on = {"native": "cpu", "splash": "cpu"}.get(name, "gpu")
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16 if on == "gpu" else jnp.float32)

    def shifted(score, b, n, i, j):
        return score + 1

    with interpreted():
        reason = explain(x, x, x, score=shifted, platform=on).refusals[name]
    if "not installed" not in reason and "compiler" not in reason:
        assert "takes no score; got shifted" in reason


def test_auto_goes_where_functions_run():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    for platform in ("cpu", "gpu", "tpu"):
        found = explain(x, x, x, mask=Mask.where(lambda b, n, i, j: i > j), platform=platform)
        kernel = "blocked" if platform == "cpu" else "fused"
        assert found.backend == kernel
        assert "Where" in (found.refusals["native"] + found.refusals["splash"]) or platform == "gpu"
        assert (
            explain(x, x, x, score=lambda score, b, n, i, j: score, platform=platform).backend
            == kernel
        )
    with pytest.raises(Unsupported, match="native takes no score"):
        dot_product_attention(
            *(jnp.ones((1, 4, 1, 8)),) * 3, score=lambda s, b, n, i, j: s, backend="native"
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_score_has_the_dtype_of_sums(dtype):
    seen = []

    def function(score, b, n, i, j):
        seen.append((score.dtype.name, i.dtype.name, score.shape))
        return score

    x = jnp.ones((1, 3, 1, 4), dtype)
    assert dot_product_attention(x, x, x, score=function).dtype == dtype
    assert seen == [("float32", "int32", ())]


def tile_table(mask, size):
    seen = np.asarray(mask.materialise(B, N, T, S))
    rows, cols = (np.minimum(np.arange(-(-x // size) * size), x - 1) for x in (T, S))
    seen = seen[:, :, rows][..., cols].reshape(B, N, len(rows) // size, size, -1, size)
    return seen.any(axis=(3, 5)), seen.all(axis=(3, 5))


@pytest.mark.parametrize("size", [3, 8, 64])
def test_a_summary_says_which_tiles_are_empty_and_which_are_whole(size):
    mask = Mask.where(lambda b, n, i, j: (i // 8 != j // 6 + n) | (j == 2 + b)) & Mask.lengths(
        key=jnp.array([S, 9])
    )
    summary = mask.summarise(T, S, b=B, n=N, tile=size).parts[0].summary
    for found, expected in zip((summary.some, summary.whole), tile_table(mask, size), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


@pytest.mark.parametrize(
    "others", [Mask(), Mask.causal(9), Mask.window(4, 30, 2)], ids=["alone", "causal", "window"]
)
def test_tiles_hold_what_is_seen(others):
    mask = (
        Mask.where(lambda b, n, i, j: (i // 8 - j // 8) % 3 != 1).summarise(T, S, tile=4) & others
    )
    seen = np.asarray(mask.materialise(1, 1, T, S))[0, 0]
    starts = jnp.arange(0, S, 8, dtype=jnp.int32)
    skipped = needless = 0
    for first in range(0, T, 8):
        last = min(first + 8, T) - 1
        found = mask.tiles(jnp.int32(first), jnp.int32(last), starts, starts + 8, S)
        for start, some, whole in zip(starts.tolist(), *found, strict=True):
            tile = seen[first : last + 1, start : start + 8]
            assert some or not tile.any()
            assert not whole or (tile.all() and start + 8 <= S)
            skipped, needless = skipped + (not some), needless + bool(whole)
    assert skipped >= 4
    assert needless >= 4 or others.parts


def test_whole_tiles_are_not_masked(tiles, monkeypatch):
    tiles()
    masked = []
    monkeypatch.setattr(Where, "allow", _counting(Where.allow, masked))
    given = {name: jnp.ones((1, 64, 1, 4)) for name in SHAPES}
    mask = Mask.where(lambda b, n, i, j: (i < 32) | (j % 16 < i)).summarise(64, 64, tile=16)
    masked.clear()
    jax.block_until_ready(dot_product_attention(**given, mask=mask, backend="blocked"))
    jax.effects_barrier()
    assert masked == []  # of the tiles all are whole
    mask = Mask.where(lambda b, n, i, j: (i < 32) | (j % 16 < i - 40)).summarise(64, 64, tile=16)
    masked.clear()
    jax.block_until_ready(dot_product_attention(**given, mask=mask, backend="blocked"))
    jax.effects_barrier()
    assert len(masked) == 8  # the lower half


def _counting(allow, counts):
    def counted(part, rows, cols):
        jax.debug.callback(lambda: counts.append(1))
        return allow(part, rows, cols)

    return counted


def test_a_summary_is_one_of_its_size():
    mask = Mask.where(lambda b, n, i, j: i > j + n).summarise(T, S, n=N)
    with pytest.raises(
        ValueError,
        match=rf"got t={T}, s={T}, and a summary for t={T}, s={S}\. Make it for this call",
    ):
        mask.materialise(B, N, T, T)
    with pytest.raises(ValueError, match=f"this mask of a function is one for n={N}; got n=2"):
        mask.materialise(B, 2, T, S)
    with pytest.raises(ValueError, match="tile must be a positive integer; got tile=0"):
        Mask.where(sees).summarise(T, S, b=B, n=N, tile=0)
    assert repr(mask) == "Mask.where(<lambda>, offset=0).summarise(22, 37, tile=128)"


def test_a_summary_is_left_behind_by_the_queries_of_a_step():
    mask = Mask.where(lambda b, n, i, j: (i - 2 * j) % 5 < 2).summarise(S, S, tile=4)
    step = mask.shift(jnp.array([5, 20]), 3, S)
    assert not step.summarised
    whole = np.asarray(mask.materialise(B, N, S, S))
    np.testing.assert_array_equal(step.materialise(B, N, 3, S)[0], whole[0, :, 5:8])
    np.testing.assert_array_equal(step.materialise(B, N, 3, S)[1], whole[1, :, 20:23])


def test_a_call_has_a_function_as_data():
    table = jnp.ones((N, T + S))
    x = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    call = prepare(*x.values(), score=rescored(table, table[0]))
    assert [leaf.shape for leaf in call.score.floats] == [(N, T + S), (T + S,)]
    structure = jax.tree.structure(call.score)
    again = prepare(*x.values(), score=rescored(table + 1, table[1])).score
    assert jax.tree.structure(again) == structure
    assert hash(structure) == hash(jax.tree.structure(again))
