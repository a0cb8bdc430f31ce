"""Keras's attention layers and its function compute the same here."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import everywhere
from flax_attn.parity import tolerance
from tests.everywhere.originals import S, T, check_low, check_same, inputs, left_alone, some_mask

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is not installed")
if keras.backend.backend() != "jax":
    pytest.skip("Keras does not compute with JAX: set KERAS_BACKEND=jax", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("x64")

B, HEADS, WIDTH = 2, 4, 6


def multi_head(dtype="float64", value_dim=5, **options):
    layer = keras.layers.MultiHeadAttention(HEADS, WIDTH, value_dim, dtype=dtype, **options)
    return built(layer)


def grouped_query(dtype="float64", **options):
    return built(keras.layers.GroupQueryAttention(WIDTH, HEADS, 2, dtype=dtype, **options))


LAYERS = {"multi-head": multi_head, "grouped-query": grouped_query}


def built(layer):
    layer.build((B, T, 10), (B, S, 11), (B, S, 13))
    rng = np.random.default_rng(0)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) / 3)
    return layer


def applied(layer, **options):
    """Return the layer as a function of its weights and inputs."""
    state = [variable.value for variable in layer.non_trainable_variables]

    def run(weights, *x):
        return layer.stateless_call(weights, state, *x, **options)[0]

    return run, [variable.value for variable in layer.trainable_variables]


def padding(tokens):
    return jnp.arange(tokens)[None] < jnp.array([[3], [tokens]])


MASKS = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "attention_mask": {"attention_mask": some_mask(B)},
    "attention_mask of heads": {"attention_mask": some_mask(B, HEADS)},
    "causal attention_mask": {"use_causal_mask": True, "attention_mask": some_mask(1)},
    "padding": {"query_mask": padding(T), "value_mask": padding(S), "key_mask": padding(S)},
    "causal padding": {"use_causal_mask": True, "value_mask": padding(S)},
    "numbers": {"attention_mask": 0.7 * some_mask(B).astype(jnp.float32)},
}


def same(layer, x, options, calls=1):
    """Compare a layer that computes its scores itself, which is clean in float64."""
    run, weights = applied(layer, **options)
    check_same(run, (weights, *x), "keras", calls)


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equal_with_scores(build, mask):
    layer, x = build(), inputs(B)
    same(layer, x, {"return_attention_scores": True, **mask})


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equal_with_dropout_that_is_off(build, mask):
    same(build(dropout=0.3), inputs(B), mask)


def formula(query, key, value, bias=None, mask=None, scale=None, is_causal=False, **kernel):
    """Compute Keras's function without its float32."""
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores if bias is None else scores + bias
    seen = jnp.ones(scores.shape, bool) if mask is None else mask
    seen = jnp.tril(jnp.broadcast_to(seen, scores.shape)) if is_causal else seen
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e38))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


# Here the layers call the function, whose softmax is in float32: no clean original in float64.
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equal_without_scores(build, mask, monkeypatch):
    x = inputs(B, dtype=jnp.float32)
    # Its function takes keys and values of one width alone.
    widths = {"value_dim": WIDTH} if build is multi_head else {}
    run, weights = applied(build("float32", **widths), **mask)
    exact, _ = applied(build(**widths), **mask)

    def exactly(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(keras.src.backend.nn, "dot_product_attention", formula)
            return exact(*arguments)

    check_low(run, exactly, (weights, *x), "keras")


def test_values_of_another_width():
    """The original raises, unless it computes the scores itself."""
    layer, x = multi_head(), inputs(B)
    with everywhere(targets=["keras"], strict=True):
        found = layer(*x)
    expected, _ = layer(*x, return_attention_scores=True)
    errors = tolerance.relative({"output": np.asarray(found)}, {"output": np.asarray(expected)})
    assert errors["output"] <= tolerance.FORWARD


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": some_mask(B, 1), "is_causal": True},
    "numbers as mask": {"mask": some_mask(B, HEADS).astype(jnp.float32)},
    "bias": {"bias": jnp.linspace(-1, 1, HEADS * T * S).reshape(1, HEADS, T, S), "scale": 0.7},
    "flash": {"flash_attention": False},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_function(options, dtype):
    rng = np.random.default_rng(3)
    shapes = (B, T, HEADS, WIDTH), (B, S, 2, WIDTH), (B, S, 2, WIDTH)
    heads = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    check_low(
        lambda *heads: keras.ops.dot_product_attention(*heads, **options),
        lambda *heads: formula(*heads, **options),
        heads,
        "keras",
    )


def test_function_of_numpy_arrays():
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(3, B, T, HEADS, WIDTH)).astype(np.float32)
    with everywhere(targets=["keras"], strict=True) as report:
        found = keras.ops.dot_product_attention(query, key.astype(np.float16), value)
    assert report.taken
    assert (
        found.dtype == keras.ops.dot_product_attention(query, key.astype(np.float16), value).dtype
    )


def test_model_with_padding_and_training():
    """A model whose embedding makes the mask is compiled and trained by Keras."""

    def model():
        keras.utils.set_random_seed(3)
        tokens = keras.Input((T,), dtype="int32")
        x = keras.layers.Embedding(11, 8, mask_zero=True)(tokens)
        x = keras.layers.MultiHeadAttention(2, 4, dropout=0.0)(x, x, use_causal_mask=True)
        x = keras.layers.GlobalAveragePooling1D()(x)
        made = keras.Model(tokens, keras.layers.Dense(1)(x))
        made.compile("sgd", "mse")
        return made

    tokens = np.random.default_rng(0).integers(1, 11, (8, T))
    tokens[:, 5:] = 0
    fit = {"x": tokens, "y": np.ones((8, 1)), "verbose": 0, "epochs": 3, "shuffle": False}
    expected = model().fit(**fit).history["loss"]
    with everywhere(targets=["keras"], strict=True) as report:
        found = model().fit(**fit).history["loss"]
    assert report.taken
    # Keras asks for the shapes of the model before it traces a step, and that is no call.
    assert sum(report.taken.values()) == 1, report
    np.testing.assert_allclose(found, expected, rtol=64 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_dropout_draws_from_the_layer(build):
    layer, x = build(dropout=0.4, seed=1), inputs(B)
    run, weights = applied(layer, training=True)
    with everywhere(targets=["keras"], strict=True) as report:
        first, second = layer(*x, training=True), layer(*x, training=True)
        again = run(weights, *x)
    assert all("dropout" in entry.asked for entry in report.taken)
    assert not jnp.allclose(first, second)
    # The state that `applied` has kept is that of the first call.
    assert (again == first).all()
    assert not jnp.allclose(first, layer(*x, training=False))


def test_training_is_that_of_the_layers_around():
    class Inner(keras.layers.MultiHeadAttention):
        def call(self, query, value, key=None):
            heads = self._query_dense(query), self._key_dense(value), self._value_dense(value)
            return self._output_dense(self._compute_attention(*heads)[0])

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner(HEADS, WIDTH, dropout=0.4)

        def call(self, x, training=None):
            return self.inner(x, x)

    layer, x = Outer(), inputs(B)[0]
    layer(x)
    with everywhere(targets=["keras"], strict=True) as report:
        layer(x, training=True)
        layer(x, training=False)
    assert sorted("dropout" in entry.asked for entry in report.taken) == [False, True]


class _OwnSoftmax(keras.layers.MultiHeadAttention):
    def _masked_softmax(self, scores, attention_mask=None):
        return scores


class _OwnPart(keras.layers.MultiHeadAttention):
    def _build_attention(self, rank):
        super()._build_attention(rank)
        self._softmax = keras.layers.Identity()


LEFT_ALONE = {
    "it overrides _masked_softmax": _OwnSoftmax,
    "its _softmax is a keras.src.layers.core.identity.Identity": _OwnPart,
}


@pytest.mark.parametrize("message", LEFT_ALONE)
def test_left_alone(message):
    layer, x = built(LEFT_ALONE[message](HEADS, WIDTH)), inputs(B)
    assert left_alone(lambda: layer(*x), "keras") == [message]


def test_scores_from_before_dropout_are_left_alone():
    layer, x = multi_head(dropout=0.4), inputs(B)
    with everywhere(targets=["keras"]) as report:
        layer(*x, training=True, return_attention_scores=True)
    (entry,) = report.left_alone
    assert entry.reason == "it returns scores from before dropout"


def test_flash_attention_with_scores_is_left_to_the_original():
    layer, x = multi_head(flash_attention=True), inputs(B)
    with everywhere(targets=["keras"]) as report, pytest.raises(ValueError, match="flash"):
        layer(*x, return_attention_scores=True)
    (entry,) = report.left_alone
    assert entry.reason == "flash attention returns no scores"


@pytest.mark.parametrize("name", ["predict_on_batch", "predict", "fit", "evaluate", "__call__"])
def test_a_model_that_ran_outside_is_compiled_again_inside(name):
    inputs = keras.Input((T, 12))
    hidden = keras.layers.MultiHeadAttention(HEADS, WIDTH)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    x, y = np.ones((B, T, 12), "float32"), np.ones((B, T, 1), "float32")
    arguments = (x, y) if name in ("fit", "evaluate") else (x,)
    silent = {} if name in ("predict_on_batch", "__call__") else {"verbose": 0}
    run = getattr(model, name)
    run(*arguments, **silent)
    with everywhere() as report:
        run(*arguments, **silent)
    assert sum(report.taken.values()) == 1, report
    assert not report.left_alone
