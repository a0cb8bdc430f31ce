"""The gated delta rule: the form in chunks equals the formula.

`torch_ref` computes the formula token by token; transformers' own is compared as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.functional import delta_chunks
from flax_attn.parity import tolerance
from parity_tests.asserts import assert_near, assert_results_near

B, T, K, N, H, V = 2, 11, 2, 4, 3, 5
LENGTHS = np.array([11, 6])
STARTS = np.zeros((B, T), bool)
STARTS[0, [2, 3, 8]] = True
# The last one in padding.
STARTS[1, [5, 9]] = True
REAL = np.arange(T) < LENGTHS[:, None]
# Shape of the decays, and whether a token replaces what its key has stored.
KINDS = {
    "a decay per head": ((B, T, N), True),
    "a decay per feature": ((B, T, N, H), True),
    "nothing replaced": ((B, T, N), False),
    "nothing replaced, a decay per feature": ((B, T, N, H), False),
}


def inputs(decay, delta, seed=0):
    """Return query, key, value, decay, beta and state, in this order; beta only if there is one."""
    random = np.random.default_rng(seed)
    query, key = random.normal(size=(2, B, T, K, H))
    value = random.normal(size=(B, T, N, V))
    decays = -np.exp(random.normal(-1, 2, decay))
    beta = [random.random((B, T, N))] if delta else []
    return [query, unit(key), value, decays, *beta, random.normal(size=(B, N, V, H))]


def unit(x):
    """Return vectors of length 1, as keys of a delta rule are."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# Of the output, and of the state behind the last token.
COTANGENTS = [np.random.default_rng(9).normal(size=size) for size in ((B, T, N, V), (B, N, V, H))]


def both(arrays, **options):
    """Return outputs and gradients of both sides, under random cotangents."""
    return in_jax(arrays, options), in_torch(arrays, options)


def in_jax(arrays, options):
    def total(leaves):
        given = {name: jnp.asarray(x) for name, x in options.items()}
        found = flax_attn.gated_delta_rule(*leaves[:-1], state=leaves[-1], **given)
        return weighed(found, jnp.asarray), found

    gradients, found = jax.jit(jax.grad(total, has_aux=True))([jnp.asarray(x) for x in arrays])
    return named(found), named(gradients)


def in_torch(arrays, options):
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    given = {name: torch.tensor(x) for name, x in options.items()}
    found = torch_ref.gated_delta_rule(*leaves[:-1], state=leaves[-1], **given)
    gradients = torch.autograd.grad(weighed(found, torch.tensor), leaves)
    return named(found), named(gradients)


def weighed(found, array):
    """Return the sum of output and state under their cotangents."""
    pairs = zip(found, COTANGENTS, strict=True)
    return sum((x * array(cotangent)).sum() for x, cotangent in pairs)


def named(arrays):
    return {str(i): convert.to_numpy(x) for i, x in enumerate(arrays)}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_formula(kind, monkeypatch):
    # Three of them, the last one with padding.
    monkeypatch.setattr(delta_chunks, "CHUNK", 4)
    *tokens, state = inputs(*KINDS[kind])
    ours, theirs = both([*map(hidden, tokens), state], starts=STARTS, lengths=LENGTHS)
    assert_results_near(ours, theirs)
    assert not ours[0]["0"][~REAL].any()


def rule(side):
    """Return the function of the tokens, and of the state behind them."""
    return side.jit(lambda *arrays: side.gated_delta_rule(*arrays[:-1], state=arrays[-1]))


def hidden(x):
    """Return an array of tokens, with NaN for padding."""
    return np.where(REAL.reshape(B, T, *(1,) * (x.ndim - 2)), x, np.nan)


@pytest.mark.parametrize("kind", ["a decay per head", "a decay per feature"])
def test_token_by_token_is_the_formula(kind, monkeypatch):
    monkeypatch.setattr("flax_attn.functional.delta_rule.chunked", delta_chunks.recurrent)
    assert_results_near(*both(inputs(*KINDS[kind]), starts=STARTS, lengths=LENGTHS))


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_any_strength_give_finite_gradients(kind):
    arrays = inputs(*KINDS[kind])
    # The exponentials of many are 0 in float64.
    arrays[3] *= 1e3
    ours, theirs = both(arrays)
    assert_results_near(ours, theirs)
    assert all(np.isfinite(x).all() for x in ours[1].values())


def test_in_float32_a_strong_decay_leaves_the_weak_ones_their_digits(sides):
    arrays = with_one_strong_decay()
    ours, rounded = (output_of(side, arrays) for side in sides)
    exact = output_of(sides[1], [x.astype(np.float64) for x in arrays])
    eps = 2.0**-23
    errors = tolerance.lower_dtype(ours, [rounded], exact, tolerance.LOW_FORWARD, eps)
    assert errors["output"] <= 1


def with_one_strong_decay():
    """Return inputs in float32 whose first decay is strong, and all others are weak."""
    arrays = [x.astype(np.float32) for x in inputs(*KINDS["a decay per head"])]
    decay = arrays[3]
    decay[:, 1:] *= 1e-3
    decay[:, 0] = -4000.0
    return arrays


def output_of(side, arrays):
    output = rule(side)(*map(side.array, arrays)).output
    return {"output": side.numpy(output).astype(np.float64)}


def test_sums_are_taken_in_float32_and_the_state_is_kept_so(side):
    arrays = [side.array(x, "bfloat16") for x in inputs(*KINDS["a decay per head"])]
    output, state = rule(side)(*arrays)
    assert str(output.dtype).endswith("bfloat16")
    assert str(state.dtype).endswith("float32")


def test_a_state_goes_on_where_it_ended(side):
    *tokens, state = (side.array(x) for x in inputs(*KINDS["a decay per feature"]))
    whole = rule(side)(*tokens, state)
    assert_near(in_three_calls(side, tokens, state), numbers(side, *whole))


def in_three_calls(side, tokens, state):
    outputs = []
    for start, stop in ((0, 6), (6, 7), (7, T)):
        chunk = [x[:, start:stop] for x in tokens]
        output, state = rule(side)(*chunk, state)
        outputs.append(side.numpy(output))
    return {"output": np.concatenate(outputs, 1), "state": side.numpy(state)}


def numbers(side, output, state):
    return {"output": side.numpy(output), "state": side.numpy(state)}


def test_one_sequence_without_a_batch_axis(side):
    arrays = [side.array(x) for x in inputs(*KINDS["a decay per head"])]
    batched, alone = rule(side)(*arrays), rule(side)(*(x[0] for x in arrays))
    for found, reference in zip(alone, batched, strict=True):
        np.testing.assert_allclose(side.numpy(found), side.numpy(reference)[0], rtol=1e-12)


def test_without_beta_it_is_a_sum_over_the_tokens_before(side):
    *arrays, _ = of_each_head("nothing replaced")
    query, key, value, decay = arrays
    products = H**-0.5 * np.einsum("btnh,bsnh->bnts", query, key)
    expected = np.einsum("bnts,bsnv->btnv", products * decays_between(decay), value)
    output = rule(side)(*map(side.array, arrays), None).output
    np.testing.assert_allclose(side.numpy(output), expected, rtol=0, atol=1e-12)


def of_each_head(kind):
    """Return inputs with a query and a key for each head of the values."""
    query, key, *rest = inputs(*KINDS[kind])
    return [np.repeat(query, N // K, axis=2), np.repeat(key, N // K, axis=2), *rest]


def decays_between(decay):
    """Return what is left of each token s at each token t, `(b, n, t, s)`."""
    sums = np.cumsum(decay, axis=1)
    between = np.moveaxis(sums[:, :, None] - sums[:, None], 3, 1)
    # Above the diagonal the sums are positive, and their exponentials infinite.
    return np.tril(np.exp(np.minimum(between, 0)))


PUBLISHED = [
    ("a decay per head", modeling_qwen3_next, "torch_recurrent_gated_delta_rule"),
    ("a decay per head", modeling_qwen3_next, "torch_chunk_gated_delta_rule"),
    ("a decay per feature", modeling_kimi_linear, "recurrent_kimi_delta_attention"),
    ("a decay per feature", modeling_kimi_linear, "chunk_kimi_delta_attention"),
]


def published(function, arrays):
    """Return the output and the state of a function of transformers."""
    query, key, value, decay, beta, state = map(torch.tensor, arrays)
    output, after = function(
        query=query,
        key=key,
        value=value,
        g=decay,
        beta=beta,
        initial_state=state.mT,
        output_final_state=True,
    )
    return output, after.mT


@pytest.mark.parametrize(("kind", "module", "name"), PUBLISHED)
def test_it_is_the_function_of_transformers(side, kind, module, name, float64_modules):
    arrays = of_each_head(kind)
    with float64_modules(module):
        expected = published(getattr(module, name), arrays)
    found = rule(side)(*map(side.array, arrays))
    assert_near(numbers(side, *found), numbers(side, *expected))
