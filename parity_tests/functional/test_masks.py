"""Every kind of mask, on both sides, against loops that say what it means."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask

B, N, T, S = 3, 2, 5, 7
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
    return np.array(
        [[[[bool(sees(b, i, j)) for j in cols] for i in rows] for _ in range(N)] for b in range(B)]
    )


def whole(side, mask):
    return side.numpy(mask.materialise(B, N, T, S))


@EVERY_KIND
def test_a_mask_means_what_its_loop_says(side, spec, sees):
    seen = whole(side, make(side, spec))
    assert seen.dtype == bool
    np.testing.assert_array_equal(seen, table(sees))


@EVERY_KIND
def test_a_block_is_the_slice_of_the_whole(side, spec, sees):
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
    texts = [make(side, spec).as_text(T, S, b=B, n=N) for side in sides]
    assert texts[0] == texts[1]
    expected = table(sees)
    if (expected == expected[0]).all():
        expected = expected[:1]
    marks = [line.split()[1:] for line in texts[0].splitlines() if set(line) & set("■·")]
    np.testing.assert_array_equal(np.array(marks) == "■", np.concatenate(expected[:, 0]))


def test_heads_and_batch_rows_are_labelled_where_they_differ(side):
    causal = "  0 1\n0 ■ ·\n1 ■ ■"
    full = "  0 1\n0 ■ ■\n1 ■ ■"
    full_and_causal = np.array([[[True]], [[False]]]) | (np.tri(2) > 0)
    by_row, by_head = (
        side.Mask.dense(side.array(full_and_causal[:, None])),
        side.Mask.dense(side.array(full_and_causal)),
    )
    assert side.Mask.causal().as_text(2, b=2, n=2) == causal
    assert (side.Mask.causal() & side.Mask.lengths(key=side.array(np.array([3, 3])))).as_text(
        2, b=2
    ) == causal
    assert by_row.as_text(2, b=2, n=2) == f"b=0\n{full}\n\nb=1\n{causal}"
    assert by_head.as_text(2, b=2, n=2) == f"n=0\n{full}\n\nn=1\n{causal}"
    by_both = side.Mask.causal() & side.Mask.dense(side.array(np.arange(4).reshape(2, 2, 1, 1) > 0))
    nothing = "  0 1\n0 · ·\n1 · ·"
    tables = {"b=0, n=0": nothing, "b=0, n=1": causal, "b=1, n=0": causal, "b=1, n=1": causal}
    assert by_both.as_text(2, b=2, n=2) == "\n\n".join(
        f"{label}\n{one}" for label, one in tables.items()
    )


def test_the_text_of_a_long_mask_numbers_its_keys(side):
    lines = side.Mask.causal(20).as_text(2, 22).splitlines()
    assert lines[0] == " " * 22 + "1" + " " * 19 + "2"
    assert lines[1] == "  " + " ".join("0123456789012345678901")
    assert lines[2] == "0 " + "■ " * 21 + "·"
    assert [line[:2] for line in side.Mask().as_text(11, 1).splitlines()] == [
        "  ",
        *(f"{i:2}" for i in range(11)),
    ]
    assert [len(side.Mask().as_text(1, s).splitlines()) for s in (10, 11)] == [2, 3]
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


ENDS = (2**31 - 1, -(2**31), 2**30, -(2**30), 2**29, -(2**29) - 1, 1)
FAR = (0, 3, 2**29, 2**31 - 1, 2**40, 2**70, None)
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("offset", ENDS)
def test_positions_are_those_of_unbounded_integers(side, offset):
    many = side.array(np.full(B, offset, np.int32))
    for left, right in product(FAR, FAR):
        mask = side.Mask.window(left, right, many)
        np.testing.assert_array_equal(whole(side, mask), table(window(left, right, offset)))
    for length in ENDS:
        mask = side.Mask.prefix(side.array(np.int32(length)), many) & side.Mask.lengths(
            query=length, key=many
        )
        sees = lambda *at, n=length: prefix(n, offset)(*at) and lengths(n, offset)(*at)  # noqa: E731
        np.testing.assert_array_equal(whole(side, mask), table(sees))
    np.testing.assert_array_equal(whole(side, side.Mask.causal(many)), table(causal(offset)))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_positions_of_every_integer_type(side, dtype):
    ends = np.iinfo(dtype)
    for count in (ends.max, ends.min, 2):
        many = side.array(np.full(B, count, dtype))
        np.testing.assert_array_equal(
            whole(side, side.Mask.causal(many)), table(causal(int(count)))
        )
        np.testing.assert_array_equal(
            whole(side, side.Mask.lengths(key=many)), table(lengths(None, int(count)))
        )


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
    ids = [ends.max, ends.min, ends.max // 2 + 1, ends.max - 1, 3, ends.min + 1, ends.max // 2]
    return np.array(ids[:size], dtype)


@EVERY_KIND
def test_the_repr_of_a_mask_builds_it(sides, spec, sees):
    texts = [repr(make(side, spec) & side.Mask.lengths(query=4)) for side in sides]
    assert texts[0] == texts[1]
    for side in sides if "<array" not in texts[0] else ():
        again = eval(texts[0], {"Mask": side.Mask, "pattern": pattern})
        np.testing.assert_array_equal(whole(side, again), table(sees) & (np.arange(T) < 4)[:, None])


def test_reprs(side):
    mask = (
        side.Mask.causal()
        & side.Mask.window(2, None, 1)
        & side.Mask.lengths(key=side.array(np.array([3, 2])))
    )
    assert repr(mask) == "Mask.causal() & Mask.window(2, None, offset=1) & Mask.lengths(key=[3, 2])"
    assert repr(side.Mask()) == "Mask()"
    assert repr(side.Mask.sliding_window(3).resolve(1, 1, T, T)) == "Mask.window(2, 0, offset=0)"
    ids = side.array(np.arange(16))
    assert repr(side.Mask.segments(ids)) == f"Mask.segments({[*range(16)]}, {[*range(16)]})"
    assert (
        repr(side.Mask.dense(side.array(np.ones((1, 17), bool)))) == "Mask.dense(<array (1, 17)>)"
    )


def test_a_mask_moves_to_the_device_of_the_call(sides):
    mask = (
        make(sides[1], KINDS["dense"][0])
        & make(sides[1], KINDS["segments"][0])
        & make(sides[1], KINDS["causal per row"][0])
    )
    assert mask.materialise(B, N, T, S, device="meta").device.type == "meta"


@EVERY_KIND
def test_a_mask_goes_through_jit(sides, spec, sees):
    seen = jax.jit(lambda mask: mask.materialise(B, N, T, S))(make(sides[0], spec))
    np.testing.assert_array_equal(seen, table(sees))


def test_integers_stay_static_and_arrays_are_traced():
    mask = Mask.sliding_window(3) & Mask.causal(2) & Mask.lengths(key=jnp.asarray(LENGTHS))
    leaves, structure = jax.tree.flatten(mask)
    assert [leaf.shape for leaf in leaves] == [(B,)]
    seen = []
    jax.jit(lambda mask: seen.append([part.offset for part in mask.parts[:2]]))(mask)
    assert seen == [[None, 2]]
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == structure
    assert structure != jax.tree.structure(
        Mask.sliding_window(4) & Mask.causal(2) & Mask.lengths(key=leaves[0])
    )


def test_one_compilation_serves_all_lengths():
    traces = []

    @jax.jit
    def materialise(mask):
        traces.append(mask)
        return mask.materialise(B, N, T, S)

    for values in (LENGTHS, LENGTHS[::-1]):
        seen = materialise(
            Mask.lengths(key=jnp.asarray(values)) & Mask.causal(jnp.asarray(OFFSETS))
        )
        np.testing.assert_array_equal(seen, table(lengths(None, values)) & table(causal(OFFSETS)))
    assert len(traces) == 1


def test_vmap_over_lengths_and_offsets():
    def one(length, offset):
        return (Mask.lengths(key=length) & Mask.causal(offset)).materialise(1, 1, T, S)[0]

    seen = jax.vmap(one)(jnp.asarray(LENGTHS), jnp.asarray(OFFSETS))
    expected = table(lengths(None, LENGTHS)) & table(causal(OFFSETS))
    np.testing.assert_array_equal(seen, expected[:, :1])


def test_every_kind_of_mask_is_tested(side):
    kinds = {n for n, v in vars(side.Mask).items() if isinstance(v, staticmethod)}
    assert kinds == {spec[0] for spec, _ in KINDS.values()}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_index_dtypes(side, dtype):
    for name, spec in product(("causal per row", "key lengths"), [np.arange(T, dtype=dtype)]):
        block = (
            make(side, KINDS[name][0])
            .resolve(B, N, T, S)
            .block(side.array(spec), side.array(np.arange(S, dtype=dtype)))
        )
        np.testing.assert_array_equal(
            np.broadcast_to(side.numpy(block), (B, N, T, S)), table(KINDS[name][1])
        )
