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
from flax_attn.functional import delta_chunks
from flax_attn.parity import tolerance

B, T, K, N, H, V = 2, 11, 2, 4, 3, 5
LENGTHS = np.array([11, 6])
STARTS = np.zeros((B, T), bool)
STARTS[0, [2, 3, 8]] = True
STARTS[1, [5, 9]] = True  # the last one in padding
REAL = np.arange(T) < LENGTHS[:, None]
KINDS = {
    "a decay per head": ((B, T, N), True),
    "a decay per feature": ((B, T, N, H), True),
    "nothing replaced": ((B, T, N), False),
    "nothing replaced, a decay per feature": ((B, T, N, H), False),
}


def inputs(decay, delta, seed=0):
    """Return query, key, value, decay, beta and state, in this order; beta only if there is one."""
    random = np.random.default_rng(seed)
    query = random.normal(size=(B, T, K, H))
    key = random.normal(size=(B, T, K, H))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(B, T, N, V))
    arrays = [query, key, value, -np.exp(random.normal(-1, 2, decay))]
    if delta:
        arrays.append(random.random((B, T, N)))
    arrays.append(random.normal(size=(B, N, V, H)))
    return arrays


def both(arrays, starts=None, lengths=None):
    """Return outputs and gradients of both sides, under random cotangents."""
    random = np.random.default_rng(9)
    cotangents = random.normal(size=(B, T, N, V)), random.normal(size=(B, N, V, H))
    theirs = [torch.tensor(x, requires_grad=True) for x in arrays]
    options = {
        name: torch.tensor(x)
        for name, x in (("starts", starts), ("lengths", lengths))
        if x is not None
    }
    found = torch_ref.gated_delta_rule(*theirs[:-1], state=theirs[-1], **options)
    sum((x * torch.tensor(c)).sum() for x, c in zip(found, cotangents, strict=True)).backward()

    def weighed(*ours):
        own = {name: jnp.asarray(x.numpy()) for name, x in options.items()}
        found = flax_attn.gated_delta_rule(*ours[:-1], state=ours[-1], **own)
        return sum((x * c).sum() for x, c in zip(found, cotangents, strict=True)), found

    compute = jax.jit(jax.grad(weighed, tuple(range(len(arrays))), has_aux=True))
    gradients, ours = compute(*map(jnp.asarray, arrays))
    numbers = [{str(i): np.asarray(x) for i, x in enumerate(xs)} for xs in (ours, gradients)]
    return numbers, [named(found), named([x.grad for x in theirs])]


def named(tensors):
    return {str(i): x.detach().numpy() for i, x in enumerate(tensors)}


def assert_equal(ours, theirs):
    assert max(tolerance.relative(ours[0], theirs[0]).values()) <= tolerance.FORWARD
    errors = tolerance.gradient_errors(ours[1], theirs[1])
    assert max(errors.values()) <= tolerance.GRADIENT, errors


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_formula(kind, monkeypatch):
    monkeypatch.setattr(delta_chunks, "CHUNK", 4)  # three of them, the last one with padding
    arrays = inputs(*KINDS[kind])
    ours, theirs = both([*(hidden(x) for x in arrays[:-1]), arrays[-1]], STARTS, LENGTHS)
    assert_equal(ours, theirs)
    assert not ours[0]["0"][~REAL].any()


def rule(side):
    """Return the function of the tokens, and of the state behind them."""
    return side.jit(lambda *arrays: side.gated_delta_rule(*arrays[:-1], state=arrays[-1]))


def hidden(x):
    return np.where(REAL.reshape(B, T, *(1,) * (x.ndim - 2)), x, np.nan)


@pytest.mark.parametrize("kind", ["a decay per head", "a decay per feature"])
def test_token_by_token_is_the_formula(kind, monkeypatch):
    monkeypatch.setattr("flax_attn.functional.delta_rule.chunked", delta_chunks.recurrent)
    assert_equal(*both(inputs(*KINDS[kind]), STARTS, LENGTHS))


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_any_strength_give_finite_gradients(kind):
    arrays = inputs(*KINDS[kind])
    arrays[3] *= 1e3
    ours, theirs = both(arrays)
    assert_equal(ours, theirs)
    assert all(np.isfinite(x).all() for x in ours[1].values())


def test_in_float32_a_strong_decay_leaves_the_weak_ones_their_digits(sides):
    arrays = [x.astype(np.float32) for x in inputs(*KINDS["a decay per head"])]
    decay = arrays[3]
    decay[:, 1:] *= 1e-3
    decay[:, 0] = -4000.0
    flax, torch_side = sides
    outputs = {}
    for dtype in (torch.float64, torch.float32):
        tensors = [torch.tensor(x, dtype=dtype) for x in arrays]
        outputs[dtype] = rule(torch_side)(*tensors).output.double().numpy()
    ours = rule(flax)(*map(jnp.asarray, arrays)).output
    errors = tolerance.lower_dtype(
        {"output": np.asarray(ours, np.float64)},
        [{"output": outputs[torch.float32]}],
        {"output": outputs[torch.float64]},
        tolerance.LOW_FORWARD,
        2.0**-23,
    )
    assert errors["output"] <= 1


def test_sums_are_taken_in_float32_and_the_state_is_kept_so(side):
    arrays = [side.array(x, "bfloat16") for x in inputs(*KINDS["a decay per head"])]
    output, state = rule(side)(*arrays)
    assert str(output.dtype).endswith("bfloat16")
    assert str(state.dtype).endswith("float32")


def test_a_state_goes_on_where_it_ended(side):
    *tokens, state = (side.array(x) for x in inputs(*KINDS["a decay per feature"]))
    whole = rule(side)(*tokens, state)
    outputs = []
    for start, stop in ((0, 6), (6, 7), (7, T)):
        chunk = [x[:, start:stop] for x in tokens]
        output, state = rule(side)(*chunk, state)
        outputs.append(side.numpy(output))
    found = {"output": np.concatenate(outputs, 1), "state": side.numpy(state)}
    expected = {"output": side.numpy(whole.output), "state": side.numpy(whole.state)}
    errors = tolerance.relative(found, expected)
    assert max(errors.values()) <= tolerance.FORWARD


def test_one_sequence_without_a_batch_axis(side):
    arrays = [side.array(x) for x in inputs(*KINDS["a decay per head"])]
    batched, alone = rule(side)(*arrays), rule(side)(*(x[0] for x in arrays))
    for found, reference in zip(alone, batched, strict=True):
        np.testing.assert_allclose(side.numpy(found), side.numpy(reference)[0], rtol=1e-12)


def test_without_beta_it_is_a_sum_over_the_tokens_before(side):
    query, key, value, decay, _ = inputs(*KINDS["nothing replaced"])
    query = np.repeat(query, N // K, axis=2)
    key = np.repeat(key, N // K, axis=2)
    sums = np.cumsum(decay, axis=1)
    between = np.moveaxis(sums[:, :, None] - sums[:, None], 3, 1)
    # Above the diagonal the sums are positive, and their exponentials infinite.
    decays = np.tril(np.exp(np.minimum(between, 0)))
    products = np.einsum("btnh,bsnh->bnts", query, key)
    expected = np.einsum("bnts,bsnv->btnv", H**-0.5 * products * decays, value)
    arrays = [side.array(x) for x in (query, key, value, decay)]
    output = rule(side)(*arrays, None).output
    np.testing.assert_allclose(side.numpy(output), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("a decay per head", modeling_qwen3_next, "torch_recurrent_gated_delta_rule"),
        ("a decay per head", modeling_qwen3_next, "torch_chunk_gated_delta_rule"),
        ("a decay per feature", modeling_kimi_linear, "recurrent_kimi_delta_attention"),
        ("a decay per feature", modeling_kimi_linear, "chunk_kimi_delta_attention"),
    ],
)
def test_it_is_the_function_of_transformers(side, kind, module, name, float64_modules):
    query, key, value, decay, beta, state = inputs(*KINDS[kind])
    query = np.repeat(query, N // K, axis=2)
    key = np.repeat(key, N // K, axis=2)
    with float64_modules(module):
        output, after = getattr(module, name)(
            query=torch.tensor(query),
            key=torch.tensor(key),
            value=torch.tensor(value),
            g=torch.tensor(decay),
            beta=torch.tensor(beta),
            initial_state=torch.tensor(state).mT,
            output_final_state=True,
        )
    ours = rule(side)(*map(side.array, (query, key, value, decay, beta, state)))
    found = {"output": side.numpy(ours.output), "state": side.numpy(ours.state)}
    expected = {"output": output.numpy(), "state": after.mT.numpy()}
    errors = tolerance.relative(found, expected)
    assert max(errors.values()) <= tolerance.FORWARD, errors
