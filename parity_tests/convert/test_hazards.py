"""Weights that are almost right."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.convert import ConversionError


@pytest.fixture
def layer():
    return flax_attn.MultiHeadAttention(6, 8, 5, 0.0, 4, rngs=nnx.Rngs(0))


@pytest.fixture
def weights(layer):
    return {name: array + 1 for name, array in convert.state_dict(layer).items()}


def values(layer):
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (np.full((8, 8), "a"), "out_proj.weight must hold real numbers; got dtype <U1"),
        (np.ones((8, 8), complex), "out_proj.weight must hold real numbers; got dtype complex128"),
        ([[1, 2], [3]], "out_proj.weight is not an array"),
        (torch.empty(8, 8, device="meta"), "out_proj.weight is not an array that numpy can hold"),
    ],
    ids=["text", "complex", "ragged", "meta"],
)
def test_what_cannot_be_a_weight_is_named_and_nothing_is_written(layer, weights, broken, message):
    before = values(layer)
    with pytest.raises(ConversionError, match=message):
        convert.load_state_dict(layer, {**weights, "out_proj.weight": broken})
    for old, new in zip(before, values(layer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_wrong_prefix_shows_the_names_that_are_there(layer, weights):
    with pytest.raises(
        ConversionError,
        match=r"no entry starts with the prefix 'h.0.'; the first are W_key",
    ):
        convert.load_state_dict(layer, weights, prefix="h.0.")


def test_a_forgotten_prefix_is_found(layer, weights):
    with pytest.raises(
        ConversionError, match=r"every name has the prefix 'module.': pass prefix='module.'"
    ):
        convert.load_state_dict(layer, {f"module.{name}": array for name, array in weights.items()})


def test_a_prefix_that_ends_too_early_is_told_whole(layer, weights):
    weights = {f"module.{name}": array for name, array in weights.items()}
    with pytest.raises(ConversionError, match=r"pass prefix='module\.'$"):
        convert.load_state_dict(layer, weights, prefix="module")
    convert.load_state_dict(layer, weights, prefix="module.")


def test_a_name_given_twice_is_refused(layer, weights):
    with pytest.raises(ConversionError, match=r"W_query.weight twice, once flat and once nested"):
        convert.load_state_dict(
            layer, {**weights, "W_query": {"weight": weights["W_query.weight"]}}
        )


@pytest.mark.parametrize("weights", [[1, 2], torch.ones(3)], ids=["list", "tensor"])
def test_what_is_no_state_dict_is_refused(layer, weights, no_shape_checks):
    with pytest.raises(ConversionError, match="weights are arrays by name; got"):
        convert.load_state_dict(layer, weights)


def test_a_module_of_the_other_side_is_refused(tmp_path, weights, no_shape_checks):
    with pytest.raises(ConversionError, match="Pass the Flax side as the module"):
        convert.save(torch.nn.Linear(2, 3), tmp_path / "empty.safetensors")
    with pytest.raises(ConversionError, match="Pass the Flax side as the module"):
        convert.load_state_dict(torch.nn.Linear(2, 3), weights)


def test_parameters_of_another_form_are_named():
    with pytest.raises(
        ConversionError, match=r"kernel of shape \(3, 2, 4\) does not read as 'i o'"
    ):
        convert.state_dict(nnx.LinearGeneral(3, (2, 4), rngs=nnx.Rngs(0)))


def test_inputs_of_different_width_cannot_be_fused():
    layer = flax_attn.MultiHeadAttention(6, 8, 5, 0.0, 4, causal=False, kdim=5, rngs=nnx.Rngs(0))
    with pytest.raises(ConversionError, match=r"inputs are equally wide; got widths \[6, 5, 6\]"):
        convert.state_dict(layer, "fused_qkv")


def test_files_that_cannot_be_are_named(layer, tmp_path):
    with pytest.raises(ConversionError, match="a folder that exists"):
        convert.save(layer, tmp_path / "no" / "folder.safetensors")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(ConversionError, match="damaged or is not a checkpoint of weights only"):
        convert.load(layer, tmp_path / "empty.pt")
