"""Blocks that are recomputed for their gradients: the same numbers, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig
from flax_attn.models.loss import next_token_loss
from flax_attn.parity import tolerance

# XLA's CPU compiler drops the barriers that keep it from merging the two computations, and with
# them the saving.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def build(name, remat, num_layers=1, **numerics):
    options = {"context_length": 16, "vocab_size": 11, "dropout": 0.2}
    numerics |= {"remat": remat, "rngs": nnx.Rngs(0)}
    if name == "gpt2":
        return GPT2(GPT2Config(8, 2, num_layers, **options), **numerics)
    return Llama(LlamaConfig(8, 12, 4, num_layers, num_kv_heads=2, **options), **numerics)


def compiled(model, tokens):
    """Compile loss and gradients; return the program and its inputs, with keys from the streams."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss_and_gradients(params, rest, tokens):
        loss = nnx.value_and_grad(lambda model: next_token_loss(model, tokens))
        return loss(nnx.merge(graph, params, rest))

    inputs = params, rest, tokens
    return loss_and_gradients.lower(*inputs).compile(compiler_options=KEEP_BARRIERS), inputs


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_are_the_same(name, x64):
    tokens, found = jnp.arange(30).reshape(2, 15) % 11, []
    for remat in (False, True):
        program, inputs = compiled(build(name, remat, param_dtype=jnp.float64), tokens)
        loss, gradients = program(*inputs)
        paths = (
            (jax.tree_util.keystr(path), x)
            for path, x in jax.tree_util.tree_leaves_with_path(gradients)
        )
        found.append({"loss": np.asarray(loss)} | {path: np.asarray(x) for path, x in paths})
    errors = tolerance.reordered(*found)
    assert max(errors.values()) <= 1, errors


def test_temporaries_fall():
    tokens = jnp.zeros((64, 16), jnp.int32)
    models = [
        nnx.eval_shape(lambda remat=remat: build("llama", remat, num_layers=2))
        for remat in (False, True)
    ]
    sizes = (compiled(model, tokens)[0].memory_analysis() for model in models)
    kept, again = (size.temp_size_in_bytes for size in sizes)
    assert again < 0.6 * kept


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_that_is_closed_over_can_be_compiled(name):
    tokens, (plain, again) = (
        jnp.ones((2, 5), jnp.int32),
        (build(name, remat) for remat in (False, True)),
    )
    for model in (plain, again):
        model.eval()
    np.testing.assert_array_equal(
        jax.jit(lambda x: again(x))(tokens), jax.jit(lambda x: plain(x))(tokens)
    )


def test_streams_of_dropout_advance_as_without_recomputing():
    counts = []
    for remat in (False, True):
        model = build("llama", remat, num_layers=2)
        nnx.jit(lambda model, x: model(x))(model, jnp.ones((2, 5), jnp.int32))
        counts.append(
            [int(count) for count in jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.RngCount)))]
        )
    assert counts[0] == counts[1] == [1, 1]
