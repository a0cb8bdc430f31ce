"""What lies beyond `lengths` has no effect in any model.

This holds for ids, positions and types that no table has.
"""

import numpy as np
import pytest
import torch
from flax import nnx

B, T, VOCAB = 3, 6, 13
LENGTHS = np.array([6, 2, 0])
REAL = np.arange(T)[None] < LENGTHS[:, None]
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))


def spoilt(numbers, stranger):
    """Return numbers with another one wherever a row has ended."""
    return np.where(REAL, numbers, stranger)


def numerics(side):
    return {"rngs": nnx.Rngs(0)} if side.is_flax else {}


def model(side, file, name, *sizes, **options):
    module = side.file(f"models.{file}")
    config = getattr(module, f"{name.removesuffix('MaskedLM')}Config")
    # What is padding may not matter: both calls of a test have the same weights.
    torch.manual_seed(0)
    made = getattr(module, name)(config(*sizes, **options), **numerics(side))
    made.eval()
    return made


def gpt2(side, tokens, positions, lengths):
    sizes = {"num_layers": 1, "context_length": 8, "vocab_size": VOCAB}
    own = model(side, "gpt2", "GPT2", 6, 2, **sizes)
    logits = own(tokens, lengths=lengths, positions=positions)
    # With a cache, padding has places of its own in what later steps read.
    cached = own.attend(tokens, lengths=lengths, cache=own.init_cache(B, 8))
    return logits, cached.output


def bert(side, tokens, positions, lengths):
    own = model(side, "bert", "BertMaskedLM", 6, 2, 1, context_length=8, vocab_size=VOCAB)
    # Negative ids also stand for types, which have a table of two.
    types = tokens.clip(max=0)
    return (own(tokens, lengths=lengths, positions=positions, token_types=types),)


def t5(side, tokens, positions, lengths):
    own = model(side, "t5", "T5", 6, 8, 2, 3, 1, 1, vocab_size=VOCAB)
    encoded = own.encode(tokens, lengths=lengths)
    kept = own.keep(encoded, lengths)
    hidden = own.hidden(tokens, kept, lengths=lengths)
    cached = own.decode(tokens, kept, lengths=lengths, cache=own.init_cache(B, 8))
    return encoded, hidden, cached.output


def outputs(run, side, tokens, positions):
    arrays = run(side, *map(side.array, (tokens, positions, LENGTHS)))
    return [side.numpy(array if side.is_flax else array.detach()) for array in arrays]


@pytest.mark.parametrize("run", [gpt2, bert, t5])
def test_behind_lengths_anything_may_stand(run, side):
    positions = np.broadcast_to(np.arange(T), (B, T))
    expected = outputs(run, side, spoilt(TOKENS, 0), positions)
    # For ids beyond a table JAX takes the last row or NaN, and PyTorch raises.
    for stranger in (-100, VOCAB, 2**31 - 1):
        found = outputs(run, side, spoilt(TOKENS, stranger), spoilt(positions, stranger))
        assert_same_bits(found, expected)


def assert_same_bits(found, expected):
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, reference)
        assert np.isfinite(array).all()


def rows(side, table, ids, dtype="int64"):
    return side.numpy(table(side.array(ids, dtype)))


IDS = [[0, 7, 120], [126, 127, 1]]


def test_ids_of_any_integer_dtype(side):
    # int8 and uint8 cannot count the rows of this table.
    table = side.build("Embedding", 300, 4)
    expected = rows(side, table, IDS)
    for dtype in ("int8", "uint8", "int16", "int32"):
        np.testing.assert_array_equal(rows(side, table, IDS, dtype), expected)
    outside = rows(side, table, [-1, 299, 300, 2**31 - 1])
    assert np.isnan(outside).any(axis=1).tolist() == [True, False, True, True]
