"""Plans of calls with a cache: each call has some tokens of each row, and padding behind them."""

import numpy as np

from parity_tests import chunks

# Of a batch of three rows, at most seven tokens long.
TOTALS = np.array([7, 4, 6])
# How many tokens of each row a call has, and how wide it is.
TOKEN = (np.array([1, 1, 1]), 1)
STEPS = [(np.array([4, 1, 3]), 4), TOKEN, TOKEN, TOKEN]
# A row may have no token in a call.
CHUNKS = [(np.array([3, 0, 2]), 4), (np.array([2, 2, 0]), 4), (np.array([2, 2, 4]), 4)]


def in_calls(side, call, cache, tokens, plan, vocab):
    """Return the logits (b, t, vocab) of the tokens that a plan has, and 0 for the others.

    A call takes a cache, tokens and their lengths, and returns logits and the new cache.
    """
    whole = np.zeros((*tokens.shape, vocab))
    held = np.zeros(len(tokens), int)
    for counts, width in plan:
        # A real id: a model that sees padding has other logits.
        given = taken(tokens, held, counts, width, padding=vocab - 1)
        logits, cache = step(side, call, cache, given, counts)
        held = chunks.store(whole, logits, held, counts)
    return whole


def step(side, call, cache, tokens, counts):
    """Make a call of arrays of NumPy."""
    logits, cache = call(cache, side.array(tokens), lengths=side.array(counts))
    return side.numpy(logits), cache


def taken(tokens, held, counts, width, padding):
    """Return the next tokens of each row, and padding behind them."""
    own = tokens[chunks.places(held, width, tokens.shape[1])]
    return np.where(chunks.is_padding(width, counts), padding, own)


def real(logits):
    """Return logits with 0 where a row has ended."""
    places = np.arange(logits.shape[1])
    return np.where(places[:, None] < TOTALS[:, None, None], logits, 0.0)
