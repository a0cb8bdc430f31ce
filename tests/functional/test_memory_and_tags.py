import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import FeedForward, LayerNorm, MultiHeadAttention, TransformerBlock
from flax_attn.backends import reference
from flax_attn.steps import STEPS, steps

TAGS = ("scores", "weights", "context")


def layer(dropout=0.0):
    # The tags in it are those of the reference; on a CPU auto may take kernels in C++.
    return MultiHeadAttention(
        7, 24, 8, dropout, 4, True, num_kv_heads=2, backend="reference", rngs=nnx.Rngs(0)
    )


def tokens():
    return jax.random.normal(jax.random.key(1), (3, 5, 7))


def loss(state, x, graphdef):
    return jnp.square(nnx.merge(graphdef, state)(x)).sum()


def tagged(equations, jaxpr):
    return {
        e.params["name"]: e.outvars[0].aval.shape
        for e in equations(jaxpr)
        if e.primitive.name == "name"
    }


def test_tags_are_in_the_jaxpr(equations):
    shapes = tagged(equations, jax.make_jaxpr(layer())(tokens()))
    assert {name: shapes[name] for name in TAGS} == {
        "scores": (3, 4, 5, 5),
        "weights": (3, 4, 5, 5),
        "context": (3, 5, 4, 6),
    }


def saved(policy, capsys):
    graphdef, state = nnx.split(layer())
    jax.ad_checkpoint.print_saved_residuals(
        jax.checkpoint(loss, policy=policy, static_argnums=2), state, tokens(), graphdef
    )
    return capsys.readouterr().out


@pytest.mark.parametrize("tag", TAGS)
def test_a_policy_saves_by_tag(tag, capsys):
    text = saved(jax.checkpoint_policies.save_only_these_names(tag), capsys)
    assert [name for name in TAGS if f"'{name}'" in text] == [tag]


def test_nothing_is_saved_by_a_tag_that_is_not_there(capsys):
    text = saved(jax.checkpoint_policies.save_only_these_names("other"), capsys)
    assert not [name for name in TAGS if f"'{name}'" in text]
    assert not [
        line for line in text.splitlines() if "argument" not in line and "constant" not in line
    ]


def test_saving_the_scores_spares_their_product(equations):
    def products(policy):
        graphdef, state = nnx.split(layer())
        grad = jax.grad(jax.checkpoint(loss, policy=policy, static_argnums=2))
        jaxpr = jax.make_jaxpr(grad, static_argnums=2)(state, tokens(), graphdef)
        return sum(e.primitive.name == "dot_general" for e in equations(jaxpr))

    names = jax.checkpoint_policies.save_only_these_names
    assert (
        products(names("scores", "context")) < products(names("scores")) < products(names("other"))
    )


@pytest.mark.parametrize("tags", [("scores",), ("weights", "context")])
def test_gradients_do_not_depend_on_the_policy(tags, close):
    graphdef, state = nnx.split(layer())
    policy = jax.checkpoint_policies.save_only_these_names(*tags)
    plain, remat = (
        jax.jit(jax.grad(f), static_argnums=2)(state, tokens(), graphdef)
        for f in (loss, jax.checkpoint(loss, policy=policy, static_argnums=2))
    )
    close(jax.tree.leaves(remat), jax.tree.leaves(plain))


@pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])
def test_steps_of_a_long_input_are_all_there(backend):
    t = 512
    assert t * t > reference.SHORT
    rngs = nnx.Rngs(0)
    att = MultiHeadAttention(8, 8, None, 0.0, 2, backend=backend, rngs=rngs)
    block = TransformerBlock(att, FeedForward(8, rngs=rngs), LayerNorm(8), LayerNorm(8))
    found = {step.name: step.shape for step in steps(block, jnp.ones((3, t, 8)))}
    assert list(found) == list(STEPS)
    assert found["scores"] == found["weights"] == (3, 2, t, t)
    assert block.att.backend == backend


def test_steps_of_a_layer_that_does_not_attend():
    assert steps(LayerNorm(7), tokens()) == []


def call(module, inputs, **options):
    return module(*inputs, **options)


def weigh(module, inputs, **options):
    return module.attend(*inputs, return_weights=True, **options)


RUNS = {"eager": (call, weigh), "jit": (nnx.jit(call), nnx.jit(weigh))}
EVERY_RUN = pytest.mark.parametrize(("run", "run_weighing"), RUNS.values(), ids=RUNS)


@EVERY_RUN
def test_asking_for_weights_leaves_every_bit_of_the_output(weighing, run, run_weighing):
    module, inputs = weighing.build(), weighing.inputs()
    attended = run_weighing(module, inputs)
    np.testing.assert_array_equal(run(module, inputs), attended.output)
    assert attended.weights.shape[-2:] == (inputs[0].shape[1], inputs[-1].shape[1])


@EVERY_RUN
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_asking_for_weights_leaves_every_bit_with_dropout(run, run_weighing, dtype):
    module = MultiHeadAttention(
        7, 24, 8, 0.5, 4, num_kv_heads=2, param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    options = {"dropout_key": jax.random.key(2)}
    inputs = [tokens().astype(dtype)]
    attended = run_weighing(module, inputs, **options)
    np.testing.assert_array_equal(run(module, inputs, **options), attended.output)
    hidden_by_the_future = 12 * np.triu(np.ones((5, 5), int), 1).sum()
    assert (attended.weights == 0).sum() > hidden_by_the_future


def test_asking_for_weights_leaves_every_bit_of_the_gradient():
    graphdef, state = nnx.split(layer())

    def weighed(state, x, graphdef):
        attended = nnx.merge(graphdef, state).attend(x, return_weights=True)
        return jnp.square(attended.output).sum()

    plain, asked = (
        jax.jit(jax.grad(f), static_argnums=2)(state, tokens(), graphdef) for f in (loss, weighed)
    )
    jax.tree.map(np.testing.assert_array_equal, asked, plain)
