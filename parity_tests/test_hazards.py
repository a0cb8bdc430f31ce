"""Mistakes that users may make.

Each was silently wrong, or an error from deep inside, in some library or in this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref
from flax_attn.proof.variants import VARIANTS

B, T, N, H = 2, 5, 3, 4
RANDOM = np.random.default_rng(0)
Q, K, V = RANDOM.normal(size=(3, B, T, N, H))


def test_huge_values_in_hidden_slots_leave_gradients_finite(side):
    value = V.copy()
    value[:, 3:] = 1e308

    def total(query, key):
        return side.dot_product_attention(
            query, key, side.array(value), mask=side.Mask.lengths(key=3)
        ).sum()

    for gradient in side.gradients(total, side.array(Q), side.array(K)):
        assert np.isfinite(gradient).all()
        assert gradient.any()


def test_masks_and_arrays_combine_in_either_order(side):
    array = RANDOM.random((T, T)) < 0.5
    expected = array & np.tri(T, dtype=bool)
    for mask in (
        side.Mask.causal() & array,
        array & side.Mask.causal(),
        side.Mask.causal() & side.array(array),
    ):
        np.testing.assert_array_equal(side.numpy(mask.materialise(1, 1, T, T))[0, 0], expected)


def test_one_head_takes_a_dense_mask_as_it_takes_the_array(side):
    layer = side.build("CausalAttention", H, 6, T, 0.0)
    x, array = side.array(V[:, :, 0]), side.array(RANDOM.random((B, T, T)) < 0.5)
    by_array, by_mask = (
        side.numpy(layer(x, mask=mask)) for mask in (array, side.Mask.dense(array))
    )
    np.testing.assert_array_equal(by_array, by_mask)


def test_lengths_are_named(side):
    with pytest.raises(TypeError):
        side.Mask.lengths(
            np.array([5, 2])
        )  # of the queries or of the keys? the wrong one is silently wrong


@pytest.mark.parametrize("offset", [3.7, np.array([3.5, 1.0]), "left"])
def test_offsets_are_integers(side, offset, no_shape_checks):
    with pytest.raises((ValueError, TypeError)):
        side.Mask.causal(offset)


def test_numpy_sizes_are_sizes(side, no_shape_checks):
    layer = side.build("MultiHeadAttention", np.int64(6), np.int64(8), T, 0.0, np.int64(4))
    assert layer.head_dim == 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (np.array([0.3, 0.7]), "of at least two integers; got shape .2,., dtype float64"),
        (np.array([3]), "of at least two integers; got shape .1,., dtype int64"),
        (np.array([[3, 4], [5, 6]]), "Of a batch of keys pass one"),
    ],
)
def test_a_dropout_key_is_one_key(side, key, message, no_shape_checks):
    layer = side.build("CausalAttention", H, 6, T, 0.5)
    with pytest.raises(ValueError, match=message):
        layer(side.array(V[:, :, 0]), dropout_key=side.array(key))


def test_wrong_kinds_of_dropout_are_named(side, no_shape_checks):
    layer = side.build("CausalAttention", H, 6, T, 0.5)
    with pytest.raises(ValueError, match=r"a dropout key must be .* got int"):
        layer(side.array(V[:, :, 0]), dropout_key=7)
    with pytest.raises(
        ValueError, match=r"dropout must be .*KeyedDropout.* got float. Pass dropout=KeyedDropout"
    ):
        side.dot_product_attention(*map(side.array, (Q, K, V)), dropout=0.1)


def test_no_key_at_all_is_refused(side, no_shape_checks):
    with pytest.raises(ValueError, match="at least one key token"):
        side.dot_product_attention(side.array(Q), side.array(K[:, :0]), side.array(V[:, :0]))


def test_a_state_dict_with_a_mask_buffer_loads_into_torch_ref_as_it_is():
    twin, buffer = (
        torch_ref.MultiHeadAttentionWrapper(3, 2, 6, 0.0, 2),
        torch.triu(torch.ones(6, 6), diagonal=1),
    )
    published = {**twin.state_dict(), "heads.0.mask": buffer, "heads.1.mask": buffer}
    twin.load_state_dict(published)
    assert "heads.0.mask" in published
    layer = torch_ref.MultiHeadAttention(3, 2, 6, 0.0, 2)
    layer.load_state_dict({**layer.state_dict(), "mask": buffer})


def on_meta(function):
    def call(*arguments, **options):
        with torch.device("meta"):
            return function(*arguments, **options)

    return call


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_torch_ref_runs_off_the_cpu(case):
    options = dict(case.call(torch_ref))
    module = case.build(torch_ref).double().to("meta")
    inputs = [torch.as_tensor(x).to("meta") for x in case.draw(np.random.default_rng(0)).values()]
    if "mask" in options:
        parts = [
            torch_ref.Mask.dense(part.array.to("meta")).parts[0] if hasattr(part, "array") else part
            for part in options["mask"].parts
        ]
        options["mask"] = torch_ref.Mask(tuple(parts))
    if case.name == "multi_head_t5":  # its table is made in the call
        options["bias"] = on_meta(options["bias"])
    tables_in_call = case.name in ("multi_head_function_score", "multi_head_function_window")
    output = (on_meta(module) if tables_in_call else module)(*inputs, **options)
    assert output.device.type == "meta"


@pytest.mark.parametrize("rngs", [None, 0, jax.random.key(0)], ids=["none", "integer", "key"])
def test_rngs_of_another_kind_are_named(rngs, no_shape_checks):
    import flax_attn

    with pytest.raises(ValueError, match=r"rngs is missing: .* Pass rngs=nnx.Rngs\(0\)"):
        flax_attn.SelfAttention(4, 6, rngs=rngs)


def test_jit_takes_the_key_of_dropout_as_an_argument(sides):
    flax_attn, reference = sides
    layer, twin = (side.build("MultiHeadAttention", 4, 6, T, 0.5, 2) for side in sides)
    x = V[:, :, 0]
    outputs = [
        jax.jit(lambda key: layer(jnp.asarray(x), dropout_key=key))(flax_attn.key(i))
        for i in (3, 3, 4)
    ]
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] != outputs[2]).any()
    assert (twin(reference.array(x), dropout_key=reference.key(3)) != 0).any()
