"""`flax.nnx` and `flax.linen` attention is the same function under `everywhere`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.nnx.nn.attention import dot_product_attention_weights as nnx_weights

from flax_attn import adapters, everywhere
from flax_attn.parity import tolerance

B, T, S, D = 2, 40, 60, 12
HEADS, WIDTH = 4, 24


SOW = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


def draw(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def holes(*shape):
    """Return a mask in which one row sees no key, in floating point as Flax makes masks."""
    mask = np.random.default_rng(9).random(shape) < 0.6
    mask[..., 3, :] = False
    return jnp.asarray(mask, jnp.float32)


def drawn_state(module, seed=5):
    """Replace each parameter by random numbers, biases included."""
    numbers = np.random.default_rng(seed)
    state = nnx.state(module, nnx.Param)
    drawn = jax.tree.map(lambda x: jnp.asarray(numbers.normal(size=x.shape), x.dtype), state)
    nnx.update(module, drawn)
    return module


def nnx_layer(**options):
    options = {"param_dtype": jnp.float64, "decode": False} | options
    return drawn_state(nnx.MultiHeadAttention(HEADS, D, WIDTH, rngs=nnx.Rngs(0), **options))


def linen_layer(**options):
    options = {"param_dtype": jnp.float64} | options
    return linen.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=WIDTH, **options)


def linen_variables(layer, *inputs):
    variables = layer.init(jax.random.key(0), *inputs)
    numbers = np.random.default_rng(5)
    return jax.tree.map(lambda x: jnp.asarray(numbers.normal(size=x.shape), x.dtype), variables)


CALLS = {
    "plain": {},
    "causal mask": {"mask": linen.make_causal_mask(jnp.ones((B, T)))},
    "mask with an empty row": {"mask": holes(B, HEADS, T, T)},
    "padding": {"mask": jnp.zeros((B, 1, 1, T)).at[0, ..., :40].set(1)},
}


def formula(query, key, value, **options):
    """The formula of nnx, whose function without dropout and weights has its softmax in float32."""
    weights = nnx_weights(query, key, **options)
    value = jnp.repeat(value, query.shape[-2] // value.shape[-2], axis=-2)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def of_parameters(layer, call):
    """Return `call(layer, x)` as a function of the parameters and of x."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def function(parameters, x):
        return call(nnx.merge(graph, parameters, rest), x)

    return function, parameters


NNX_LAYERS = {"": {}, "grouped": {"num_kv_heads": 2}, "normalised": {"normalize_qk": True}}


@pytest.mark.parametrize("layer", NNX_LAYERS)
@pytest.mark.parametrize("call", [*CALLS, "is_causal"])
def test_a_layer_of_nnx(layer, call, x64, same):
    options = CALLS.get(call, {"is_causal": True})
    module = nnx_layer(**NNX_LAYERS[layer])
    exact = nnx_layer(attention_fn=formula, **NNX_LAYERS[layer])
    ours, parameters = of_parameters(module, lambda layer, x: layer(x, **options))
    theirs, _ = of_parameters(exact, lambda layer, x: layer(x, **options))
    same(ours, parameters, draw(B, T, D), reference=theirs)


LINEN_LAYERS = {"": {}, "normalised": {"normalize_qk": True}, "float32": {"dtype": jnp.float64}}


@pytest.mark.parametrize("layer", LINEN_LAYERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_layer_of_linen(layer, call, x64, same):
    module, x = linen_layer(**LINEN_LAYERS[layer]), draw(B, T, D)
    variables = linen_variables(module, x)
    same(lambda *args: module.apply(*args, **CALLS[call]), variables, x)


def test_other_keys_and_a_bias_of_scores(x64, same):
    q, k, v = draw(B, 3, T, 4, 8), draw(B, 3, S, 4, 8, seed=1), draw(B, 3, S, 4, 5, seed=2)
    bias = draw(B, 1, 4, T, S, seed=3)
    mask = holes(1, 1, 1, T, S)
    same(lambda q, k, v, bias: linen.dot_product_attention(q, k, v, bias, mask), q, k, v, bias)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)])
def test_any_number_of_batch_axes(shape, x64, same):
    q, k, v = (draw(*shape, T, 4, 8, seed=seed) for seed in range(3))
    same(lambda *x: linen.dot_product_attention(*x, mask=holes(*shape, 1, T, T)), q, k, v)
    clean = linen.dot_product_attention
    same(nnx.dot_product_attention, q, k, v, reference=clean)


@SOW
def test_weights_are_kept_as_before(x64, same):
    module, x = linen_layer(), draw(B, T, D)
    variables = linen_variables(module, x)
    options = {"sow_weights": True, "mutable": ["intermediates"]} | CALLS["mask with an empty row"]
    same(lambda *args: module.apply(*args, **options), variables, x)

    def run(layer, x):
        return layer(x, sow_weights=True), nnx.pop(layer, nnx.Intermediate)

    function, parameters = of_parameters(nnx_layer(num_kv_heads=2), run)
    same(function, parameters, x)


def decode_nnx(layer, x):
    layer.init_cache(x.shape, x.dtype)
    step = nnx.jit(lambda layer, token: layer(token, decode=True))
    found = [step(layer, x[:, i : i + 1]) for i in range(x.shape[1])]
    return jnp.concatenate(found, axis=1)


def test_a_cache_of_nnx(x64):
    x = draw(B, 9, D)
    expected = decode_nnx(nnx_layer(attention_fn=formula), x)
    with everywhere(strict=True) as report:
        found = decode_nnx(nnx_layer(), x)
    assert report.taken
    errors = tolerance.relative({"": np.asarray(found)}, {"": np.asarray(expected)})
    assert errors[""] <= tolerance.FORWARD


def test_a_cache_of_linen(x64):
    module, x = linen_layer(decode=True), draw(B, 9, D)
    start = linen_variables(module, x)
    cache = jax.tree.map(jnp.zeros_like, start["cache"])

    def run():
        state, found = {"params": start["params"], "cache": cache}, []
        step = jax.jit(lambda state, token: module.apply(state, token, mutable=["cache"]))
        for i in range(9):
            output, changed = step(state, x[:, i : i + 1])
            state |= changed
            found.append(output)
        return np.asarray(jnp.concatenate(found, axis=1))

    expected = run()
    with everywhere(strict=True) as report:
        found = run()
    assert report.taken
    assert tolerance.relative({"": found}, {"": expected})[""] <= tolerance.FORWARD


class Stack(linen.Module):
    """Layers by `linen.scan`, each under `linen.remat`."""

    @linen.compact
    def __call__(self, x):
        layer = linen.remat(linen.MultiHeadDotProductAttention)

        def body(module, carry, _):
            return carry + module(carry), None

        block = layer(num_heads=HEADS, qkv_features=WIDTH, param_dtype=jnp.float64)
        kept = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return linen.scan(body, **kept)(block, x, None)[0]


def test_a_scanned_stack_of_linen(x64, same):
    module, x = Stack(), draw(B, T, D)
    variables = jax.tree.map(lambda x: 0.1 * x, linen_variables(module, x))
    same(jax.jit(module.apply), variables, x)


def test_a_scanned_stack_of_nnx(x64, same):
    def stack(attention_fn):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,))
        def create(rngs):
            options = {"param_dtype": jnp.float64, "decode": False, "attention_fn": attention_fn}
            return nnx.MultiHeadAttention(HEADS, D, WIDTH, rngs=rngs, **options)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return x + layer(x)

        return of_parameters(create(nnx.Rngs(0)), lambda layers, x: forward(x, layers))

    ours, parameters = stack(nnx.dot_product_attention)
    same(nnx.jit(ours), parameters, draw(B, T, D), reference=stack(formula)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"force_fp32_for_softmax": True}])
def test_mixed_precision(dtype, options, x64):
    x = draw(B, T, D).astype(dtype)
    module = linen_layer(dtype=dtype, param_dtype=jnp.float32, **options)
    exact = linen_layer(dtype=jnp.float64, param_dtype=jnp.float32)
    variables = linen_variables(module, x)
    call = CALLS["causal mask"]

    def run():
        return module.apply(variables, x, **call)

    theirs = run()
    with everywhere(strict=True):
        ours = run()
    assert ours.dtype == theirs.dtype
    wide = exact.apply(variables, x.astype(float), **call)
    judged = [{"": np.asarray(output, np.float64)} for output in (ours, theirs, wide)]
    eps = float(jnp.finfo(dtype).eps)
    found = tolerance.lower_dtype(judged[0], judged[1:2], judged[2], tolerance.LOW_FORWARD, eps)
    assert found[""] <= 1


def test_the_softmax_in_float32_gives_float32():
    q = draw(B, T, 4, 8).astype(jnp.bfloat16)
    call = {"force_fp32_for_softmax": True}
    expected = linen.dot_product_attention(q, q, q, **call).dtype
    with everywhere(strict=True):
        assert linen.dot_product_attention(q, q, q, **call).dtype == expected == jnp.float32


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_has_the_distribution_of_the_original(broadcast):
    rate, t, s = 0.3, 64, 64
    query, value = (
        jnp.zeros((2, 3, t, 4, 8)),
        jnp.broadcast_to(jnp.eye(s)[:, None], (2, 3, s, 4, s)),
    )

    @jax.jit
    def weights(key):
        # Equal scores and values that are unit vectors: the output is the weights.
        options = {"dropout_rng": key, "dropout_rate": rate, "broadcast_dropout": broadcast}
        output = linen.dot_product_attention(query, query, value, **options)
        return s * jnp.swapaxes(output, -3, -2)

    with everywhere(strict=True):
        found = np.asarray(weights(jax.random.key(0)))
        again = np.asarray(weights(jax.random.key(0)))
        other = np.asarray(weights(jax.random.key(1)))
    np.testing.assert_array_equal(found, again)
    assert (found != other).any()
    kept = found != 0
    np.testing.assert_allclose(found[kept], 1 / (1 - rate), rtol=1e-5)
    if broadcast:
        assert (kept == kept[:1, :1, :1]).all()
        kept = kept[0, 0, 0]
    else:
        assert (kept != kept[:1, :1, :1]).any()
    # Five standard deviations of a mean of independent choices.
    spread = 5 * np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < spread


def test_dropout_that_heads_share_is_left_alone_on_a_mesh():
    q = draw(B, T, 4, 8, dtype=np.float32)
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.2}
    message = "dropout that is shared over rows and heads, on a mesh that divides them"
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), everywhere(strict=True) as report:
        with pytest.raises(ValueError, match=message):
            linen.dot_product_attention(q, q, q, **options)
        linen.dot_product_attention(q, q, q, broadcast_dropout=False, **options)
    assert report.taken


def test_dropout_draws_from_the_stream_of_the_module():
    x = draw(B, T, D, dtype=np.float32)

    def counts():
        layer = nnx_layer(dropout_rate=0.2, deterministic=False, param_dtype=jnp.float32)
        outputs = [np.asarray(layer(x)) for _ in range(2)]
        return int(layer.rngs.count[...]), outputs

    expected, _ = counts()
    with everywhere(strict=True):
        found, (first, second) = counts()
    assert found == expected == 2
    assert (first != second).any()


def test_what_dropout_does_otherwise_is_said_once(said):
    said.clear()
    layer = nnx_layer(dropout_rate=0.2, deterministic=False, param_dtype=jnp.float32)
    x = draw(B, T, D, dtype=np.float32)
    with everywhere(), pytest.warns(UserWarning, match="drops other weights for the same key"):
        layer(x)
    # All other warnings are errors.
    with everywhere():
        layer(x)


def test_dropout_that_is_off_says_nothing(said):
    said.clear()
    layer = nnx_layer(dropout_rate=0.2, deterministic=True, param_dtype=jnp.float32)
    with everywhere(strict=True) as report:
        layer(draw(B, T, D, dtype=np.float32))
    assert report.taken


def test_an_adapter_that_is_passed_by_hand_says_nothing(said):
    said.clear()
    options = {"dropout_rate": 0.2, "deterministic": False, "param_dtype": jnp.float32}
    nnx_layer(attention_fn=adapters.flax, **options)(draw(B, T, D, dtype=np.float32))


@SOW
def test_weights_are_kept_before_dropout(x64):
    layer = nnx_layer(dropout_rate=0.5, deterministic=False)
    x = draw(B, T, D)

    def run():
        layer(x, sow_weights=True)
        return np.asarray(nnx.pop(layer, nnx.Intermediate)["attention_weights"][0])

    expected = run()
    with everywhere(strict=True) as report:
        found = run()
    assert tolerance.relative({"": found}, {"": expected})[""] <= tolerance.FORWARD
    assert sum(report.taken.values()) == 1, report


EINSUMS = {
    "qk_attn_weights_einsum": jnp.einsum,
    "attn_weights_value_einsum": jnp.einsum,
}


@pytest.mark.parametrize(
    ("attend", "options", "reason"),
    [
        (linen.dot_product_attention, EINSUMS, "its products are computed by qk_attn_weights_eins"),
        (
            linen.dot_product_attention,
            {"einsum_dot_general": jax.lax.dot_general},
            "its products are computed by einsum_dot_general",
        ),
        (linen.dot_product_attention, {"bias": jnp.ones((3, 1, T))}, "bias must broadcast to"),
        (
            lambda q, k, v: linen.dot_product_attention_weights(q, k),
            {},
            "it returns all weights, so that there is nothing to save",
        ),
        (
            lambda q, k, v: nnx.nn.attention.dot_product_attention_weights(q, k),
            {},
            "it returns all weights",
        ),
        (lambda q, k, v: linen.dot_product_attention(q, k[:, :, :2], v), {}, "numbers of heads"),
        (lambda q, k, v: nnx.dot_product_attention(q[0], k, v), {}, "the same batch axes"),
        (
            lambda q, k, v: nnx.dot_product_attention(q, k, v, dropout_rate=0.1),
            {},
            "dropout_rate=0.1 needs a key; got dropout_rng=None",
        ),
        (
            lambda q, k, v: nnx.dot_product_attention(q, k, v, no_such_argument=1),
            {},
            "unexpected keyword argument 'no_such_argument'",
        ),
    ],
)
def test_a_call_that_is_not_taken(attend, options, reason):
    q, k, v = (draw(B, T, 4, 8, seed=seed, dtype=np.float32) for seed in range(3))
    with everywhere(strict=True), pytest.raises(ValueError, match=reason):
        attend(q, k, v, **options)


def test_refusals_of_flax_are_its_own():
    q = draw(B, T, 4, 8, dtype=np.float32)
    with everywhere(), pytest.raises(ValueError, match=r"q, k, v must have same rank"):
        nnx.dot_product_attention(q[0], q, q)
    with everywhere(), pytest.raises(AssertionError, match="num_heads must match"):
        linen.dot_product_attention(q, q[:, :, :2], q[:, :, :2])


def of_the_user(query, key, value, **options):
    return value


def test_an_attention_function_of_the_user_is_noted():
    x = draw(B, T, D, dtype=np.float32)
    options = {"attention_fn": of_the_user, "param_dtype": jnp.float32}
    layers = nnx_layer(**options), linen_layer(**options)
    with everywhere() as report:
        layers[0](x)
        layers[1].init(jax.random.key(0), x)
    assert not report.taken
    places = sorted(entry.place for entry in report.left_alone)
    names = ["linen.MultiHeadDotProductAttention", "nnx.MultiHeadAttention"]
    assert places == [f"flax.{name}.__call__" for name in names]
    for entry in report.left_alone:
        assert "attention_fn=of_the_user is not Flax's" in entry.reason


def test_an_attention_function_of_the_user_is_an_error_where_calls_have_to_be_taken():
    layer = nnx_layer(attention_fn=of_the_user, param_dtype=jnp.float32)
    message = "is left alone: attention_fn=of_the_user .* pass attention_fn=.*, or strict=False"
    with everywhere(strict=True), pytest.raises(ValueError, match=message):
        layer(draw(B, T, D, dtype=np.float32))


def through_flax(*arguments, **options):
    return nnx.dot_product_attention(*arguments, **options)


def test_a_function_of_the_user_that_calls_flax_is_counted_once():
    layer = nnx_layer(attention_fn=through_flax, param_dtype=jnp.float32)
    with everywhere(strict=True) as report:
        layer(draw(B, T, D, dtype=np.float32))
    assert [entry.place for entry in report.counts.elements()] == ["flax.nnx.dot_product_attention"]


@pytest.mark.filterwarnings("ignore:Casting from complex to real:DeprecationWarning")
def test_the_original_of_one_target_is_no_call_of_another():
    q = draw(B, T, 4, 8, dtype=np.complex64)
    expected = nnx.dot_product_attention(q, q, q)
    with everywhere() as report:
        found = nnx.dot_product_attention(q, q, q)
    np.testing.assert_array_equal(found, expected)
    assert [entry.place for entry in report.counts.elements()] == ["flax.nnx.dot_product_attention"]


@pytest.mark.parametrize("call", CALLS)
def test_the_adapter_is_the_same_function(call, x64):
    x = draw(B, T, D)
    options = CALLS[call]
    theirs, ours = (nnx_layer(attention_fn=one) for one in (formula, adapters.flax))
    expected, found = theirs(x, **options), ours(x, **options)
    errors = tolerance.relative({"": np.asarray(found)}, {"": np.asarray(expected)})
    assert errors[""] <= tolerance.FORWARD
    theirs, ours = linen_layer(), linen_layer(attention_fn=adapters.flax)
    variables = linen_variables(theirs, x)
    expected, found = (layer.apply(variables, x, **options) for layer in (theirs, ours))
    errors = tolerance.relative({"": np.asarray(found)}, {"": np.asarray(expected)})
    assert errors[""] <= tolerance.FORWARD


def test_the_adapter_is_no_function_of_the_user():
    with everywhere(strict=True) as report:
        nnx_layer(attention_fn=adapters.flax, param_dtype=jnp.float32)(draw(B, T, D, dtype="f4"))
    assert [entry.place for entry in report.taken] == ["flax_attn.adapters.flax"]
    assert not report.left_alone


def test_the_adapter_refuses_products_of_the_caller():
    layer = linen_layer(
        attention_fn=adapters.flax,
        param_dtype=jnp.float32,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    message = "flax_attn.adapters.flax computes the products itself"
    with pytest.raises(ValueError, match=message):
        layer.init(jax.random.key(0), draw(B, T, D, dtype=np.float32))


def test_the_adapter_raises_what_attention_raises():
    x = draw(B, T, 4, 8, dtype=np.float32)
    with pytest.raises(ValueError, match=re.escape("bias must broadcast to (b, n, t, s)")):
        adapters.flax(x, x, x, bias=jnp.ones((3, 1, T)))
