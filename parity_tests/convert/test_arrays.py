"""Weights by name, without a module."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.convert import ConversionError

SHAPES = {"dense": {"kernel": (5, 3), "bias": (3,)}, "norm": {"scale": (3,)}}


def weights():
    random = np.random.default_rng(0)
    return {
        place: {n: random.normal(size=s) for n, s in shapes.items()}
        for place, shapes in SHAPES.items()
    }


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, torch.tensor])
def test_there_and_back(kind):
    ours = weights()
    theirs = convert.to_layout(
        {
            place: {name: kind(array) for name, array in named.items()}
            for place, named in ours.items()
        },
        "torch",
    )
    assert list(theirs) == ["dense.bias", "dense.weight", "norm.weight"]
    assert (theirs["dense.weight"] == ours["dense"]["kernel"].T).all()
    back = convert.from_layout(
        {name: kind(array) for name, array in theirs.items()}, "torch", like=ours
    )
    assert list(back) == ["dense.kernel", "norm.scale", "dense.bias"]
    assert (back["dense.kernel"] == ours["dense"]["kernel"]).all()
    assert all(array.dtype == np.float64 for array in back.values())


def test_a_prefix_both_ways():
    theirs = convert.to_layout(weights(), "torch", prefix="a.b.")
    assert list(theirs) == ["a.b.dense.bias", "a.b.dense.weight", "a.b.norm.weight"]
    back = convert.from_layout(theirs | {"c": np.ones(2)}, "torch", like=weights(), prefix="a.b.")
    assert (back["norm.scale"] == weights()["norm"]["scale"]).all()


def test_arrays_are_fresh():
    ours = weights()
    for array in convert.to_layout(ours, "torch_ref").values():
        array.fill(7)
    theirs = convert.to_layout(ours, "torch_ref")
    for array in convert.from_layout(theirs, "torch_ref", like=ours).values():
        array.fill(7)
    assert (theirs["dense.bias"] == weights()["dense"]["bias"]).all()
    assert (ours["norm"]["scale"] == weights()["norm"]["scale"]).all()


def test_axes_that_no_shape_gives():
    layer = flax_attn.MultiHeadAttention(6, 8, None, 0.0, 4, True, num_kv_heads=2, rngs=nnx.Rngs(0))
    ours = {f"block.att.{name}": param[...] for name, param in convert.parameters(layer).items()}

    def axes(prefix):
        return {"h": 2} if prefix == "block.att." else {}

    theirs = convert.to_layout(ours, "flax", axes=axes)
    assert theirs["block.att.key.kernel"].shape == (6, 2, 2)
    assert all(
        (theirs[f"block.att.{name}"] == array).all()
        for name, array in convert.state_dict(layer, "flax").items()
    )
    back = convert.from_layout(theirs, "flax", like=ours, axes=axes)
    assert all((array == np.asarray(ours[name])).all() for name, array in back.items())
    with pytest.raises(
        ConversionError,
        match=r"W_query.kernel of shape \(6, 8\) does not read as 'i \(n h\)'",
    ):
        convert.to_layout(ours, "flax")


def test_one_error_names_everything():
    theirs = convert.to_layout(weights(), "torch")
    theirs["dense.weights"] = theirs.pop("dense.weight")
    with pytest.raises(ConversionError) as caught:
        convert.from_layout(theirs, convert.LAYOUTS["torch"], like=weights(), what="the head")
    assert str(caught.value).splitlines() == [
        "these weights do not fit the head in the layout given:",
        "  missing dense.weight (3, 5) (nearest: dense.weights)",
        "  unexpected dense.weights (3, 5) (nearest: dense.weight)",
    ]


def test_what_is_no_number_is_named():
    with pytest.raises(
        ConversionError, match=r"norm\.scale must hold real numbers; got dtype bool"
    ):
        convert.to_layout({"norm": {"scale": np.ones(3, bool)}}, "torch")


def test_parameters_of_a_sequence_are_named_by_index():
    class Named(nnx.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.gain = nnx.Param(jnp.ones(2))

    sequence = Named(
        nnx.List([flax_attn.RMSNorm(3)]), jnp.tanh, nnx.Sequential(flax_attn.LayerNorm(5))
    )
    assert list(convert.parameters(sequence)) == ["gain", "0.0.scale", "2.0.scale", "2.0.shift"]
    held = nnx.Dict(layers=nnx.List([flax_attn.RMSNorm(3)]))
    assert list(convert.parameters(held)) == ["layers.0.scale"]
