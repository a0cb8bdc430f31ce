"""Whole models on a mesh: outputs, gradients and training of one device, and what they send."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import (
    GPT2,
    FeedForward,
    GPT2Config,
    Llama,
    LlamaConfig,
    MultiHeadAttention,
    RMSNorm,
    TransformerBlock,
    convert,
)
from flax_attn.models.loss import next_token_loss
from flax_attn.parity import tolerance
from flax_attn.sharding import rules
from flax_attn.sharding.parameters import create, shard
from flax_attn.training import train_step

SIZES = {"context_length": 8, "vocab_size": 12, "dropout": 0.0}
MODELS = {
    "gpt2": (GPT2, GPT2Config(16, 4, 2, **SIZES)),
    "llama": (Llama, LlamaConfig(16, 24, num_heads=4, num_layers=2, num_kv_heads=2, **SIZES)),
}
TOKENS = np.random.default_rng(0).integers(0, 12, (8, 8))
NORM = r"f64\[(8,\d)[,\d]*\][^=]* rsqrt\("  # batch and tokens of a norm in a compiled program
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def build(name, **options):
    """Return a small model; the reference partitions under any mesh."""
    cls, config = MODELS[name]
    return cls(config, backend="reference", param_dtype=jnp.float64, rngs=nnx.Rngs(3), **options)


def largest(errors):
    return max(errors.values())


def named(state):
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(state)}


def lesson(model, tokens, **options):
    """Return the logits, and the loss with its gradients."""
    logits = nnx.jit(lambda model, tokens: model(tokens, **options))(model, tokens)
    of_loss = nnx.value_and_grad(lambda model, tokens: next_token_loss(model, tokens, **options))
    value, gradients = nnx.jit(of_loss)(model, tokens)
    return (
        {"logits": np.asarray(logits), "loss": np.asarray(value)},
        named(gradients),
        logits.sharding,
    )


def steps(model, optimizer, tokens, count=3):
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        losses = [train_step(model, optimizer, tokens) for _ in range(count)]
    return {"losses": np.array(losses)}, convert.state_dict(model)


@pytest.fixture(scope="module")
def alone():
    """Return what one device computes: the lesson of each model, and how the first one trains."""
    with jax.enable_x64(True):
        lessons = {name: lesson(build(name), TOKENS) for name in MODELS}
        model = build("gpt2")
        return lessons, steps(model, nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param), TOKENS)


RESIDUALS = pytest.mark.parametrize(
    "residual", ["context", ("context", "tensor")], ids=["whole", "sequence_parallel"]
)


@RESIDUALS
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_one_device(name, kind, residual, alone, x64, mesh_like):
    mesh = mesh_like(kind, **MESH)
    with jax.set_mesh(mesh), rules(residual=residual):
        outputs, gradients, lies = lesson(shard(build(name), mesh), TOKENS)
    assert lies.shard_shape((8, 8, 12)) == (2, 8, 6)
    truth = alone[0][name]
    assert largest(tolerance.relative(outputs, truth[0])) <= tolerance.FORWARD
    assert largest(tolerance.gradient_errors(gradients, truth[1])) <= tolerance.GRADIENT


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"scan_layers": True}], ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_training_is_that_of_one_device(kind, options, alone, x64, mesh_like):
    mesh = mesh_like(kind, **MESH)
    with jax.set_mesh(mesh):
        model = shard(build("gpt2", **options), mesh)
        before = lies(model)
        optimizer = create(
            lambda model: nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param), mesh, model
        )
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(("data", "fsdp"))))
        losses, parameters = steps(model, optimizer, tokens)
    assert lies(model) == before
    truth = alone[1]
    assert largest(tolerance.relative(losses, truth[0])) <= tolerance.FORWARD
    # Softmax ignores the bias of the keys: its gradient is rounding, which Adam blows up.
    felt = {name: array for name, array in truth[1].items() if not name.endswith("W_key.bias")}
    assert largest(tolerance.relative(parameters, felt)) <= tolerance.TRAINING


def lies(model):
    """Return the share of each parameter that a device has."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: x.sharding.shard_shape(x.shape) for path, x in state}


def test_rows_of_different_lengths(x64, mesh_like):
    mesh, lengths = mesh_like("both", data=2, tensor=2), jnp.array([8, 5, 8, 2])
    model = build("llama")
    truth = lesson(model, TOKENS[:4], lengths=lengths)
    with jax.set_mesh(mesh):
        found = lesson(shard(model, mesh), TOKENS[:4], lengths=lengths)
    assert largest(tolerance.relative(found[0], truth[0])) <= tolerance.FORWARD
    assert largest(tolerance.gradient_errors(found[1], truth[1])) <= tolerance.GRADIENT


def test_a_sequence_without_a_batch_and_a_vocabulary_that_does_not_divide(x64, mesh_like):
    config = GPT2Config(16, 4, 1, context_length=8, vocab_size=11, dropout=0.0)
    model = GPT2(config, backend="reference", param_dtype=jnp.float64, rngs=nnx.Rngs(3))
    mesh, tokens = mesh_like(fsdp=2, tensor=2), jnp.asarray(TOKENS[0] % 11)
    truth = lesson(model, tokens)
    with jax.set_mesh(mesh):
        found = lesson(shard(model, mesh), tokens)
    assert largest(tolerance.relative(found[0], truth[0])) <= tolerance.FORWARD
    assert largest(tolerance.gradient_errors(found[1], truth[1])) <= tolerance.GRADIENT


def test_without_a_mesh_nothing_is_added(x64, equations):
    model = build("llama")
    graph, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(
        jax.grad(lambda state: next_token_loss(nnx.merge(graph, state), jnp.asarray(TOKENS)))
    )(state)
    names = {equation.primitive.name for equation in equations(jaxpr.jaxpr)}
    assert names.isdisjoint(
        {"sharding_constraint", "reshard", "shard_map", "psum", "all_gather", "axis_index"}
    )
    assert "dot_general" in names


def program(name, mesh, **options):
    """Return the compiled text of the forward pass of a model on a mesh."""
    with jax.set_mesh(mesh), rules(**options):
        graph, state = nnx.split(shard(build(name), mesh))
        return (
            jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
            .lower(state, TOKENS)
            .compile()
            .as_text()
        )


def collectives(text):
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", text))


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_has_one_all_reduce_a_sublayer(name, x64, mesh_like):
    """And one for the embedding of the tokens, whose table is split over the vocabulary."""
    assert collectives(program(name, mesh_like(tensor=2))) == {"all-reduce": 2 * 2 + 1}


@pytest.mark.parametrize("name", MODELS)
def test_norms_run_on_their_share_of_the_tokens_with_sequence_parallelism(name, x64, mesh_like):
    """A CPU sums whole arrays and cuts them, where other devices have a reduce-scatter."""
    mesh = mesh_like(tensor=2)
    shapes = [set(re.findall(NORM, program(name, mesh, residual=axes))) for axes in ((), "tensor")]
    assert shapes == [{"8,8"}, {"8,4"}]
    found = collectives(program(name, mesh, residual="tensor"))
    assert found["all-gather"] >= 2 * 2 + 1
    assert found["all-reduce"] + found["reduce-scatter"] <= 2 * 2 + 1


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_norms_after_the_sublayers_run_on_their_share_too(kind, x64, mesh_like):
    numbers = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    att = MultiHeadAttention(16, 16, 8, 0.0, 4, backend="reference", **numbers)
    norms = [RMSNorm(16, param_dtype=jnp.float64) for _ in range(4)]
    block = TransformerBlock(
        att, FeedForward(16, **numbers), *norms[:2], post_norm1=norms[2], post_norm2=norms[3]
    )
    mesh = mesh_like(kind, tensor=2)
    with jax.set_mesh(mesh), rules(residual="tensor"):
        graph, state = nnx.split(shard(block, mesh))
        forward = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = forward.lower(state, jnp.ones((8, 8, 16))).compile().as_text()
    assert set(re.findall(NORM, text)) == {"8,4"}


def test_data_parallel_sends_nothing_forward(x64, mesh_like):
    assert collectives(program("llama", mesh_like(data=4))) == {}
