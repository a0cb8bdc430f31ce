"""Calls inside `jax.shard_map` with `check_vma=True`, where types say what varies over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_attn import Mask, Unsupported, dot_product_attention, explain, native

DEVICES = 2
SIZES = {"query": (4, 64, 4, 8), "key": (4, 64, 2, 8), "value": (4, 64, 2, 8), "sinks": (4,)}
TYPED = ["auto", "reference", *(["native"] if native.library() else [])]


def split(function, specs, outputs):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outputs))


def arrays():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=size), "float32") for name, size in SIZES.items()}


def loss(arrays, backend, queries=64):
    """Return a sum that is different for every number of the output."""
    query = arrays["query"][:, :queries]
    mask = Mask.causal(offset=64 - queries)
    options = {"mask": mask, "sinks": arrays["sinks"], "backend": backend}
    output = dot_product_attention(query, arrays["key"], arrays["value"], **options)
    return (jnp.sin(3 * output) * output).sum()


@pytest.mark.parametrize("whole", [("sinks",), ("sinks", "key", "value")], ids=["rows", "queries"])
@pytest.mark.parametrize("backend", TYPED)
def test_gradients_of_what_is_the_same_everywhere_are_summed(backend, whole):
    given = arrays()
    # Keys and values of one row serve the rows of both devices.
    for name in set(whole) - {"sinks"}:
        given[name] = given[name][:2]
    specs = {name: P() if name in whole else P("data") for name in given}

    def of_all(given):
        copied = {name: jnp.concatenate([given[name]] * DEVICES) for name in set(whole) - {"sinks"}}
        return loss(given | copied, "reference")

    def total(given):
        return jax.lax.psum(loss(given, backend), "data")

    def gradient(given):
        return jax.grad(total)(given)

    found = split(gradient, (specs,), specs)(given)
    expected = jax.grad(of_all)(given)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def test_few_queries_are_decoded_with_the_same_output():
    given = arrays()
    specs = {name: P() if name == "sinks" else P("data") for name in given}
    for backend in ("decode", *TYPED):
        run = split(lambda x, b=backend: jax.lax.psum(loss(x, b, 3), "data"), (specs,), P())
        np.testing.assert_allclose(run(given), loss(given, "reference", 3), rtol=1e-5)


def test_a_kernel_with_loops_refuses_and_auto_takes_the_formula():
    given = {name: x.astype("bfloat16") for name, x in arrays().items()}
    seen = []

    def call(given):
        # No kernel in C++ takes a bias.
        long = jnp.repeat(given["query"], 4, axis=1)
        options = {"bias": jnp.zeros((256, 256)), "mask": Mask.causal()}
        seen.append(explain(long, long, long, **options, platform="cpu"))
        with pytest.raises(
            Unsupported, match=r"vary over data\. Pass check_vma=False to jax\.shard"
        ):
            dot_product_attention(long, long, long, **options, backend="blocked")
        return dot_product_attention(long, long, long, **options)

    split(call, (P("data"),), P("data"))(given)
    assert seen[0].backend == "reference"
    assert seen[0].refusals["blocked"] is not None
