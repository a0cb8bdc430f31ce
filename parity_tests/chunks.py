"""Sequences in chunks: each row takes as many of its next tokens as it likes, the rest is padding.

`held` counts the tokens of each row so far, `counts` those of a chunk.
"""

import numpy as np


def places(held, width, length):
    """Return the next places of each row, as an index; behind the end it is the last one."""
    where = np.minimum(held[:, None] + np.arange(width), length - 1)
    return np.arange(len(held))[:, None], where


def is_padding(width, counts):
    """Return which tokens of a chunk are padding, `(rows, width)`."""
    return np.arange(width) >= counts[:, None]


def store(whole, output, held, counts):
    """Write what was computed for a chunk to its places, and return how many tokens are held."""
    ends = held + counts
    for row, count in enumerate(counts):
        whole[row, held[row] : ends[row]] = output[row, :count]
    return ends
