"""Fresh parameters are distributed as in `torch.nn.Linear`: uniform in +-1 / sqrt(d_in).

Biases are included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn import Linear, MultiHeadAttention


def flat(module):
    return {
        ".".join(map(str, path)): np.asarray(p[...])
        for path, p in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


def bounds(parameters):
    """Return `1 / sqrt(d_in)` of the layer that each parameter belongs to."""
    return {
        name: parameters[name.rpartition(".")[0] + ".kernel"].shape[0] ** -0.5
        for name in parameters
    }


@pytest.mark.parametrize(("name", "sizes"), [("kernel", (300, 400)), ("bias", (7, 90000))])
def test_distribution_is_uniform(name, sizes):
    values = flat(Linear(*sizes, rngs=nnx.Rngs(3)))[name].ravel() * sizes[0] ** 0.5
    n = values.size
    assert np.abs(values).max() <= 1
    assert np.abs(values).max() > 1 - 20 / n
    assert abs(values.mean()) < 4 * (1 / 3 / n) ** 0.5
    assert abs(values.var() - 1 / 3) < 4 * (4 / 45 / n) ** 0.5
    steps = (np.arange(n) + 0.5) / n * 2 - 1
    # The test of Kolmogorov and Smirnov: the whole shape.
    assert np.abs(np.sort(values) - steps).max() < 4 / n**0.5


@pytest.mark.parametrize(
    "name",
    ["multi_head_wrapper", "multi_head_gqa", "multi_head_cross", "block_gpt2", "block_llama"],
)
def test_every_layer_is_bounded_by_its_own_width(variants, name):
    for seed in range(3):
        parameters = {k: v for k, v in flat(variants[name].create(seed)).items() if "norm" not in k}
        for key, bound in bounds(parameters).items():
            assert np.abs(parameters[key]).max() <= bound, key
    pooled = [np.abs(parameters[key]).max() / bound for key, bound in bounds(parameters).items()]
    assert np.mean(pooled) > 0.85


def test_cross_attention_takes_the_width_of_each_input():
    layer = MultiHeadAttention(
        4, 96, None, 0.0, 4, True, causal=False, kdim=36, vdim=144, rngs=nnx.Rngs(0)
    )
    for name, bound in {
        "W_query": 1 / 2,
        "W_key": 1 / 6,
        "W_value": 1 / 12,
        "out_proj": 96**-0.5,
    }.items():
        for part in ("kernel", "bias"):
            top = np.abs(flat(layer)[f"{name}.{part}"]).max()
            assert 0.9 * bound < top <= bound, (name, part)


def test_norms_start_as_the_identity_does(variants):
    for name in ("layer_norm", "rms_norm", "block_gpt2"):
        for key, values in flat(variants[name].create()).items():
            if key.endswith(("scale", "shift")):
                assert (values == key.endswith("scale")).all()


def test_a_zero_centred_norm_starts_as_the_identity_does():
    norm, x = flax_attn.RMSNorm(4, zero_centred=True), jnp.arange(4.0)
    assert not flat(norm)["scale"].any()
    np.testing.assert_array_equal(norm(x), flax_attn.RMSNorm(4)(x))


def test_the_vectors_of_lambda_are_normal():
    layer = flax_attn.DifferentialAttention(4, 4, None, 0.0, 2, head_dim=20000, rngs=nnx.Rngs(0))
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        values = flat(layer)[name]
        assert abs(values.mean()) < 4 * 0.1 / 20000**0.5
        assert abs(values.std() / 0.1 - 1) < 4 / 40000**0.5
        assert 0.35 < np.abs(values).max() < 0.6


def test_equal_seeds_give_equal_parameters(learning):
    jax.tree.map(np.testing.assert_array_equal, flat(learning.create(4)), flat(learning.create(4)))


def test_different_seeds_give_different_parameters(learning):
    one, other = flat(learning.create(4)), flat(learning.create(5))
    for name in one:
        assert name.endswith(("scale", "shift")) or (one[name] != other[name]).mean() > 0.99, name


def test_no_two_layers_are_equal(learning):
    drawn = [v for k, v in flat(learning.create()).items() if not k.endswith(("scale", "shift"))]
    firsts = [values.ravel()[0] for values in drawn]
    assert len(set(firsts)) == len(firsts)


def test_parameters_come_from_the_stream_of_that_name():
    def kernel(**streams):
        return flat(Linear(3, 5, rngs=nnx.Rngs(**streams)))["kernel"]

    np.testing.assert_array_equal(kernel(params=1, dropout=2), kernel(params=1, dropout=3))
    assert (kernel(params=1, dropout=2) != kernel(params=2, dropout=2)).all()


def test_rate_of_dropout_does_not_change_the_parameters():
    layers = [
        MultiHeadAttention(6, 8, None, rate, 4, rngs=nnx.Rngs(params=0, dropout=1))
        for rate in (0.0, 0.5)
    ]
    jax.tree.map(np.testing.assert_array_equal, *map(flat, layers))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_low_parameters_are_uniform_too(dtype):
    values = (
        flat(Linear(64, 500, param_dtype=dtype, rngs=nnx.Rngs(0)))["kernel"].astype(np.float32) * 8
    )
    assert np.abs(values).max() <= 1
    assert abs(values.mean()) < 0.01 + 2.0**-7
    assert abs(values.var() - 1 / 3) < 0.01
