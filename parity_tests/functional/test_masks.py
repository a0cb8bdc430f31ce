"""Every kind of mask, on both sides, against loops that say what it means."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask

B, N, T, S = 3, 2, 5, 7
# One of each row of the batch.
OFFSETS = np.array([0, 2, -3])
LENGTHS = np.array([0, 3, 7])
QUERY_LENGTHS = np.array([5, 0, 4])
QUERY_IDS = np.array([[0, 0, 1, 1, 2], [4, 4, 4, 4, 4], [2, 1, 0, 1, 2]])
KEY_IDS = np.array([[0, 0, 1, 1, 2, 2, 3], [4, 0, 4, 0, 4, 0, 4], [0, 1, 2, 3, 2, 1, 0]])
DENSE = np.random.default_rng(0).random((B, 1, T, S)) < 0.5


def of(values, b):
    return int(values[b]) if np.ndim(values) else int(values)


def causal(offset):
    return lambda b, i, j: j <= of(offset, b) + i


def window(left, right, offset):
    def sees(b, i, j):
        p = of(offset, b) + i
        return (left is None or j >= p - left) and (right is None or j <= p + right)

    return sees


def prefix(length, offset):
    return lambda b, i, j: j <= of(offset, b) + i or j < of(length, b)


def lengths(query, key):
    return lambda b, i, j: (query is None or i < of(query, b)) and (key is None or j < of(key, b))


def segments(query, key):
    row = lambda ids, b: ids[b] if ids.ndim == 2 else ids  # noqa: E731
    return lambda b, i, j: row(query, b)[i] == row(key, b)[j]


def pattern(b, n, i, j):
    return ((i + 2 * j + b) % 3 > 0) | (i == j)


# How a mask is made, and a loop that says what it means.
KINDS = {
    "causal top left": (("causal", 0), causal(0)),
    "causal bottom right": (("causal", S - T), causal(S - T)),
    "causal before": (("causal", -2), causal(-2)),
    "causal per row": (("causal", OFFSETS), causal(OFFSETS)),
    "window": (("window", 1, 2, 1), window(1, 2, 1)),
    "window of itself": (("window", 0, 0, 2), window(0, 0, 2)),
    "window to the left": (("window", 2, None, 0), window(2, None, 0)),
    "window to the right": (("window", None, 1, 0), window(None, 1, 0)),
    "window without bounds": (("window", None, None, 0), window(None, None, 0)),
    "window per row": (("window", 1, 1, OFFSETS), window(1, 1, OFFSETS)),
    "sliding": (("sliding_window", 3, 2), window(2, 0, 2)),
    "sliding of one": (("sliding_window", 1, 0), window(0, 0, 0)),
    "prefix": (("prefix", 4, 0), prefix(4, 0)),
    "prefix per row": (("prefix", LENGTHS, OFFSETS), prefix(LENGTHS, OFFSETS)),
    "key lengths": (("lengths", None, LENGTHS), lengths(None, LENGTHS)),
    "query lengths": (("lengths", QUERY_LENGTHS, None), lengths(QUERY_LENGTHS, None)),
    "both lengths": (("lengths", QUERY_LENGTHS, LENGTHS), lengths(QUERY_LENGTHS, LENGTHS)),
    "one length": (("lengths", 4, 3), lengths(4, 3)),
    "segments": (("segments", QUERY_IDS, KEY_IDS), segments(QUERY_IDS, KEY_IDS)),
    "segments of all rows": (
        ("segments", QUERY_IDS[0], KEY_IDS[0]),
        segments(QUERY_IDS[0], KEY_IDS[0]),
    ),
    "dense": (("dense", DENSE), lambda b, i, j: DENSE[b, 0, i, j]),
    "dense (t, s)": (("dense", DENSE[1, 0]), lambda b, i, j: DENSE[1, 0, i, j]),
    "dense keys": (("dense", DENSE[:, :, :1]), lambda b, i, j: DENSE[b, 0, 0, j]),
    "where": (("where", pattern), lambda b, i, j: pattern(b, 0, i, j)),
    "where at an offset": (("where", pattern, -2), lambda b, i, j: pattern(b, 0, i - 2, j)),
    "where per row": (
        ("where", pattern, OFFSETS),
        lambda b, i, j: pattern(b, 0, i + OFFSETS[b], j),
    ),
    "dense queries": (("dense", DENSE[..., :1]), lambda b, i, j: DENSE[b, 0, i, 0]),
}
EVERY_KIND = pytest.mark.parametrize(("spec", "sees"), KINDS.values(), ids=KINDS)


def make(side, spec):
    name, *arguments = spec
    arguments = [side.array(a) if isinstance(a, np.ndarray) else a for a in arguments]
    if name == "lengths":
        return side.Mask.lengths(query=arguments[0], key=arguments[1])
    return getattr(side.Mask, name)(*arguments)


def table(sees, rows=range(T), cols=range(S)):
    """Return what a loop shows at every place, `(B, N, rows, cols)`."""
    seen = np.array([bool(sees(b, i, j)) for b, i, j in product(range(B), rows, cols)])
    return np.repeat(seen.reshape(B, 1, len(rows), len(cols)), N, axis=1)


def whole(side, mask):
    return side.numpy(mask.materialise(B, N, T, S))


def assert_means(side, mask, sees):
    """Assert that a mask shows what a loop does."""
    np.testing.assert_array_equal(whole(side, mask), table(sees))


@EVERY_KIND
def test_a_mask_means_what_its_loop_says(side, spec, sees):
    mask = make(side, spec)
    assert whole(side, mask).dtype == bool
    assert_means(side, mask, sees)


@EVERY_KIND
def test_a_block_is_the_slice_of_the_whole(side, spec, sees):
    # Neither contiguous nor in order.
    rows, cols = np.array([1, 3, 4]), np.array([6, 0, 2, 5])
    block = make(side, spec).resolve(B, N, T, S).block(side.array(rows), side.array(cols))
    block = np.broadcast_to(side.numpy(block), (B, N, 3, 4))
    np.testing.assert_array_equal(block, table(sees, rows, cols))


@pytest.mark.parametrize(
    "names", [("causal per row", "key lengths"), ("segments", "sliding", "dense"), ("prefix",) * 2]
)
def test_a_conjunction(side, names):
    first, *rest = (make(side, KINDS[name][0]) for name in names)
    for mask in rest:
        first = first & mask
    assert len(first.parts) == len(names)
    expected = np.all([table(KINDS[name][1]) for name in names], axis=0)
    np.testing.assert_array_equal(whole(side, first), expected)


def test_the_empty_mask_hides_nothing(side):
    assert whole(side, side.Mask()).all()
    mask = make(side, KINDS["causal per row"][0])
    np.testing.assert_array_equal(whole(side, side.Mask() & mask), whole(side, mask & side.Mask()))
    assert side.file("functional.masks").as_mask(None).parts == ()


@pytest.mark.parametrize("name", ["causal", "sliding_window", "window", "prefix"])
def test_the_offset_is_zero_where_t_is_s(side, name):
    arguments = {"causal": (), "sliding_window": (2,), "window": (1, 0), "prefix": (2,)}[name]
    default = getattr(side.Mask, name)(*arguments).materialise(1, 1, S, S)
    given = getattr(side.Mask, name)(*arguments, 0).materialise(1, 1, S, S)
    assert (side.numpy(default) == side.numpy(given)).all()
    assert not side.numpy(default).all()


def test_sliding_window_is_its_number_of_keys(side):
    seen = side.numpy(side.Mask.sliding_window(3).materialise(1, 1, S, S))[0, 0]
    assert seen.sum(axis=-1).tolist() == [1, 2, 3, 3, 3, 3, 3]
    assert seen.diagonal().all()


def test_segments_of_self_attention_are_given_once(side):
    ids = np.array([[0, 0, 1, 2, 1]])
    seen = side.numpy(side.Mask.segments(side.array(ids)).materialise(1, 1, T, T))[0, 0]
    np.testing.assert_array_equal(seen, ids == ids.T)


@pytest.mark.parametrize(
    ("t", "s", "offset"), [(4, 4, None), (3, 6, 0), (3, 6, 3), (6, 3, -3), (6, 3, 0)]
)
def test_create_causal_mask(side, t, s, offset):
    seen = side.numpy(side.create_causal_mask(t, s, offset))
    expected = [[j <= (offset or 0) + i for j in range(s)] for i in range(t)]
    np.testing.assert_array_equal(seen, expected)
    if t == s:
        np.testing.assert_array_equal(side.numpy(side.create_causal_mask(t)), expected)


def test_as_mask_puts_the_head_axis_in(side):
    array = side.array(DENSE[:, 0])
    mask = side.file("functional.masks").as_mask(array, heads=False)
    np.testing.assert_array_equal(whole(side, mask), np.broadcast_to(DENSE, (B, N, T, S)))
    same = side.file("functional.masks").as_mask(mask)
    assert same is mask


@EVERY_KIND
def test_the_text_of_a_mask_is_the_table(sides, spec, sees):
    text, other = (make(side, spec).as_text(T, S, b=B, n=N) for side in sides)
    assert text == other
    expected = table(sees)[:, 0]
    # What is the same in all rows of the batch is printed once.
    rows = 1 if (expected == expected[0]).all() else B
    np.testing.assert_array_equal(seen_in(text), np.concatenate(expected[:rows]))


def seen_in(text):
    """Return what the text of a mask shows, without the numbers of its queries."""
    lines = [line for line in text.splitlines() if set(line) & set("■·")]
    return np.array([line.split()[1:] for line in lines]) == "■"


# Masks of two queries and two keys, as they are printed.
CAUSAL = "  0 1\n0 ■ ·\n1 ■ ■"
FULL = "  0 1\n0 ■ ■\n1 ■ ■"
NOTHING = "  0 1\n0 · ·\n1 · ·"
FULL_AND_CAUSAL = np.array([[[True]], [[False]]]) | (np.tri(2) > 0)


def test_what_is_the_same_everywhere_has_no_label(side):
    same = side.Mask.causal() & side.Mask.lengths(key=side.array(np.array([3, 3])))
    assert side.Mask.causal().as_text(2, b=2, n=2) == CAUSAL
    assert same.as_text(2, b=2) == CAUSAL


def test_heads_and_batch_rows_are_labelled_where_they_differ(side):
    by_row = side.Mask.dense(side.array(FULL_AND_CAUSAL[:, None]))
    by_head = side.Mask.dense(side.array(FULL_AND_CAUSAL))
    assert by_row.as_text(2, b=2, n=2) == f"b=0\n{FULL}\n\nb=1\n{CAUSAL}"
    assert by_head.as_text(2, b=2, n=2) == f"n=0\n{FULL}\n\nn=1\n{CAUSAL}"


def test_heads_of_batch_rows_are_labelled_where_both_differ(side):
    # The first head of the first row sees nothing.
    others = side.Mask.dense(side.array(np.arange(4).reshape(2, 2, 1, 1) > 0))
    text = (side.Mask.causal() & others).as_text(2, b=2, n=2)
    tables = {"b=0, n=0": NOTHING, "b=0, n=1": CAUSAL, "b=1, n=0": CAUSAL, "b=1, n=1": CAUSAL}
    assert text == "\n\n".join(f"{label}\n{one}" for label, one in tables.items())


def test_the_text_of_a_long_mask_numbers_its_keys(side):
    lines = side.Mask.causal(20).as_text(2, 22).splitlines()
    assert lines[0] == " " * 22 + "1" + " " * 19 + "2"
    assert lines[1] == "  " + " ".join("0123456789012345678901")
    assert lines[2] == "0 " + "■ " * 21 + "·"
    # A second line of digits from the eleventh key on.
    assert [len(side.Mask().as_text(1, s).splitlines()) for s in (10, 11)] == [2, 3]


def test_the_text_of_a_long_mask_numbers_its_queries(side):
    lines = side.Mask().as_text(11, 1).splitlines()
    assert [line[:2] for line in lines] == ["  ", *(f"{i:2}" for i in range(11))]
    assert side.Mask().as_text(64, 64).count("■") == 64**2


@pytest.mark.parametrize(("t", "s"), [(65, 64), (3, 65), (0, 3), (3, 0)])
def test_a_mask_too_large_to_read_is_not_printed(side, t, s):
    with pytest.raises(
        ValueError, match=rf"printed for 1 to 64 queries and keys; got t={t}, s={s}\. Print it at a"
    ):
        side.Mask().as_text(t, s)


def test_the_text_is_of_a_mask_that_fits(side):
    with pytest.raises(ValueError, match="needs an offset when t != s"):
        side.Mask.causal().as_text(2, 3)


# Where sums of 32 bits wrap around, and beside it.
ENDS = (2**31 - 1, -(2**31), 2**30, -(2**30), 2**29, -(2**29) - 1, 1)
FAR = (0, 3, 2**29, 2**31 - 1, 2**40, 2**70, None)
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("offset", ENDS)
def test_windows_reach_as_far_as_unbounded_integers(side, offset):
    many = side.array(np.full(B, offset, np.int32))
    for left, right in product(FAR, FAR):
        assert_means(side, side.Mask.window(left, right, many), window(left, right, offset))


@pytest.mark.parametrize("offset", ENDS)
def test_positions_are_those_of_unbounded_integers(side, offset):
    many = side.array(np.full(B, offset, np.int32))
    assert_means(side, side.Mask.causal(many), causal(offset))
    for length in ENDS:
        # As an array, which is not read: an integer below 0 is refused.
        one = side.array(np.int32(length))
        assert_means(side, side.Mask.prefix(one, many), prefix(length, offset))
        assert_means(side, side.Mask.lengths(query=one, key=many), lengths(length, offset))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_positions_of_every_integer_type(side, dtype):
    ends = np.iinfo(dtype)
    for count in (ends.max, ends.min, 2):
        many = side.array(np.full(B, count, dtype))
        assert_means(side, side.Mask.causal(many), causal(int(count)))
        assert_means(side, side.Mask.lengths(key=many), lengths(None, int(count)))


@pytest.mark.parametrize(("one", "other"), [*product(INTEGERS, INTEGERS)])
def test_ids_are_compared_as_integers(side, one, other):
    query, key = (_ids_at_the_ends(dtype, size) for dtype, size in ((one, T), (other, S)))
    mask = side.Mask.segments(side.array(query), side.array(key))
    same = query.astype(object)[:, None] == key.astype(object)[None]
    np.testing.assert_array_equal(
        whole(side, mask), np.broadcast_to(same.astype(bool), (B, N, T, S))
    )


def _ids_at_the_ends(dtype, size):
    ends = np.iinfo(dtype)
    # Some pairs of them are equal as floating numbers, or in fewer bits.
    ids = [ends.max, ends.min, ends.max // 2 + 1, ends.max - 1, 3, ends.min + 1, ends.max // 2]
    return np.array(ids[:size], dtype)


@EVERY_KIND
def test_the_repr_of_a_mask_builds_it(sides, spec, sees):
    texts = [repr(make(side, spec) & side.Mask.lengths(query=4)) for side in sides]
    assert texts[0] == texts[1]
    # A long array is not printed, so that nothing can be built from the text.
    for side in sides if "<array" not in texts[0] else ():
        again = eval(texts[0], {"Mask": side.Mask, "pattern": pattern})
        np.testing.assert_array_equal(whole(side, again), table(sees) & (np.arange(T) < 4)[:, None])


def test_the_repr_of_a_mask_names_its_parts(side):
    mask = side.Mask.causal() & side.Mask.window(2, None, 1)
    mask &= side.Mask.lengths(key=side.array(np.array([3, 2])))
    assert repr(mask) == "Mask.causal() & Mask.window(2, None, offset=1) & Mask.lengths(key=[3, 2])"
    assert repr(side.Mask()) == "Mask()"
    assert repr(side.Mask.sliding_window(3).resolve(1, 1, T, T)) == "Mask.window(2, 0, offset=0)"


def test_the_repr_of_a_mask_holds_arrays_that_are_short(side):
    ids = side.array(np.arange(16))
    assert repr(side.Mask.segments(ids)) == f"Mask.segments({[*range(16)]}, {[*range(16)]})"
    long = side.array(np.ones((1, 17), bool))
    assert repr(side.Mask.dense(long)) == "Mask.dense(<array (1, 17)>)"


def test_a_mask_moves_to_the_device_of_the_call(sides):
    mask = sides[1].Mask()
    for name in ("dense", "segments", "causal per row"):
        mask &= make(sides[1], KINDS[name][0])
    assert mask.materialise(B, N, T, S, device="meta").device.type == "meta"


@EVERY_KIND
def test_a_mask_goes_through_jit(sides, spec, sees):
    seen = jax.jit(lambda mask: mask.materialise(B, N, T, S))(make(sides[0], spec))
    np.testing.assert_array_equal(seen, table(sees))


def sliding(width):
    return Mask.sliding_window(width) & Mask.causal(2) & Mask.lengths(key=jnp.asarray(LENGTHS))


def test_integers_stay_static_and_arrays_are_traced():
    seen = []
    jax.jit(lambda mask: seen.append([part.offset for part in mask.parts[:2]]))(sliding(3))
    assert seen == [[None, 2]]
    assert [leaf.shape for leaf in jax.tree.leaves(sliding(3))] == [(B,)]


def test_integers_are_part_of_the_structure_of_a_mask():
    # What is compiled for one window must not serve another one.
    leaves, structure = jax.tree.flatten(sliding(3))
    assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure
    assert jax.tree.structure(sliding(4)) != structure


def padded(length, offset):
    """Return the mask of lengths and of a causal mask, at an offset."""
    return Mask.lengths(key=jnp.asarray(length)) & Mask.causal(jnp.asarray(offset))


def test_one_compilation_serves_all_lengths():
    materialise = jax.jit(lambda mask: mask.materialise(B, N, T, S))
    for values in (LENGTHS, LENGTHS[::-1]):
        expected = table(lengths(None, values)) & table(causal(OFFSETS))
        np.testing.assert_array_equal(materialise(padded(values, OFFSETS)), expected)
    assert materialise._cache_size() == 1


def test_vmap_over_lengths_and_offsets():
    seen = jax.vmap(lambda *at: padded(*at).materialise(1, 1, T, S)[0])(LENGTHS, OFFSETS)
    expected = table(lengths(None, LENGTHS)) & table(causal(OFFSETS))
    np.testing.assert_array_equal(seen, expected[:, :1])


def test_every_kind_of_mask_is_tested(side):
    # All that makes a mask is a static method.
    kinds = {n for n, v in vars(side.Mask).items() if isinstance(v, staticmethod)}
    assert kinds == {spec[0] for spec, _ in KINDS.values()}


@pytest.mark.parametrize("name", ["causal per row", "key lengths"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_index_dtypes(side, dtype, name):
    spec, sees = KINDS[name]
    index = [side.array(np.arange(size, dtype=dtype)) for size in (T, S)]
    block = side.numpy(make(side, spec).resolve(B, N, T, S).block(*index))
    np.testing.assert_array_equal(np.broadcast_to(block, (B, N, T, S)), table(sees))
