"""Counter-based dropout: published vectors, the same elements on both sides, and statistics."""

from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flax_attn.functional import dropout as ours
from parity_tests.asserts import assert_near
from torch_ref.functional import dropout as theirs

# Known answers of Random123 for threefry2x32 with 20 rounds: counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SHAPE = (3, 4, 5, 7)


def words(side, values):
    dtype = "uint32" if side.is_flax else "int64"
    return tuple(side.array(np.array(value, dtype)) for value in values)


def threefry(side, key, counter):
    function = side.file("functional.dropout").threefry_2x32
    return function(words(side, key), words(side, counter))


def integers(side, arrays):
    return np.array([side.numpy(x).astype(np.int64) for x in arrays])


def assert_independent(left, right):
    """Assert that half of the elements of two masks are equal, within five sigma."""
    sigma = 0.5 / left.size**0.5
    assert abs((left == right).mean() - 0.5) < 5 * sigma


def keyed(side, rate, key=(3, 14)):
    return side.KeyedDropout(rate, side.key(*key))


def grid(side, rate, shape=SHAPE, key=(3, 14)):
    return side.numpy(side.file("functional.dropout").keep_grid(keyed(side, rate, key), shape))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_threefry_known_answers(side, counter, key, result):
    assert tuple(int(word) for word in threefry(side, key, counter)) == result


def test_threefry_agrees_on_random_words(sides):
    key, counter = np.random.default_rng(0).integers(0, 2**32, (2, 2, 1000))
    flax, torch_side = (integers(side, threefry(side, key, counter)) for side in sides)
    assert flax.shape == (2, 1000)
    assert (flax == torch_side).all()


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1, 1), (2, 1, 9, 3), (1, 6, 1, 130)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("key", [(0, 0), (3, 14), (2**32 - 1, 2**31)])
def test_both_sides_keep_the_same_elements(sides, shape, rate, key):
    flax, torch_side = (grid(side, rate, shape, key) for side in sides)
    assert flax.dtype == torch_side.dtype == bool
    assert flax.shape == torch_side.shape == shape
    assert (flax == torch_side).all()


def test_the_threshold_is_exact(side):
    """An element is kept when its word is at least rate * 2**32.

    This is the formula of the docstring, word by word.
    """
    kept = grid(side, 0.3)
    for b, n, t, s in product((0, 2), (0, 3), (1, 4), (0, 6)):
        inner = integers(side, threefry(side, (3, 14), (b, n)))
        word, _ = threefry(side, inner, (t, s))
        assert kept[b, n, t, s] == (int(word) >= 0.3 * 2**32)


def test_a_block_is_the_slice_of_the_whole(side):
    index = np.ix_([0, 2], [3], [1, 2, 4], range(2, 7))
    arrays = [side.array(x) for x in index]
    block = side.numpy(side.file("functional.dropout").keep_mask(keyed(side, 0.5), *arrays))
    assert (block == grid(side, 0.5)[index]).all()


def test_a_larger_call_begins_with_the_smaller(side):
    # Each axis is longer by another number.
    larger = grid(side, 0.5, (4, 5, 6, 9))
    assert (larger[tuple(slice(size) for size in SHAPE)] == grid(side, 0.5)).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_within_five_sigma(side, rate):
    kept = grid(side, rate, (4, 5, 60, 50))
    sigma = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs((~kept).mean() - rate) < 5 * sigma


def test_rate_zero_keeps_all(side):
    assert grid(side, 0.0, (4, 5, 60, 50)).all()


@pytest.mark.parametrize("axis", range(4), ids="bnts")
def test_neighbours_along_an_axis_are_independent(side, axis):
    """Neither equal, as a broadcast mask would be, nor correlated."""
    kept = grid(side, 0.5, (20, 16, 15, 14))
    assert_independent(np.delete(kept, 0, axis), np.delete(kept, -1, axis))


def test_swapped_axes_are_independent(side):
    kept = grid(side, 0.5, (40, 40, 5, 5))
    off = ~np.eye(40, dtype=bool)
    same = (kept == kept.transpose(1, 0, 2, 3))[off]
    # Each pair is there twice.
    assert abs(same.mean() - 0.5) < 5 * 0.5 / (same.size / 2) ** 0.5


def test_keys_and_children_are_independent(side):
    file, base = side.file("functional.dropout"), side.key()
    children = [file.fold_in(base, i) for i in range(3)]
    dropouts = [side.KeyedDropout(0.5, key) for key in (base, side.key(4, 14), *children)]
    grids = [side.numpy(file.keep_grid(dropout, (3, 4, 20, 17))) for dropout in dropouts]
    for left, right in combinations([*grids, grid(side, 0.5, (3, 4, 20, 17), (3, 15))], 2):
        assert_independent(left, right)


def test_children_are_the_same_on_both_sides(sides):
    for index in (0, 1, 7):
        children = [side.file("functional.dropout").fold_in(side.key(), index) for side in sides]
        flax, torch_side = map(integers, sides, children)
        assert (flax == torch_side).all()


def test_no_key_has_no_children(side):
    assert side.file("functional.dropout").fold_in(None, 3) is None


def test_what_is_kept_is_rescaled(side):
    values, kept = np.random.default_rng(0).normal(size=SHAPE), grid(side, 0.25)
    drop = side.file("functional.dropout").drop
    dropped = side.numpy(drop(side.array(values), side.array(kept), 0.25))
    assert_near({"x": dropped}, {"x": np.where(kept, values / 0.75, 0)})
    assert ((dropped == 0) == ~kept).all()


def test_a_typed_key_is_its_data():
    key = jax.random.key(2**33 + 5)
    assert (grid_of_jax(key) == grid_of_jax(jax.random.key_data(key))).all()


def test_torch_takes_the_data_of_a_typed_key():
    key = jax.random.key(2**33 + 5)
    data = torch.from_numpy(np.array(jax.random.key_data(key), np.int64))
    kept = theirs.keep_grid(theirs.KeyedDropout(0.5, data), SHAPE)
    assert (kept.numpy() == grid_of_jax(key)).all()


def grid_of_jax(key, shape=SHAPE):
    return np.asarray(ours.keep_grid(ours.KeyedDropout(0.5, key), shape))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_of_the_rbg_generators(implementation):
    keys = [jax.random.key(seed, impl=implementation) for seed in (0, 1)]
    assert_independent(*(grid_of_jax(key, (3, 4, 20, 17)) for key in keys))
    # Two of their four words are read; they have to differ in those.
    first, second = jax.random.key_data(jax.random.split(keys[0]))
    assert (first[:2] != second[:2]).any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_torch_takes_keys_of_any_integer_dtype(dtype):
    key = torch.tensor([2**32 - 2, 7]).to(dtype)
    assert theirs.key_data(key).tolist() == [2**32 - 2, 7]


def test_draw_key_draws_from_a_generator():
    generator = torch.Generator().manual_seed(0)
    first, second = theirs.draw_key(generator), theirs.draw_key(generator)
    assert (first != second).any()
    assert (theirs.draw_key(torch.Generator().manual_seed(0)) == first).all()


def test_a_drawn_key_has_words_of_32_bits():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([theirs.draw_key(generator) for _ in range(200)])
    assert drawn.min() >= 0
    assert 2**31 < drawn.max() < 2**32


def test_a_traced_key_and_a_vmapped_key():
    keys = jax.random.split(jax.random.key(1), 3)
    kept = lambda key: ours.keep_grid(ours.KeyedDropout(0.5, key), SHAPE)  # noqa: E731
    batched = jax.jit(jax.vmap(kept))(keys)
    assert (batched == jnp.stack([kept(key) for key in keys])).all()
