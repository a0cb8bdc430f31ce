"""Training with tokens in zigzag order: loss and gradients of one device, and fewer exchanges.

The tokens are put in this order once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig, MultiHeadAttention, RoPE, alibi
from flax_attn.models.loss import next_token_loss
from flax_attn.parity import tolerance
from flax_attn.plan.collectives import collectives
from flax_attn.plan.hlo import read
from flax_attn.sharding import context_parallel, shard, unzigzag, zigzag

SIZES = {"context_length": 16, "vocab_size": 12}
MODELS = {
    "gpt2": (GPT2, GPT2Config(8, 2, 1, dropout=0.3, **SIZES)),
    "llama": (Llama, LlamaConfig(8, 12, 2, 2, 2, **SIZES)),
}
TOKENS = np.random.default_rng(0).integers(0, 12, (2, 16))
PADDED = {"lengths": np.array([16, 9]), "segments": np.repeat([0, 1, 2], [5, 4, 7])}


def program(name, mesh=None, gradients=True, **options):
    """Return the compiled program of the loss, and its arguments."""
    cls, config = MODELS[name]
    model = cls(config, param_dtype=jnp.float64, rngs=nnx.Rngs(3))
    graph, state = nnx.split(model if mesh is None else shard(model, mesh))

    def loss(state, tokens):
        return next_token_loss(
            nnx.merge(graph, state), tokens, dropout_key=jax.random.key(1), **options
        )

    call = jax.value_and_grad(loss, allow_int=True) if gradients else loss
    return jax.jit(call).lower(state, TOKENS).compile(), (state, TOKENS)


def lesson(*arguments, **options):
    """Return the loss and its gradients."""
    run, given = program(*arguments, **options)
    value, gradients = run(*given)
    named = {
        ".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(gradients)
    }
    return {"loss": np.asarray(value)}, {
        path: x for path, x in named.items() if x.dtype == np.float64
    }


@pytest.mark.parametrize(
    ("name", "kind", "options"), [("gpt2", "auto", PADDED), ("llama", "explicit", {})]
)
def test_loss_and_gradients_are_those_of_one_device(name, kind, options, x64, mesh_like):
    truth, mesh = lesson(name, **options), mesh_like(kind, data=2, context=4)
    with jax.set_mesh(mesh), context_parallel("ring", order="zigzag"):
        found = lesson(name, mesh, **options)
    assert max(tolerance.relative(found[0], truth[0]).values()) <= tolerance.FORWARD
    assert max(tolerance.gradient_errors(found[1], truth[1]).values()) <= tolerance.GRADIENT


def test_layers_do_not_exchange_tokens(x64, mesh_like):
    mesh, sent = mesh_like(context=4), []
    for options in ({"balance": "zigzag"}, {"order": "zigzag"}):
        with jax.set_mesh(mesh), context_parallel("ring", **options):
            text = program("llama", mesh, gradients=False)[0].as_text()
        kinds = [
            one.count
            for one in collectives(read(text), mesh.shape)
            if one.kind == "collective-permute"
        ]
        sent.append(sum(kinds))
    each, once = sent
    assert once == 2 * 2 * 3  # in two layers keys and values pass three other devices
    assert each >= once + 2 * 4  # two pieces before each call, and two after it


def test_a_model_knows_the_positions_of_tokens_in_zigzag_order(x64, mesh_like):
    cls, config = MODELS["llama"]
    model, mesh = (
        cls(config, param_dtype=jnp.float64, rngs=nnx.Rngs(3)),
        mesh_like("explicit", context=2),
    )
    run = nnx.jit(lambda model, tokens: model(tokens))
    expected = run(model, TOKENS)
    with jax.set_mesh(mesh), context_parallel("ring", order="zigzag"):
        found = unzigzag(np.asarray(run(shard(model, mesh), zigzag(TOKENS, 2))), 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "option", [{"rope": RoPE()}, {"bias": lambda query, key: alibi(4, query, key)}], ids=list
)
def test_a_layer_knows_them_too(option, x64, mesh_like):
    bias = option.pop("bias", None)
    layer = MultiHeadAttention(
        8, 8, 16, 0.0, num_heads=4, rngs=nnx.Rngs(3), param_dtype=jnp.float64, **option
    )
    x, mesh = np.random.default_rng(0).normal(size=(2, 16, 8)), mesh_like(context=2)
    run = nnx.jit(lambda layer, x: layer(x, bias=bias))
    expected = run(layer, x)
    with jax.set_mesh(mesh), context_parallel("ring", order="zigzag"):
        found = unzigzag(np.asarray(run(shard(layer, mesh), zigzag(x, 2))), 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("axes", "tokens", "rule"),
    [
        (
            {"data": 2},
            16,
            r"that of tokens that a mesh splits; got a mesh with axes \('data',\)\. Pass",
        ),
        ({"context": 4}, 12, "two equal pieces a device; got 12 tokens on 4 devices"),
    ],
)
def test_tokens_that_cannot_be_put_in_order_are_refused(axes, tokens, rule, mesh_like):
    model, mesh = GPT2(MODELS["gpt2"][1], rngs=nnx.Rngs(3)), mesh_like(**axes)
    with (
        jax.set_mesh(mesh),
        context_parallel(order="zigzag"),
        pytest.raises(ValueError, match=rule),
    ):
        next_token_loss(shard(model, mesh), jnp.asarray(TOKENS[:, :tokens]))
