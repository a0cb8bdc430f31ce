import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    DynamicNTKScaling,
    MultiHeadAttention,
    RoPE,
    Scores,
    YaRNScaling,
    alibi,
    sinusoidal,
    t5_bias,
)

B, T, N, H, D = 3, 5, 2, 8, 7
PACKED = np.array([[0, 1, 2, 0, 1], [90, 91, 92, 93, 94], [7, 3, 0, 41, 5]])
ROPES = {
    "plain": RoPE(),
    "interleaved": RoPE(500.0, 6, interleaved=True),
    "dynamic": RoPE(scaling=DynamicNTKScaling(4.0, 40)),
    "yarn": RoPE(scaling=YaRNScaling(4.0, 40)),
}


@pytest.fixture(params=ROPES.values(), ids=ROPES)
def rope(request):
    return request.param


def heads(dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, T, N, H)), dtype)


def layer(rope, **keywords):
    keywords = {"num_kv_heads": 1, "rngs": nnx.Rngs(0), **keywords}
    return MultiHeadAttention(D, N * H, None, 0.0, N, rope=rope, **keywords)


def tokens():
    return jnp.asarray(np.random.default_rng(2).normal(size=(B, T, D)), jnp.float32)


def test_positions_may_be_traced(rope, close):
    close(jax.jit(rope)(heads(), PACKED), rope(heads(), PACKED))


def test_vmap_is_a_batch(rope, close):
    close(jax.vmap(rope)(heads(), jnp.asarray(PACKED)), rope(heads(), PACKED))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_stay(rope, dtype):
    assert rope(heads(dtype), PACKED).dtype == dtype
    assert sinusoidal(PACKED, 6, dtype=dtype).dtype == dtype
    assert alibi(N, PACKED, PACKED, dtype=dtype).dtype == dtype
    assert t5_bias(jnp.ones((8, N), dtype), PACKED, PACKED).dtype == dtype


@pytest.mark.usefixtures("x64")
def test_nothing_drops_below_float64(rope, equations):
    jaxpr = jax.make_jaxpr(lambda x: rope(x, PACKED))(heads("float64"))
    floats = {
        v.aval.dtype
        for e in equations(jaxpr)
        for v in e.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    }
    assert floats == {np.dtype("float64")}
    assert sinusoidal(PACKED, 6).dtype == alibi(N, PACKED, PACKED).dtype == np.float64


def test_no_table_is_held():
    module = layer(RoPE(scaling=YaRNScaling(4.0, 40)))
    kinds = {type(leaf) for _, leaf in nnx.to_flat_state(nnx.state(module))}
    assert kinds == {nnx.Param}


def test_one_compilation_serves_all_positions(close):
    traces = []

    @nnx.jit
    def compiled(module, x, positions):
        traces.append(positions.shape)
        return module(x, positions=positions)

    module, x = layer(RoPE()), tokens()
    for positions in (PACKED, 2 * PACKED):
        close(compiled(module, x, positions), module(x, positions=positions))
    assert traces == [PACKED.shape]


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_every_backend_takes_what_is_turned(backend, close):
    options = {"positions": PACKED}
    close(layer(RoPE(), backend=backend)(tokens(), **options), layer(RoPE())(tokens(), **options))


def test_scale_takes_the_place_of_the_default(close):
    default, same, other = (
        layer(RoPE(), scores=Scores(scale=scale))(tokens()) for scale in (None, H**-0.5, 1.0)
    )
    close(same, default)
    assert not np.allclose(other, default)
