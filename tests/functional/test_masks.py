from functools import reduce
from itertools import combinations, product
from operator import and_

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, attend, dot_product_attention, explain
from flax_attn.functional.mask_part import MaskPart

B, N, T, S, H = 3, 4, 5, 7, 6

IDS = jnp.arange(4 * S).reshape(4, S) // 5 % 3
MASKS = {
    "empty": Mask(),
    "causal": Mask.causal(2),
    "causal_traced": Mask.causal(jnp.array([2, -1, 0])),
    "window": Mask.window(2, None, 1),
    "sliding_window": Mask.sliding_window(3, 2),
    "lengths": Mask.lengths(query=jnp.array([5, 3, 0]), key=jnp.array([7, 0, 4])),
    "lengths_static": Mask.lengths(query=4, key=6),
    "segments": Mask.segments(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 2, 3])),
    "prefix": Mask.prefix(jnp.array([2, 0, 6]), offset=2),
    "prefix_traced": Mask.prefix(jnp.array([2, 0, 6]), offset=jnp.array([0, 2, -3])),
    "prefix_static": Mask.prefix(3, offset=-1),
    "dense": Mask.dense(np.arange(B * N * T * S).reshape(B, N, T, S) % 3 > 0),
    "where": Mask.where(lambda b, n, i, j: (3 * b + n + i * j) % 4 > 0),
    "where_by_arrays": Mask.where(
        lambda b, n, i, j: IDS[b, i + 1] == IDS[n, j], jnp.array([0, 1, -1])
    ),
    "where_summarised": (
        Mask.where(lambda b, n, i, j: (b + n + i) // 2 == j // 3).summarise(T, S, b=B, n=N, tile=2)
    ),
    "all": (
        Mask.causal(2) & Mask.lengths(key=jnp.array([7, 1, 4])) & Mask.dense(np.arange(S) % 5 > 0)
    ),
}
OFFSETS = (-T, -2, 0, 1, 4, S)
WINDOWS = product((None, 0, 1, 3, 9), (None, 0, 2, 9), (-3, 0, 1, 4))
OF_INTEGERS = [
    *(Mask.causal(offset) for offset in OFFSETS),
    *(Mask.window(left, right, offset) for left, right, offset in WINDOWS),
    *(Mask.prefix(length, offset) for length in (0, 2, S, 9) for offset in OFFSETS),
    *(
        Mask.lengths(query=query, key=key)
        for query in (None, 0, 3, T, 9)
        for key in (None, 0, 3, S, 9)
    ),
]
SOME_ROWS = [range(start, stop) for start, stop in combinations(range(T + 1), 2)]


@pytest.fixture(params=MASKS)
def mask(request):
    return MASKS[request.param]


def qkv(*batch):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*batch, T, N, H), (*batch, S, N, H), (*batch, S, N, H)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit
def weights_of(query, key, value, mask):
    return attend(query, key, value, mask=mask, return_weights=True).weights


def table(mask):
    return np.asarray(mask.materialise(B, N, T, S))


def test_tree_round_trip(mask):
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert jax.tree.structure(again) == tree
    assert [type(part) for part in again.parts] == [type(part) for part in mask.parts]
    np.testing.assert_array_equal(table(again), table(mask))


def test_leaves_are_arrays_and_integers_are_structure(mask):
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask))
    hash(jax.tree.structure(mask))


def test_jit_with_a_mask_as_argument(mask):
    np.testing.assert_array_equal(
        jax.jit(Mask.materialise, static_argnums=(1, 2, 3, 4))(mask, B, N, T, S), table(mask)
    )


def test_attention_under_jit_takes_a_mask(mask, close):
    weights = weights_of(*qkv(B), mask)
    np.testing.assert_array_equal(weights > 0, table(mask))
    close(weights.sum(axis=-1), table(mask).any(axis=-1).astype(np.float32))


def test_integers_stay_static_and_arrays_are_traced():
    seen = []

    @jax.jit
    def trace(mask):
        causal, lengths, prefix = mask.parts
        seen.append((causal.offset, prefix.length))
        assert isinstance(lengths.key, jax.core.Tracer)
        assert lengths.query is None
        return mask.materialise(B, N, T, S)

    for offset, length in ((2, 3), (2, 5), (1, 5)):
        mask = Mask.causal(offset) & Mask.lengths(key=jnp.array([length, 4, 7])) & Mask.prefix(6, 1)
        np.testing.assert_array_equal(trace(mask), table(mask))
    assert seen == [(2, 6), (1, 6)]  # another array is the same program, another integer is another


def test_vmap_over_lengths_equals_the_batched_mask(close):
    lengths = Mask.causal(2) & Mask.lengths(query=jnp.array([5, 2, 4]), key=jnp.array([6, 0, 3]))

    def masked(query, key, value, mask):
        return dot_product_attention(query, key, value, mask=mask)

    each = jax.vmap(masked)(*qkv(B), lengths)
    close(each, masked(*qkv(B), lengths))
    assert not each[1].any()


def test_vmap_over_dense_and_segments():
    ids = jnp.arange(B * S).reshape(B, S) // 3
    dense = jnp.arange(B * N * T * S).reshape(B, N, T, S) % 3 > 0
    mask = Mask.segments(ids[:, :T], ids) & Mask.dense(dense)
    one = jax.vmap(lambda mask: mask.materialise(1, N, T, S)[0])(mask)
    np.testing.assert_array_equal(one, table(mask))


def test_scan_carries_a_mask():
    def step(mask, _):
        grown = jax.tree.map(lambda length: length + 1, mask)
        return grown, mask.materialise(B, N, T, S)

    start = Mask.causal(2) & Mask.lengths(key=jnp.array([0, 2, 4]))
    last, tables = jax.jit(lambda mask: jax.lax.scan(step, mask, length=3))(start)
    assert last.parts[0].offset == 2
    np.testing.assert_array_equal(last.parts[1].key, [3, 5, 7])
    for i, one in enumerate(tables):
        np.testing.assert_array_equal(
            one, table(Mask.causal(2) & Mask.lengths(key=jnp.array([0, 2, 4]) + i))
        )
    assert (tables[0] != tables[2]).any()


def test_cond_chooses_between_masks_of_one_structure():
    masks = [Mask.lengths(key=jnp.array([i, i + 1, i + 2])) for i in (1, 3)]
    choose = jax.jit(lambda first: jax.lax.cond(first, lambda: masks[0], lambda: masks[1]))
    for i, first in enumerate((True, False)):
        np.testing.assert_array_equal(table(choose(first)), table(masks[i]))


def test_masks_of_integers_are_hashable_arguments():
    mask = Mask.causal(2) & Mask.sliding_window(3, 2)
    assert hash(mask) == hash(Mask.causal(2) & Mask.sliding_window(3, 2))
    assert mask != Mask.causal(1) & Mask.sliding_window(3, 2)
    static = jax.jit(lambda mask: mask.materialise(B, N, T, S), static_argnums=0)
    np.testing.assert_array_equal(static(mask), table(mask))


def test_a_block_is_a_slice_of_the_whole(mask):
    rows, cols = jnp.array([1, 4, 2]), jnp.array([6, 0, 3, 5])
    block = mask.resolve(B, N, T, S).block(rows, cols)
    np.testing.assert_array_equal(
        np.broadcast_to(block, (B, N, 3, 4)),
        table(mask)[:, :, np.asarray(rows)][:, :, :, np.asarray(cols)],
    )


def keys_seen(seen, rows):
    """Return the keys that any of the rows sees, and those that all see in every batch and head."""
    seen = seen[:, :, rows.start : rows.stop]
    return (
        np.flatnonzero(seen.any(axis=(0, 1, 2))).tolist(),
        np.flatnonzero(seen.all(axis=(0, 1, 2))).tolist(),
    )


def keys_of(kv_range):
    """Return the keys of the outer and of the inner range."""
    outer, inner = (
        range(kv_range.start, kv_range.stop),
        range(kv_range.inner_start, kv_range.inner_stop),
    )
    return list(outer), list(inner)


def kv_range(mask, rows):
    return mask.kv_range(rows[0], rows[-1], S)


def test_kv_ranges_of_integers_are_exact_and_static():
    for mask in (Mask(), *OF_INTEGERS):
        seen = table(mask)
        for rows in SOME_ROWS:
            found = kv_range(mask, rows)
            assert all(isinstance(limit, int) for limit in found)
            assert keys_of(found) == keys_seen(seen, rows), (mask, rows)
            assert found.needs_mask == (not keys_of(found)[1]), (mask, rows)


def test_kv_ranges_of_conjunctions_hold():
    some = [(mask, table(mask)) for mask in OF_INTEGERS[::7]]
    for several in (*combinations(some, 2), *combinations(some[::3], 3)):
        mask, seen = (
            reduce(and_, [mask for mask, _ in several]),
            reduce(and_, [seen for _, seen in several]),
        )
        for rows in SOME_ROWS:
            (outer, inner), (by_some, by_all) = keys_of(kv_range(mask, rows)), keys_seen(seen, rows)
            assert set(by_some) <= set(outer), (mask, rows)
            assert inner == by_all, (mask, rows)


def test_kv_ranges_hold_over_batch_and_heads(mask):
    for rows in SOME_ROWS:
        (outer, inner), (by_some, by_all) = (
            keys_of(kv_range(mask, rows)),
            keys_seen(table(mask), rows),
        )
        assert set(by_some) <= set(outer)
        assert set(inner) <= set(by_all)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask.causal(2) & Mask.prefix(1, offset=-1), (0, 3, 0, 2)),
        (Mask.sliding_window(3, 2), (2, 6, 3, 5)),
        # Hidden from all, whatever the array holds.
        (Mask.lengths(query=2, key=jnp.array(3)), (0, 0, 0, 0)),
        (Mask.lengths(query=5, key=3), (0, 3, 0, 3)),
        (MASKS["dense"], (0, S, 0, 0)),
        (MASKS["dense"] & Mask.sliding_window(2, 2), (3, 6, 0, 0)),
    ],
)
def test_what_depends_on_integers_alone_is_known_before_tracing(mask, expected):
    found = [mask.kv_range(2, 3, S)]
    jax.make_jaxpr(lambda mask: found.append(mask.kv_range(2, 3, S)))(mask)
    assert found == [expected] * 2
    assert all(isinstance(limit, int) for limit in found[1])


def test_the_inner_range_of_segments_is_known_to_be_empty():
    found = []
    jax.make_jaxpr(lambda mask: found.append(mask.kv_range(2, 3, S)))(
        MASKS["segments"] & Mask.sliding_window(2, 2)
    )
    assert found[0].needs_mask


ROWS, COLS = 9, 11
ONE_ROW = {
    "nothing": Mask(),
    "causal": Mask.causal(jnp.array([2])),
    "causal below": Mask.causal(-4),
    "window": Mask.window(3, 1, jnp.array([-2])),
    "window open to the left": Mask.window(None, 1, jnp.array([4])),
    "window open to the right": Mask.window(1, None, jnp.array([-5])),
    "prefix": Mask.prefix(jnp.array([4]), offset=-2),
    "lengths": Mask.lengths(query=jnp.array([6]), key=jnp.array([8])),
    "no keys": Mask.lengths(key=0),
    "far lengths": Mask.lengths(query=2**40, key=2**40),
    "several": (
        Mask.causal(jnp.array([2]))
        & Mask.lengths(key=jnp.array([7]))
        & Mask.window(4, None, jnp.array([2]))
    ),
}
NOT_TIGHT = {
    "segments": Mask.segments(
        np.array([0, 0, 1, 1, 1, 3, 3, 3, 3]), np.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 9])
    ),
    "unsorted segments": Mask.segments(
        np.array([5, 5, -1, 0, 5, 2, 2, 0, 7]), np.array([0, 5, 5, 0, 3, 2, 2, 5, 1, 1, 4])
    ),
    "extreme segments": Mask.segments(
        np.array([-(2**31), 0, 2**31 - 1] * 3, np.int32),
        np.array([2**31 - 1] * 6 + [-(2**31)] * 5, np.int32),
    ),
    "dense": Mask.dense(np.arange(ROWS * COLS).reshape(ROWS, COLS) % 5 > 2),
}


@pytest.mark.parametrize("name", [*ONE_ROW, *NOT_TIGHT])
def test_kv_ranges_of_traced_queries_hold_what_is_seen(name):
    mask = (ONE_ROW | NOT_TIGHT)[name]
    seen = np.broadcast_to(mask.block(jnp.arange(ROWS), jnp.arange(COLS))[0, 0], (ROWS, COLS))
    spans = np.array(
        [(first, last) for first in range(ROWS) for last in range(first, ROWS)], np.int32
    )
    found = jax.vmap(
        lambda span: jnp.stack(list(map(jnp.int32, mask.kv_range(span[0], span[1], COLS))))
    )(spans)
    for (first, last), limits in zip(spans, np.asarray(found), strict=True):
        rows, (start, stop, inner_start, inner_stop) = seen[first : last + 1], limits
        cols = np.flatnonzero(rows.any(axis=0))
        assert all(start <= col < stop for col in cols)
        assert rows[:, inner_start : max(inner_stop, inner_start)].all()
        if name in ONE_ROW:
            by_all = np.flatnonzero(rows.all(axis=0))
            assert list(range(inner_start, inner_stop)) == list(by_all)
            assert not len(cols) or (start, stop) == (cols[0], cols[-1] + 1)


def test_sorted_segments_are_skipped():
    ids = jnp.arange(12, dtype=jnp.int32) // 4
    assert Mask.segments(ids).kv_range(jnp.int32(5), jnp.int32(6), 12)[:2] == (4, 8)


class Checkerboard(MaskPart):
    """A part unknown to the package, defined by `allow` alone: every other key, shifted by head."""

    def __init__(self, heads):
        self.heads = heads

    def allow(self, rows, cols):
        return (rows + cols + self.heads[:, :, None, None]) % 2 == 0


def checkerboard():
    return Mask((Checkerboard(jnp.arange(B * N).reshape(B, N)),))


def test_an_unknown_part_shows_every_key_and_needs_a_mask():
    mask = checkerboard()
    assert mask.kv_range(0, 2, S) == (0, S, 0, 0)
    assert (mask & Mask.causal(1)).split_band() == ((None, 1), mask)
    assert "Checkerboard" in repr(mask)


def test_an_unknown_part_has_rows_and_shifts():
    mask = checkerboard()
    np.testing.assert_array_equal(row_by_row(mask), table(mask)[..., 1:])
    rows = mask.row(1)
    np.testing.assert_array_equal(rows.materialise(1, N, T, S)[0], table(mask)[1])
    np.testing.assert_array_equal(rows.row(0, 2).materialise(1, 1, T, S)[0, 0], table(mask)[1, 2])
    for start in (1, jnp.array(1), jnp.array([1])):
        np.testing.assert_array_equal(
            mask.shift(start, T - 1, S).materialise(B, N, T - 1, S), table(mask)[:, :, 1:]
        )
    shifted = mask.shift(jnp.array([0, 2, 1]), 2, S).materialise(B, N, 2, S)
    expected = [table(mask)[b, :, start : start + 2] for b, start in enumerate((0, 2, 1))]
    np.testing.assert_array_equal(shifted, expected)


@jax.jit
def row_by_row(mask):
    """Return the whole mask, one batch row and head at a time, at the key indices from 1 on."""
    cut = lambda b, n: mask.row(b, n).block(jnp.arange(T), 1 + jnp.arange(S - 1))  # noqa: E731
    one = lambda i: jnp.broadcast_to(cut(i // N, i % N), (1, 1, T, S - 1))[0, 0]  # noqa: E731
    return jax.lax.map(one, jnp.arange(B * N)).reshape(B, N, T, S - 1)


def test_the_rows_make_up_the_mask(mask):
    np.testing.assert_array_equal(row_by_row(mask.resolve(B, N, T, S)), table(mask)[..., 1:])


@pytest.mark.parametrize(
    "shape", [(S,), (1, S), (T, 1), (N, 1, S), (1, T, S), (B, 1, 1, S), (1, N, T, 1), (B, N, 1, 1)]
)
def test_the_rows_make_up_a_dense_mask_of_any_shape(shape):
    mask = Mask.dense(np.arange(np.prod(shape)).reshape(shape) % 3 > 0)
    np.testing.assert_array_equal(row_by_row(mask), table(mask)[..., 1:])


def test_the_rows_make_up_segments_per_batch_row():
    mask = Mask.segments(np.arange(B * T).reshape(B, T) % 3, np.arange(B * S).reshape(B, S) % 4)
    np.testing.assert_array_equal(row_by_row(mask), table(mask)[..., 1:])


@pytest.mark.parametrize("b", [1, jnp.int32(1), jnp.uint32(1)], ids=["int", "int32", "uint32"])
def test_a_row_is_a_mask_of_one_row_and_one_head(mask, b):
    row = mask.resolve(B, N, T, S).row(b, 2)
    np.testing.assert_array_equal(row.materialise(1, 1, T, S)[0, 0], table(mask)[1, 2])


def test_a_row_keeps_integers_static_and_the_kv_range():
    mask = (
        Mask.sliding_window(3, 2)
        & Mask.prefix(4, 1)
        & Mask.lengths(query=4, key=jnp.array([3, 2, 0]))
    )
    row = jax.eval_shape(lambda mask, b: mask.row(b, 0), mask, jnp.int32(1))
    assert row.parts[:2] == mask.parts[:2]
    assert row.parts[2].query == 4
    assert row.parts[0].kv_range(1, 2, S) == mask.parts[0].kv_range(1, 2, S)
    assert all(isinstance(limit, int) for part in row.parts[:2] for limit in part.kv_range(1, 2, S))


@pytest.mark.parametrize("huge", [2**31, 2**40, 2**70])
def test_integers_beyond_every_index(huge):
    everything = (
        Mask.window(huge, huge, 0) & Mask.lengths(query=huge, key=huge) & Mask.prefix(huge, 0)
    )
    assert table(everything).all()
    assert everything.kv_range(0, T - 1, S) == (0, S, 0, S)


def test_numpy_integers_stay_static(no_shape_checks):
    mask = Mask.window(np.int64(2), np.int32(1), np.int64(1)) & Mask.sliding_window(np.int64(3), 2)
    assert mask == Mask.window(2, 1, 1) & Mask.sliding_window(3, 2)
    assert not jax.tree.leaves(mask)


def test_a_mask_of_arrays_without_values_still_has_a_repr():
    mask = (
        Mask.causal()
        & Mask.lengths(key=jnp.array([3, 2]))
        & Mask.dense(jnp.ones((2, 1, 40, 40), bool))
    )
    expected = "Mask.causal() & Mask.lengths(key=<array (2,)>) & Mask.dense(<array (2, 1, 40, 40)>)"
    seen = []
    abstract = jax.eval_shape(lambda mask: (seen.append(repr(mask)), mask)[1], mask)
    assert [*seen, repr(abstract)] == [expected] * 2
    for leaf in jax.tree.leaves(mask):
        leaf.delete()
    assert repr(mask) == expected
    placeholders = jax.tree.map(lambda _: 0.5, mask)
    assert repr(placeholders) == "Mask.causal() & Mask.lengths(key=0.5) & Mask.dense(0.5)"


def test_and_lets_through_what_both_let_through(mask):
    for other in MASKS.values():
        np.testing.assert_array_equal(table(mask & other), table(mask) & table(other))


def test_counts_of_64_bits_are_read_whole_where_these_are_switched_off():
    with jax.enable_x64(True):
        counts = jnp.array([2**32 + 1, 2, -(2**32) + 3])
    assert counts.dtype == "int64"
    seen = Mask.lengths(key=counts).materialise(3, 1, 1, S)
    assert seen[:, 0, 0].sum(axis=1).tolist() == [S, 2, 0]


ABSTRACT = {
    "lengths": lambda of: Mask.lengths(key=of((B,), jnp.int32)),
    "segments": lambda of: Mask.segments(of((B, T), jnp.int32), np.zeros((B, S), np.int64)),
    "offset": lambda of: Mask.causal(of((B,), jnp.int8)),
    "prefix": lambda of: Mask.prefix(of((B,), jnp.int32), 2),
    "dense": lambda of: Mask.dense(of((B, 1, T, S), bool)),
}


@pytest.mark.parametrize("make", ABSTRACT.values(), ids=ABSTRACT)
@pytest.mark.parametrize("platform", ["cpu", "v5e", "h100"])
def test_a_mask_of_shapes_is_explained_as_one_of_arrays(make, platform):
    query, key = (jax.ShapeDtypeStruct((B, x, N, H), jnp.float32) for x in (T, S))

    def asked(of):
        mask = make(of) & Mask.lengths(query=3)
        return explain(query, key, key, mask=mask, platform=platform)

    abstract, known = asked(jax.ShapeDtypeStruct), asked(jnp.zeros)
    assert abstract.backend == known.backend
    refused = known.memory.keys() - abstract.memory.keys()
    assert abstract.memory.items() <= known.memory.items()
    # splash compiles a dense mask into its grid, and must know it.
    assert all("known before tracing" in str(abstract.refusals[name]) for name in refused)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda of: Mask.dense(of((T, S), jnp.float32)), "whose values are not known"),
        (lambda of: Mask.lengths(key=of((B,), jnp.float32)), "key lengths must be integers"),
        (
            lambda of: Mask.segments(of((B, T), jnp.int32), np.full((B, S), 2**40)),
            "key segments must fit 32 bits",
        ),
    ],
)
def test_shapes_in_a_mask_are_checked_as_tracers_are(make, rule):
    with jax.enable_x64(False), pytest.raises(ValueError, match=rule):
        make(jax.ShapeDtypeStruct)
