"""The short convolution: PyTorch's own, document by document, in chunks, and over padding."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from parity_tests.asserts import assert_near
from parity_tests.chunks import is_padding, places, store

B, T, D, W = 2, 9, 3, 4
# The width of each call, and how many tokens of it each row has.
CHUNKS = [
    (4, np.array([4, 3])),
    (1, np.array([1, 0])),
    (2, np.array([2, 2])),
    (4, np.array([2, 4])),
]
RANDOM = np.random.default_rng(0)
X, KERNEL = RANDOM.normal(size=(B, T, D)), RANDOM.normal(size=(W, D))


def reference(x, kernel=KERNEL):
    """PyTorch's convolution of one sequence `(t, d)`, with zeros before it."""
    w, d = kernel.shape
    padded = torch.nn.functional.pad(torch.from_numpy(x.T), (w - 1, 0))
    weights = torch.from_numpy(kernel.T)[:, None]
    return torch.nn.functional.conv1d(padded, weights, groups=d).T.numpy()


def convolve(side, x, *state, kernel=KERNEL, **options):
    options = {name: side.array(value) for name, value in options.items()}
    convolution = side.jit(side.file("functional.short_convolution").short_convolution)
    return convolution(side.array(x), side.array(kernel), *state, **options)


def assert_equal(side, found, expected):
    assert_near({"x": side.numpy(found)}, {"x": expected})


@pytest.mark.parametrize("w", [1, 2, W])
def test_it_is_the_convolution_of_pytorch(side, w):
    # A kernel of one token needs no state.
    output, state = convolve(side, X, kernel=KERNEL[:w])
    assert_equal(side, output, np.stack([reference(x, KERNEL[:w]) for x in X]))
    assert state.shape == (B, w - 1, D)
    assert_equal(side, convolve(side, X[0]).output, reference(X[0]))


def test_documents_do_not_see_each_other(side):
    output = convolve(side, X, starts=starts_at((1, 6), (5,))).output
    for row, ends in ((0, (0, 1, 6, T)), (1, (0, 5, T))):
        alone = [reference(X[row, i:j]) for i, j in pairwise(ends)]
        assert_equal(side, output[row], np.concatenate(alone))


def starts_at(*rows):
    """Return where documents start, from the places in each row."""
    starts = np.zeros((B, T), bool)
    for row, places_of_row in enumerate(rows):
        starts[row, list(places_of_row)] = True
    return starts


def test_chunks_of_rows_of_different_length_are_one_sequence_each(side):
    # The first document ends in the state that is handed on.
    starts = starts_at((3,), (2,))
    whole = convolve(side, X, starts=starts)
    found, state, held = in_chunks(side, starts)
    assert held.tolist() == [T, T]
    assert_equal(side, side.array(found), side.numpy(whole.output))
    assert_equal(side, state, side.numpy(whole.state))


def in_chunks(side, starts):
    """Return the output of four calls, the state behind them, and how many tokens a row had."""
    held, found, state = np.zeros(B, int), np.zeros((B, T, D)), []
    for width, counts in CHUNKS:
        x, options = next_tokens(held, width, counts, starts)
        output, *state = convolve(side, x, *state, **options)
        held = store(found, side.numpy(output), held, counts)
    return found, state[0], held


def next_tokens(held, width, counts, starts):
    """Return the next tokens of each row, NaN where a row has fewer, and what is said of them."""
    index = places(held, width, T)
    padding = is_padding(width, counts)
    x = np.where(padding[..., None], np.nan, X[index])
    # A document that starts in the padding would hide nothing that counts.
    return x, {"starts": starts[index] | padding, "lengths": counts}


def test_sums_are_taken_in_float32(side):
    x = np.array([[1.0], [2.0**-8], [2.0**-8], [2.0**-8]])
    kernel = np.ones((4, 1))
    convolution = side.file("functional.short_convolution").short_convolution
    output = convolution(side.array(x, "bfloat16"), side.array(kernel, "bfloat16")).output
    # 1 + 3 * 2^-8, rounded once; one by one the small ones are lost.
    assert float(output[-1, 0]) == 1 + 2.0**-6
