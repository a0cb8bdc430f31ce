"""`jax.nn.dot_product_attention` is the same function under `everywhere`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import dot_product_attention

from flax_attn import everywhere
from flax_attn.functional.mask_part import of_rank_4
from flax_attn.parity import tolerance

B, T, S, N, K, H = 2, 70, 90, 4, 2, 8


def draw(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def arrays(dtype=np.float64, t=T, s=S, k=K, batch=(B,)):
    shapes = (*batch, t, N, H), (*batch, s, k, H), (*batch, s, k, H)
    return [draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def holes(*shape):
    """Return a mask in which one row sees no key."""
    mask = np.random.default_rng(9).random(shape) < 0.6
    mask[..., 3, :] = False
    return jnp.asarray(mask)


INT = {"dtype": jnp.int32}
CASES = {
    "plain": lambda: {},
    "scale": lambda: {"scale": 0.3},
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"local_window_size": (5, 2)},
    "windows that leave rows empty": lambda: {"local_window_size": 1, "is_causal": True},
    "mask": lambda: {"mask": holes(B, N, T, S)},
    "mask for all heads": lambda: {"mask": holes(1, 1, T, S), "is_causal": True},
    "mask of keys": lambda: {"mask": jnp.zeros((B, 1, 1, S), bool).at[0, ..., :40].set(True)},
    "mask and bias": lambda: {"mask": holes(B, 1, T, S), "bias": draw(1, N, T, S, seed=5)},
    "bias that hides": lambda: {
        "bias": jnp.where(holes(B, N, T, S), 0, jnp.finfo(jnp.float32).min)
    },
    "lengths of keys": lambda: {"key_value_seq_lengths": jnp.array([0, 50], jnp.int32)},
    "lengths": lambda: {
        "query_seq_lengths": jnp.array([T, 10], jnp.int32),
        "key_value_seq_lengths": jnp.array([50, 0], jnp.int32),
        "is_causal": True,
    },
    "lengths of queries": lambda: {"query_seq_lengths": jnp.array([T, 10], jnp.int32)},
}


def formula(query, key, value, bias=None, mask=None, **options):
    """The formula of `jax.nn`, whose softmax is in the dtype of the inputs."""
    t, s, heads = query.shape[-3], key.shape[-3], query.shape[-2]
    scale = options.get("scale") or query.shape[-1] ** -0.5
    key, value = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (key, value))
    scores = of_rank_4(jnp.einsum("...tnh,...snh->...nts", query, key) * scale)
    scores = scores if bias is None else scores + bias
    visible = jnp.ones(scores.shape, bool)
    rows, cols = (jnp.arange(size).reshape(1, 1, -1, 1) for size in (t, s))
    cols = cols.reshape(1, 1, 1, -1)
    if mask is not None:
        visible &= mask
    if options.get("is_causal"):
        visible &= cols <= rows
    if "local_window_size" in options:
        size = options["local_window_size"]
        left, right = (size, size) if isinstance(size, int) else size
        visible &= (cols >= rows - left) & (cols <= rows + right)
    if "key_value_seq_lengths" in options:
        visible &= cols < options["key_value_seq_lengths"][:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -(2.0**100)), axis=-1)
    output = jnp.einsum("...nts,...snh->...tnh", weights, of_rank_4(value))
    if "query_seq_lengths" in options:
        real = rows < options["query_seq_lengths"][:, None, None, None]
        output = jnp.where(real.swapaxes(1, 2), output, 0)
    return output.reshape(query.shape)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula(name, x64, same):
    options = CASES[name]()
    same(
        lambda *arrays: dot_product_attention(*arrays, **options),
        *arrays(),
        reference=lambda *arrays: formula(*arrays, **options),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_jax_computes(name, x64):
    options = CASES[name]()
    reference = formula(*arrays(), **options)
    # Its softmax is in float32.
    original = dot_product_attention(*arrays(), **options).astype(jnp.float32)
    errors = tolerance.reordered({"": np.asarray(original)}, {"": np.asarray(reference, "f4")})
    assert errors[""] <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["causal", "mask and bias"])
def test_lower_dtypes_lose_no_more_than_jax(dtype, name, x64):
    options = CASES[name]()
    low = [x.astype(dtype) for x in arrays()]
    wide = {"": np.asarray(formula(*(x.astype(float) for x in low), **options))}

    def run():
        output = dot_product_attention(*low, **options)
        assert output.dtype == dtype
        return {"": np.asarray(output, np.float64)}

    theirs = run()
    with everywhere(strict=True):
        ours = run()
    eps = float(jnp.finfo(dtype).eps)
    errors = tolerance.lower_dtype(ours, [theirs], wide, tolerance.LOW_FORWARD, eps)
    assert errors[""] <= 1


@pytest.mark.parametrize("size", [{"k": 1}, {"k": N}, {"t": S}, {"batch": ()}, {"t": 1}])
def test_shapes(size, x64, same):
    inputs = arrays(**size)
    same(lambda *x: dot_product_attention(*x, is_causal=True), *inputs, reference=causal_formula)


def causal_formula(*inputs):
    return formula(*inputs, is_causal=True)


def vmapped(function):
    return lambda q, k, v: jax.vmap(lambda q: function(q, k, v))(jnp.stack([q, 2 * q]))


def scanned(function):
    def run(q, k, v):
        def step(x, _):
            return function(x, k, v), None

        return jax.lax.scan(step, q, length=3)[0]

    return run


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": vmapped,
    "scan": scanned,
    "checkpoint": jax.checkpoint,
    "jit of vmap": lambda function: jax.jit(vmapped(function)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("case", ["causal", "mask of keys"])
def test_transforms(name, case, x64, same):
    transform, options = TRANSFORMS[name], CASES[case]()
    same(
        transform(lambda *x: dot_product_attention(*x, **options)),
        *arrays(),
        reference=transform(lambda *x: formula(*x, **options)),
    )


def test_a_mesh(x64, same):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        inputs = [jax.device_put(x, rows) for x in arrays()]
        same(
            jax.jit(lambda *x: dot_product_attention(*x, is_causal=True)),
            *inputs,
            reference=causal_formula,
        )


def test_layers_of_a_model_on_a_mesh():
    """Two calls that are alike, the second of which JAX could find in what it keeps."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def model(query):
        for _ in range(2):
            query = dot_product_attention(query, query, query, is_causal=True)
        return query

    query, _, _ = arrays(np.float32, s=T, k=N)
    expected = model(query)
    with jax.set_mesh(mesh), everywhere(strict=True) as report:
        found = model(query)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert sum(report.taken.values()) == 2


def test_forward_mode_is_as_before(x64):
    query, key, value = arrays()
    bias = draw(1, N, T, S, seed=5)

    def change(attend):
        return jax.jit(lambda x: jax.jvp(lambda x: attend(x, key, value, bias), (x,), (x,)))(query)

    with everywhere(strict=True) as report:
        _, found = change(dot_product_attention)
    _, expected = change(formula)
    assert [entry.backend for entry in report.taken] == ["blocked"]
    errors = tolerance.gradient_errors({"": np.asarray(found)}, {"": np.asarray(expected)})
    assert errors[""] <= tolerance.GRADIENT


def in_shards(function, check):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    specs = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec, "check_vma": check}
    return jax.jit(jax.shard_map(function, **specs))


def attend_causally(*inputs):
    return dot_product_attention(*inputs, is_causal=True)


def test_the_parts_of_shard_map(x64, same):
    same(in_shards(attend_causally, False), *arrays(), reference=causal_formula)


def test_the_typed_parts_of_shard_map_are_left_alone_where_no_kernel_takes_them(x64):
    inputs = arrays(np.dtype("float64"))

    def gradient(query):
        attend = in_shards(attend_causally, True)
        return jax.grad(lambda query: attend(query, *inputs[1:]).sum())(query)

    with everywhere() as report:
        found = gradient(inputs[0])
    (entry,) = report.left_alone
    assert "need check_vma=False" in entry.reason
    np.testing.assert_array_equal(found, gradient(inputs[0]))


def test_lists_are_taken_as_the_original_takes_them():
    query = [[[[1.0, 2.0]]]]
    with everywhere(strict=True):
        assert dot_product_attention(query, query, query).shape == (1, 1, 1, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_residual": True}, "return_residual=True asks for the logarithms of the sums"),
        ({"implementation": "cudnn"}, "implementation='cudnn' asks for a kernel by name"),
        ({"mask": jnp.ones((1, 1, T, S))}, "mask must be boolean"),
        ({"query_seq_lengths": jnp.ones(5, jnp.int32)}, "lengths must be int32, one a row of the"),
        ({"bias": jnp.ones((1, 1, T, S + 1))}, r"bias must broadcast to \(b, n, t, s\)"),
    ],
)
def test_a_call_that_is_not_taken(options, reason):
    inputs = arrays(np.float32)
    with everywhere(strict=True), pytest.raises(ValueError, match=reason):
        dot_product_attention(*inputs, **options)


def test_values_that_jax_refuses_are_left_to_it():
    query, key, value = arrays(np.float32)
    message = "value shape should be"
    with everywhere() as report, pytest.raises(ValueError, match=message):
        dot_product_attention(query, key, value[..., :4])
    (entry,) = report.left_alone
    assert "have different shapes" in entry.reason


def test_what_is_left_alone_is_computed_as_before():
    inputs = arrays(np.float32)
    expected = dot_product_attention(*inputs, return_residual=True)
    with everywhere() as report:
        found = dot_product_attention(*inputs, return_residual=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [entry.place for entry in report.left_alone] == ["jax.nn.dot_product_attention"]
