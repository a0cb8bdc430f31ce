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
    return np.where(REAL, numbers, stranger)


def model(side, file, name, *sizes, **options):
    module = side.file(f"models.{file}")
    torch.manual_seed(0)
    config = getattr(module, f"{name.removesuffix('MaskedLM')}Config")(*sizes, **options)
    made = getattr(module, name)(config, **({"rngs": nnx.Rngs(0)} if side.is_flax else {}))
    made.eval()
    return made


def gpt2(side, tokens, positions):
    sizes = {"num_layers": 1, "context_length": 8, "vocab_size": VOCAB}
    own = model(side, "gpt2", "GPT2", 6, 2, **sizes)
    options = {"lengths": side.array(LENGTHS), "positions": side.array(positions)}
    logits = own(side.array(tokens), **options)
    options = {"lengths": side.array(LENGTHS), "cache": own.init_cache(B, 8)}
    return logits, own.attend(side.array(tokens), **options).output


def bert(side, tokens, positions):
    own = model(side, "bert", "BertMaskedLM", 6, 2, 1, context_length=8, vocab_size=VOCAB)
    options = {
        "lengths": LENGTHS,
        "positions": positions,
        "token_types": np.where(tokens < 0, tokens, 0),
    }
    return (own(side.array(tokens), **{name: side.array(x) for name, x in options.items()}),)


def t5(side, tokens, positions):
    own, lengths = model(side, "t5", "T5", 6, 8, 2, 3, 1, 1, vocab_size=VOCAB), side.array(LENGTHS)
    encoded = own.encode(side.array(tokens), lengths=lengths)
    kept = own.keep(encoded, lengths)
    hidden = own.hidden(side.array(tokens), kept, lengths=lengths)
    cached = own.decode(side.array(tokens), kept, lengths=lengths, cache=own.init_cache(B, 8))
    return encoded, hidden, cached.output


@pytest.mark.parametrize("run", [gpt2, bert, t5])
def test_behind_lengths_anything_may_stand(run, side):
    positions = np.broadcast_to(np.arange(T), (B, T))
    expected = run(side, spoilt(TOKENS, 0), positions)
    for stranger in (-100, VOCAB, 2**31 - 1):
        found = run(side, spoilt(TOKENS, stranger), spoilt(positions, stranger))
        for one, other in zip(found, expected, strict=True):
            one, other = (side.numpy(x if side.is_flax else x.detach()) for x in (one, other))
            np.testing.assert_array_equal(one, other)
            assert np.isfinite(one).all()


def test_ids_of_any_integer_dtype(side):
    table = side.build("Embedding", 300, 4)
    ids = np.array([[0, 7, 120], [126, 127, 1]])
    expected = side.numpy(table(side.array(ids)))
    for dtype in ("int8", "uint8", "int16", "int32"):
        np.testing.assert_array_equal(side.numpy(table(side.array(ids, dtype))), expected)
    outside = side.numpy(table(side.array(np.array([-1, 299, 300, 2**31 - 1]))))
    assert np.isnan(outside).any(axis=1).tolist() == [True, False, True, True]
