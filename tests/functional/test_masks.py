import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, dot_product_attention

B, N, T, S, H = 3, 4, 5, 7, 6

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
    "prefix_static": Mask.prefix(3, offset=-1),
    "dense": Mask.dense(np.arange(B * N * T * S).reshape(B, N, T, S) % 3 > 0),
    "all": Mask.causal(2) & Mask.lengths(key=jnp.array([7, 1, 4])) & Mask.dense(np.arange(S) % 5 > 0),
}


@pytest.fixture(params=MASKS)
def mask(request):
    return MASKS[request.param]


def qkv(*batch):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*batch, T, N, H), (*batch, S, N, H), (*batch, S, N, H)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit
def attend(query, key, value, mask):
    return dot_product_attention(query, key, value, mask=mask, return_weights=True)


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
    np.testing.assert_array_equal(jax.jit(Mask.materialise, static_argnums=(1, 2, 3, 4))(mask, B, N, T, S), table(mask))


def test_attention_under_jit_takes_a_mask(mask, close):
    _, weights = attend(*qkv(B), mask)
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
    each, _ = jax.vmap(attend)(*qkv(B), lengths)
    close(each, attend(*qkv(B), lengths)[0])
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
        np.testing.assert_array_equal(one, table(Mask.causal(2) & Mask.lengths(key=jnp.array([0, 2, 4]) + i)))
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


def test_a_block_is_a_cut_of_the_whole(mask):
    rows, cols = jnp.array([1, 4, 2]), jnp.array([6, 0, 3, 5])
    block = mask.resolve(B, N, T, S).block(rows, cols)
    np.testing.assert_array_equal(
        np.broadcast_to(block, (B, N, 3, 4)), table(mask)[:, :, np.asarray(rows)][:, :, :, np.asarray(cols)]
    )


def test_and_lets_through_what_both_let_through(mask):
    for other in MASKS.values():
        np.testing.assert_array_equal(table(mask & other), table(mask) & table(other))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.dense(jnp.ones((T, S))), r"True = attend; got dtype float32.*mask\.astype\(bool\)"),
        (lambda: Mask.lengths(key=jnp.ones(B)), "key lengths must be integers; got dtype float32"),
        (lambda: Mask.window(-1, 0), "left is a number of keys, at least 0, known before tracing; got left=-1"),
        (lambda: Mask.sliding_window(0), "width must be a positive integer; got width=0"),
        (lambda: table(Mask.causal()), rf"t={T}, s={S}.*offset=0 .*offset={S - T} "),
        (lambda: table(Mask.causal(S + 1)), f"between -t and s.*offset={S + 1}"),
        (lambda: table(Mask.segments(np.arange(S))), r"query segments must have one id a token.*Mask\.segments\(query"),
        (
            lambda: table(Mask.lengths(key=np.arange(B + 1))),
            rf"key lengths must be one integer.*got shape \({B + 1},\)",
        ),
        (lambda: table(Mask.dense(np.ones((B, T, S), bool))), r"mask must broadcast to \(b, n, t, s\)"),
    ],
)
def test_wrong_masks_are_refused_with_a_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refusals_are_the_same_under_jit():
    with pytest.raises(ValueError, match="needs an offset when t != s"):
        attend(*qkv(B), Mask.causal())


def test_wrong_types_are_refused_without_shape_checks(no_shape_checks):
    with pytest.raises(ValueError, match="mask must be boolean"):
        dot_product_attention(*qkv(B), mask=jnp.ones((T, S)))
