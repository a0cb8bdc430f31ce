"""Models with matrices in 8 bits: how far their logits are, and how they are made and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from flax_attn import GPT2, GPT2Config, Linear, Llama, LlamaConfig, QuantizedLinear, set_backend
from flax_attn.models import from_pretrained, generate, quantize
from flax_attn.sharding import shard

GPT = GPT2Config(48, 4, 2, context_length=64, vocab_size=97)
LLAMA = LlamaConfig(64, 96, num_heads=4, num_layers=2, num_kv_heads=2, vocab_size=97)


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backends_agree_and_differentiate(m, dtype):
    layer = Linear(24, 9, rngs=nnx.Rngs(0), param_dtype=dtype)
    holder = nnx.List([QuantizedLinear(layer.kernel[...], layer.bias[...])])
    x = jax.random.normal(jax.random.key(1), (m, 24), dtype)
    native = holder[0]
    pull = jax.grad(lambda x: jnp.sin(native(x).astype("float32")).sum())
    found, gradient = native(x), pull(x)
    native.dot_general = jax.lax.dot_general
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == "float32" else 2e-2}
    np.testing.assert_allclose(found, native(x), **tolerance)
    np.testing.assert_allclose(gradient, pull(x), **tolerance)
    assert found.dtype == dtype


@pytest.mark.parametrize(("cls", "config"), [(GPT2, GPT), (Llama, LLAMA)])
def test_logits_are_near_those_of_float32(cls, config):
    model = cls(config, rngs=nnx.Rngs(0))
    model.eval()
    tokens = jnp.arange(40).reshape(2, 20)
    whole = model(tokens)
    quantize(model)
    error = jnp.max(jnp.abs(model(tokens) - whole)) / jnp.max(jnp.abs(whole))
    # A weight is off by scale / sqrt(12) in the mean, 1 / 440 of the largest of its column.
    assert 1e-4 < error < 0.02
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state)
    np.testing.assert_allclose(compiled, model(tokens), rtol=0, atol=1e-5)
    assert len(generate(model, [1, 2, 3], max_new_tokens=4)) == 4


def test_a_folder_is_loaded_in_8_bits(tmp_path):
    model = GPT2(GPT, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, weights="int8")
    quantize(model)
    model.eval()
    tokens = jnp.arange(20).reshape(2, 10)
    np.testing.assert_array_equal(loaded(tokens), model(tokens))
    set_backend(loaded, "reference")
    np.testing.assert_allclose(loaded(tokens), model(tokens), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="save_pretrained writes weights as floats"):
        loaded.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got scan_layers"):
        from_pretrained(tmp_path, weights="int8", scan_layers=True)
    with pytest.raises(ValueError, match="weights must be"):
        from_pretrained(tmp_path, weights="int4")
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(ValueError, match="got a mesh"):
        from_pretrained(tmp_path, weights="int8", mesh=mesh)


def test_stacked_layers_are_refused():
    with pytest.raises(ValueError, match="whose layers are stacked"):
        quantize(GPT2(GPT, scan_layers=True, rngs=nnx.Rngs(0)))


def test_a_mesh_that_would_split_a_quantized_layer_is_refused():
    model = GPT2(GPT, rngs=nnx.Rngs(0))
    quantize(model)
    rule = r"QuantizedLinear runs on one device; got a mesh of 2 devices\. .* without quantize\(\)"
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
    with pytest.raises(ValueError, match=rule):
        shard(model, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rule):
        model.trf_blocks[0].ff(jnp.ones((2, GPT.d_model)))
    shard(model, jax.make_mesh((1,), ("data",), (AxisType.Auto,)))
