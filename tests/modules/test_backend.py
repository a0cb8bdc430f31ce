"""`backend=` of each module, and `set_backend` for a whole model."""

import jax
import pytest
from flax import nnx

import flax_attn
from flax_attn import (
    Embedding,
    Experts,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    Router,
    TransformerBlock,
    create_gpt2_attention,
    set_backend,
)
from flax_attn.backends.registry import load
from flax_attn.native import library


def block(rngs):
    att, ff = MultiHeadAttention(6, 6, 9, 0.0, 2, rngs=rngs), FeedForward(6, 10, rngs=rngs)
    return TransformerBlock(att, ff, LayerNorm(6), LayerNorm(6))


class Model(nnx.Module):
    """Blocks in a list, and a layer in a dictionary."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([block(rngs) for _ in range(2)])
        self.extra = nnx.Dict(wrapper=MultiHeadAttentionWrapper(6, 4, 9, 0.0, 3, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.extra["wrapper"](x)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls that reach the blocked backend."""
    found, attend = [], load("blocked").attend
    monkeypatch.setattr(
        load("blocked"), "attend", lambda call: (found.append(call), attend(call))[1]
    )
    return found


def backends(model):
    return [
        vars(module)["backend"]
        for _, module in nnx.iter_modules(model)
        if "backend" in vars(module)
    ]


def tokens():
    return jax.random.normal(jax.random.key(1), (4, 5, 6))


def test_each_module_hands_its_backend_on(variant, calls):
    heads = 2 if variant.name == "multi_head_wrapper" else int(variant.takes("backend"))
    inputs = variant.inputs()
    jax.eval_shape(variant.build(), *inputs)
    assert not calls
    jax.eval_shape(variant.build(backend="blocked"), *inputs)
    assert len(calls) == heads


def test_every_module_that_attends_takes_a_backend(variant):
    assert variant.takes("backend") == variant.weighs


def test_gpt2_attention_takes_a_backend():
    layer = nnx.eval_shape(
        lambda: create_gpt2_attention("small", backend="blocked", rngs=nnx.Rngs(0))
    )
    assert layer.backend == "blocked"


def test_a_refusal_reaches_the_caller_of_a_module(variants):
    with pytest.raises(flax_attn.Unsupported, match="backend 'splash' does not support this call"):
        variants["multi_head_gqa"].build(backend="splash")(*variants["multi_head_gqa"].inputs())


def test_set_backend_reaches_every_layer(calls):
    model = Model()
    jax.eval_shape(lambda x: model(x), tokens())
    assert not calls
    set_backend(model, "blocked")
    assert backends(model) == ["blocked"] * 5
    jax.eval_shape(lambda x: model(x), tokens())
    assert len(calls) == 5
    set_backend(model, "auto")
    assert backends(model) == ["auto"] * 5


def test_set_backend_of_a_layer_itself_and_of_stacked_layers():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return block(rngs)

    layer, stack = flax_attn.SimplifiedSelfAttention(), create(nnx.Rngs(0))
    for model in (layer, stack):
        set_backend(model, "blocked")
        assert backends(model) == ["blocked"]


def primitives(function, *inputs):
    """Return the text of a program, in which the kernels of the library have their names."""
    # Wrapped anew: JAX keeps the trace of a function that it knows.
    return str(jax.make_jaxpr(lambda *x: function(*x))(*inputs))


@pytest.mark.skipif(library() is None, reason="the library was not built")
def test_set_backend_decides_who_multiplies():
    rngs = nnx.Rngs(0)
    model = nnx.Module()
    model.linear = Linear(6, 8, rngs=rngs)
    model.table = Embedding(7, 6, rngs=rngs)
    model.router = Router(6, num_experts=3, top_k=2, rngs=rngs)
    model.experts = Experts(3, 6, 10, rngs=rngs)
    model.att = MultiHeadAttention(6, 6, 9, 0.0, 2, rngs=rngs)
    x = tokens()[0, :2]
    products = {
        "native_product": [model.linear, model.table.attend],
        "native_grouped_product": [lambda x: model.experts(x, model.router(x))],
    }
    for backend, natively in [("auto", True), ("blocked", False), ("native", True)]:
        set_backend(model, backend)
        for name, functions in products.items():
            for function in functions:
                assert (f" {name}[" in primitives(function, x)) == natively


def test_set_backend_changes_no_number_and_no_product_of_others(close):
    rngs = nnx.Rngs(0)
    model = nnx.Module()
    model.linear = Linear(6, 8, rngs=rngs)
    model.att = MultiHeadAttention(6, 6, 9, 0.0, 2, rngs=rngs)
    x = tokens()[0, :2]
    before = model.linear(x)
    set_backend(model, "blocked")
    close(model.linear(x), before)
    model.linear.dot_general = jax.lax.dot_general
    set_backend(model, "auto")
    assert model.linear.dot_general is jax.lax.dot_general


def test_a_changed_backend_is_traced_anew_and_only_once(calls, close):
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(model.blocks[0].att.backend)
        return model(x)

    model = Model()
    expected = run(model, tokens())
    set_backend(model, "blocked")
    close([run(model, tokens()) for _ in range(2)], [expected] * 2)
    assert traces == ["auto", "blocked"]
    assert len(calls) == 5


def test_set_backend_leaves_parameters_and_copies_alone():
    model = Model()
    copy, before = nnx.clone(model), nnx.state(model)
    set_backend(model, "blocked")
    assert backends(copy) == ["auto"] * 5
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)


@pytest.mark.parametrize("model", [Model, lambda: flax_attn.RMSNorm(4)], ids=["attention", "none"])
def test_unknown_name(model):
    model = model()
    with pytest.raises(
        ValueError, match=r"backend must be one of 'auto', .*'blocked'.*; got 'flash'"
    ):
        set_backend(model, "flash")
    assert set(backends(model)) <= {"auto"}


def test_a_model_without_attention():
    with pytest.raises(
        ValueError,
        match=r"needs a model with an attention layer.*got FeedForward, which has none\. Pass",
    ):
        set_backend(flax_attn.FeedForward(4, rngs=nnx.Rngs(0)), "blocked")


def test_what_is_no_module(no_shape_checks):
    with pytest.raises(
        ValueError, match=r"model must be .*Module.*; got list\. Pass .*nnx\.List\(layers\)"
    ):
        set_backend([flax_attn.SimplifiedSelfAttention()], "blocked")  # pyright: ignore[reportArgumentType]
