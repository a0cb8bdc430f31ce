"""Models whose matrices stay in 8 or 4 bits against the same model in floats."""

import jax.numpy as jnp
import numpy as np

from flax_attn.convert import state_dict
from flax_attn.models import from_pretrained, generate
from flax_attn.parity.tolerance import reordered


def both_forms(folder):
    """Return the model of a folder as it is stored, and in float32."""
    held = from_pretrained(folder, param_dtype=jnp.float32, weights="stored")
    return held, from_pretrained(folder, param_dtype=jnp.float32)


def some_tokens(vocab):
    return jnp.asarray(np.random.default_rng(0).integers(0, vocab, (2, 9)))


def assert_same_model(held, floats, vocab):
    tokens = some_tokens(vocab)
    for given in (tokens, tokens[:1, :5]):
        found = {"": np.asarray(held(given))}
        expected = {"": np.asarray(floats(given))}
        assert max(reordered(found, expected).values()) <= 1
    assert generate(held, [3, 1, 4], 4) == generate(floats, [3, 1, 4], 4)


def assert_same_weights(ours, theirs):
    """Assert that a model has these tensors, each number as it is."""
    found = state_dict(ours, type(ours).family.layout)
    assert found.keys() == theirs.keys()
    for name, weight in theirs.items():
        # NumPy compares no bfloat16 with the tensors of torch.
        numbers = found[name].astype(np.float32)
        np.testing.assert_array_equal(numbers, weight.float().numpy(), err_msg=name)
    return found
