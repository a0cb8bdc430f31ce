"""What may be loaded, what is refused, and what stays untouched."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx, traverse_util

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.convert import ConversionError
from flax_attn.proof.variants import select

SIZES = {
    "d_in": 6,
    "d_out": 8,
    "context_length": 9,
    "dropout": 0.0,
    "num_heads": 4,
    "qkv_bias": True,
}
WIDE = 4096  # large enough that JAX would share the memory of the array it is given


def module(param_dtype="float32", **changes):
    return flax_attn.MultiHeadAttention(
        **SIZES | changes, param_dtype=param_dtype, rngs=nnx.Rngs(0)
    )


def weights(dtype="float32"):
    """Return a random state dict that fits."""
    torch.manual_seed(7)
    state = torch_ref.MultiHeadAttention(**SIZES).state_dict()
    return {
        name: torch.randn(value.shape).to(getattr(torch, dtype)) for name, value in state.items()
    }


def numpy_weights():
    return {name: value.numpy() for name, value in weights().items()}


SOURCES = {
    "numpy": numpy_weights,
    "jax": lambda: {name: jnp.asarray(value) for name, value in numpy_weights().items()},
    "torch": weights,
    "torch parameters": lambda: {
        name: torch.nn.Parameter(value) for name, value in weights().items()
    },
    "lists": lambda: {name: value.tolist() for name, value in numpy_weights().items()},
    "nested": lambda: traverse_util.unflatten_dict(numpy_weights(), sep="."),
    "float64": lambda: {name: value.astype(np.float64) for name, value in numpy_weights().items()},
    "fortran": lambda: {name: np.asfortranarray(value) for name, value in numpy_weights().items()},
    "read only": lambda: {
        name: np.broadcast_to(value, value.shape) for name, value in numpy_weights().items()
    },
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_state_dict_of_any_framework(source):
    layer = module()
    convert.load_state_dict(layer, source())
    loaded = convert.state_dict(layer)
    for name, value in numpy_weights().items():
        assert (loaded[name] == value).all(), name
        assert loaded[name].dtype == np.float32


def test_bfloat16_tensors_bit_for_bit():
    layer = module("bfloat16")
    convert.load_state_dict(layer, weights("bfloat16"))
    for name, array in convert.state_dict(layer).items():
        assert array.dtype == ml_dtypes.bfloat16
        assert (array.view(np.int16) == weights("bfloat16")[name].view(torch.int16).numpy()).all()


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_weights_are_cast_to_the_dtype_of_the_parameters(dtype):
    layer = module(dtype)
    convert.load_state_dict(layer, numpy_weights())
    for name, array in convert.state_dict(layer).items():
        assert array.dtype == jnp.dtype(dtype)
        assert (array == numpy_weights()[name].astype(jnp.dtype(dtype))).all()


def test_a_number_that_would_become_infinite_is_refused():
    layer = flax_attn.Linear(3, 2, rngs=nnx.Rngs(0))
    before = np.asarray(layer.kernel[...])
    weights = {"weight": np.full((2, 3), 1e300), "bias": np.full(2, -np.inf)}
    with pytest.raises(ConversionError) as caught:
        convert.load_state_dict(layer, weights)
    # What is infinite already stays that.
    assert str(caught.value).splitlines() == [
        "numbers stay finite in the dtype of their parameter:",
        "  kernel holds 1e+300, beyond float32",
        "Build the module with a wider param_dtype",
    ]
    np.testing.assert_array_equal(layer.kernel[...], before)


def test_a_dict_with_a_mask_buffer():
    layer, book = module(), weights() | {"mask": torch.triu(torch.ones(9, 9), 1)}
    convert.load_state_dict(layer, book)
    assert (convert.state_dict(layer)["W_key.bias"] == book["W_key.bias"].numpy()).all()
    wrapper = flax_attn.MultiHeadAttentionWrapper(3, 2, 6, 0.0, 2, rngs=nnx.Rngs(0))
    theirs = torch_ref.MultiHeadAttentionWrapper(3, 2, 6, 0.0, 2).state_dict()
    convert.load_state_dict(
        wrapper, theirs | {"heads.0.mask": torch.ones(6, 6), "heads.1.mask": torch.ones(6, 6)}
    )
    assert (
        convert.state_dict(wrapper)["heads.1.W_value.weight"]
        == theirs["heads.1.W_value.weight"].numpy()
    ).all()


@pytest.mark.parametrize("prefix", ["", "transformer.h.3.attn."])
def test_a_hugging_face_dict_with_buffers(prefix):
    layer, other = module(d_in=8), module(d_in=8)
    state = convert.state_dict(layer, "hf_gpt2", prefix=prefix)
    buffers = {f"{prefix}bias": np.ones((1, 1, 9, 9), bool), f"{prefix}masked_bias": np.array(-1e4)}
    others = (
        {"transformer.h.30.attn.c_attn.weight": np.zeros(3), "lm_head.weight": np.zeros(2)}
        if prefix
        else {}
    )
    other.W_query.kernel[...] += 1
    convert.load_state_dict(other, state | buffers | others, "hf_gpt2", prefix=prefix)
    for name, array in convert.state_dict(layer).items():
        assert (convert.state_dict(other)[name] == array).all()


@pytest.mark.parametrize("layout", ["torch_ref", "fused_qkv", "flax"])
def test_a_prefix_both_ways(layout):
    state = convert.state_dict(module(), layout, prefix="a.b.")
    assert all(name.startswith("a.b.") for name in state)
    fresh = flax_attn.MultiHeadAttention(**SIZES, rngs=nnx.Rngs(5))
    convert.load_state_dict(fresh, state | {"a.other": np.zeros(3)}, layout, prefix="a.b.")
    assert all(
        (array == state[f"a.b.{name}"]).all()
        for name, array in convert.state_dict(fresh, layout).items()
    )
    with pytest.raises(ConversionError, match=r"no entry starts with the prefix 'a.c.'"):
        convert.load_state_dict(fresh, state, layout, prefix="a.c.")


def test_the_state_dict_that_is_loaded_stays_as_it_is():
    state = numpy_weights() | {"mask": np.ones((9, 9))}
    before = {name: value.copy() for name, value in state.items()}
    convert.load_state_dict(module(), state)
    assert list(state) == list(before)
    assert all((state[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_the_module_does_not_share_memory_with_what_was_loaded(kind):
    theirs = {"scale": torch.arange(WIDE, dtype=torch.float32), "shift": torch.ones(WIDE)}
    theirs = theirs if kind == "torch" else {name: value.numpy() for name, value in theirs.items()}
    layer = flax_attn.LayerNorm(WIDE)
    convert.load_state_dict(layer, theirs)
    for value in theirs.values():
        value *= 0
        value -= 5
    assert (layer.scale[...] == jnp.arange(WIDE, dtype=jnp.float32)).all()
    assert (layer.shift[...] == 1).all()


def test_no_layout_shares_memory_with_what_was_loaded(layout):
    layer = module(d_in=8)
    state, before = convert.state_dict(layer, layout), convert.state_dict(layer)
    convert.load_state_dict(layer, state, layout)
    for array in state.values():
        array.fill(9)
    assert all((array == before[name]).all() for name, array in convert.state_dict(layer).items())


def test_exported_arrays_are_fresh_writable_and_contiguous(layout):
    layer = module(d_in=8)
    state = convert.state_dict(layer, layout)
    before = {name: array.copy() for name, array in state.items()}
    for array in state.values():
        assert type(array) is np.ndarray
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array.fill(0)
    assert all(
        (array == before[name]).all() for name, array in convert.state_dict(layer, layout).items()
    )


def test_one_error_names_everything():
    layer, state = module(), numpy_weights()
    before = convert.state_dict(layer)
    state["W_querry.weight"] = state.pop("W_query.weight")
    state["out_proj.weight"] = state["out_proj.weight"][:5]
    del state["W_value.bias"]
    state["rotary.inv_freq"] = np.zeros(4)
    with pytest.raises(ConversionError) as caught:
        convert.load_state_dict(layer, state)
    assert str(caught.value).splitlines() == [
        "these weights do not fit MultiHeadAttention in the layout 'torch_ref':",
        "  missing W_query.weight (8, 6) (nearest: W_querry.weight)",
        "  missing W_value.bias (8,)",
        "  mis-shaped out_proj.weight: expected (8, 8), got (5, 8)",
        "  unexpected W_querry.weight (8, 6) (nearest: W_query.weight)",
        "  unexpected rotary.inv_freq (4,)",
    ]
    assert all((array == before[name]).all() for name, array in convert.state_dict(layer).items())


@pytest.mark.parametrize("layout", ["fused_qkv", "flax"])
def test_a_module_is_unchanged_on_error_in_every_layout(layout):
    layer = module()
    before, state = convert.state_dict(layer), convert.state_dict(layer, layout)
    state = {name: array + 1 for name, array in state.items()}
    state[next(reversed(state))] = np.zeros(1)
    with pytest.raises(ConversionError, match="mis-shaped"):
        convert.load_state_dict(layer, state, layout)
    assert all((array == before[name]).all() for name, array in convert.state_dict(layer).items())


def test_a_transposed_kernel_is_mis_shaped():
    state = numpy_weights()
    state["W_query.weight"] = state["W_query.weight"].T
    with pytest.raises(
        ConversionError,
        match=r"mis-shaped W_query\.weight: expected \(8, 6\), got \(6, 8\)",
    ):
        convert.load_state_dict(module(), state)


def test_conversion_errors_are_value_errors():
    assert issubclass(ConversionError, ValueError)


def test_a_bias_too_many_is_not_dropped_in_silence():
    with pytest.raises(ConversionError, match=r"unexpected W_query\.bias \(8,\)"):
        convert.load_state_dict(module(qkv_bias=False), numpy_weights())


def test_every_module_of_both_packages_holds_the_same_names():
    block = select(["block_gpt2"])[0].build(flax_attn, rngs=nnx.Rngs(0))
    theirs = select(["block_gpt2"])[0].build(torch_ref).state_dict()
    ours = {name: array.shape for name, array in convert.state_dict(block).items()}
    assert ours == {name: tuple(value.shape) for name, value in theirs.items()}
