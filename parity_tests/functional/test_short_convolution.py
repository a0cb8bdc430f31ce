"""The short convolution: PyTorch's own, document by document, in chunks, and over padding."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from flax_attn.parity import tolerance

B, T, D, W = 2, 9, 3, 4
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
    errors = tolerance.relative({"x": side.numpy(found)}, {"x": expected})
    assert errors["x"] <= tolerance.FORWARD


@pytest.mark.parametrize("w", [1, 2, W])
def test_it_is_the_convolution_of_pytorch(side, w):
    output, state = convolve(side, X, kernel=KERNEL[:w])
    assert_equal(side, output, np.stack([reference(x, KERNEL[:w]) for x in X]))
    assert state.shape == (B, w - 1, D)
    assert_equal(side, convolve(side, X[0]).output, reference(X[0]))


def test_documents_do_not_see_each_other(side):
    starts = np.zeros((B, T), bool)
    starts[0, [1, 6]] = True
    starts[1, 5] = True
    output = side.numpy(convolve(side, X, starts=starts).output)
    for row, ends in ((0, (0, 1, 6, T)), (1, (0, 5, T))):
        alone = [reference(X[row, i:j]) for i, j in pairwise(ends)]
        assert_equal(side, side.array(output[row]), np.concatenate(alone))


def test_chunks_of_rows_of_different_length_are_one_sequence_each(side):
    starts = np.zeros((B, T), bool)
    # The first document ends in the state that is handed on.
    starts[0, 3] = True
    starts[1, 2] = True
    whole = convolve(side, X, starts=starts)
    held = np.zeros(B, int)
    found = np.zeros((B, T, D))
    state = ()
    rows = np.arange(B)[:, None]
    for width, counts in ((4, (4, 3)), (1, (1, 0)), (2, (2, 2)), (4, (2, 4))):
        counts = np.array(counts)
        padding = np.arange(width) >= counts[:, None]
        where = np.minimum(held[:, None] + np.arange(width), T - 1)
        x = np.where(padding[..., None], np.nan, X[rows, where])
        own = starts[rows, where] | padding
        output, after = convolve(side, x, *state, starts=own, lengths=counts)
        state = (after,)
        output = side.numpy(output)
        for row, count in enumerate(counts):
            end = held[row] + count
            found[row, held[row] : end] = output[row, :count]
        held = held + counts
    assert held.tolist() == [T, T]
    assert_equal(side, side.array(found), side.numpy(whole.output))
    assert_equal(side, after, side.numpy(whole.state))


def test_sums_are_taken_in_float32(side):
    x = np.array([[1.0], [2.0**-8], [2.0**-8], [2.0**-8]])
    kernel = np.ones((4, 1))
    convolution = side.file("functional.short_convolution").short_convolution
    output = convolution(side.array(x, "bfloat16"), side.array(kernel, "bfloat16")).output
    # 1 + 3 * 2^-8, rounded once; one by one the small ones are lost.
    assert float(output[-1, 0]) == 1 + 2.0**-6
