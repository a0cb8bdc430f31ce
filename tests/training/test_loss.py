"""Compute the loss a few tokens at a time, in at least float32, with unchanged results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.models import cross_entropy
from flax_attn.models.loss import next_token_loss

TOKENS = np.random.default_rng(0).integers(0, 19, (3, 14)).astype(np.int32)


def build(param_dtype=jnp.float32, **options):
    """Return a model without blocks, which compiles quickly: the head reads the embeddings."""
    config = GPT2Config(
        **{"d_model": 6, "num_heads": 2, "num_layers": 0, "vocab_size": 19, "dropout": 0.0}
        | options
    )
    model = GPT2(config, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    model.tok_emb.embedding[...] *= 20  # as one that has learned: the logits lie far apart
    return model


def plain(model, tokens):
    logits = model(tokens)[:, :-1]
    logits = logits.astype(accumulation_dtype(logits.dtype))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()


def lesson(model, function=next_token_loss):
    value, gradients = nnx.jit(nnx.value_and_grad(lambda model, tokens: function(model, tokens)))(
        model, TOKENS
    )
    return value, nnx.to_pure_dict(gradients)


@pytest.mark.parametrize(("rows", "tied"), [(1, True), (12, False), (42, True), (512, False)])
def test_the_number_of_tokens_at_a_time_changes_nothing(rows, tied, x64, close, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_ROWS", rows)
    model = build(jnp.float64, tied=tied)
    close(lesson(model), lesson(model, plain))


def test_second_derivatives(x64, close):
    model = build(jnp.float64)

    def steepness(function):
        gradients = nnx.grad(lambda model, tokens: function(model, tokens))
        return lambda model, tokens: sum(
            jnp.square(x).sum() for x in jax.tree.leaves(gradients(model, tokens))
        )

    ours, truth = (
        nnx.jit(nnx.grad(steepness(function)))(model, TOKENS)
        for function in (next_token_loss, plain)
    )
    close(nnx.to_pure_dict(ours), nnx.to_pure_dict(truth))


def test_logits_are_never_held_all_at_once():
    model, tokens = build(vocab_size=2000, context_length=512), jnp.zeros((4, 512), jnp.int32)
    graph, params = nnx.split(model)

    def temporaries(function):
        program = jax.jit(
            jax.value_and_grad(lambda params, tokens: function(nnx.merge(graph, params), tokens))
        )
        return program.lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

    whole = 4 * 512 * 2000 * 4
    assert temporaries(next_token_loss) < 0.7 * whole < whole < temporaries(plain)


def test_sums_are_taken_in_float32():
    model = build(jnp.bfloat16)
    value, gradients = lesson(model)
    assert value.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"bfloat16"}
    # A sum in bfloat16 is off by up to 4e-3.
    assert abs(value - lesson(model, plain)[0]) < 1e-6 * value


def test_gradients_of_the_head_are_summed_in_float32(monkeypatch):
    model = build(jnp.bfloat16, tied=False)
    truth = lesson(model)[1]["out_head"]["kernel"].astype(jnp.float32)
    monkeypatch.setattr(cross_entropy, "_ROWS", 1)
    found = lesson(model)[1]["out_head"]["kernel"].astype(jnp.float32)
    assert (
        jnp.abs(found - truth).max()
        <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * jnp.abs(truth).max()
    )
