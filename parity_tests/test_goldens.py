"""The published numbers of the worked example, on both sides, to all printed decimals."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.parity import tolerance

JOURNEY = json.loads((Path(__file__).parent / "data" / "journey.json").read_text())
INPUTS = np.array(JOURNEY["inputs"])
BATCH = np.stack([INPUTS, INPUTS])
PRINTED = 0.5 * 10.0 ** -JOURNEY["decimals"] + 1e-9
SIZES = tuple(name for name in JOURNEY["gpt2"] if name.startswith("gpt2-"))
SIDES = pytest.mark.parametrize("package", [flax_attn, torch_ref], ids=["flax", "torch"])
MODULES = {
    "self_attention": "SelfAttention",
    "causal_attention": "CausalAttention",
    "multi_head_wrapper": "MultiHeadAttentionWrapper",
    "multi_head_attention": "MultiHeadAttention",
}
ARGUMENTS = ("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias")


def array(package, values, dtype="float32"):
    """Return values as an array of a package, in float32 as the example was printed unless said."""
    return (
        jnp.asarray(values, dtype)
        if package is flax_attn
        else torch.tensor(values, dtype=getattr(torch, dtype))
    )


def assert_printed(actual, name, *path):
    expected = JOURNEY[name]
    for step in path:
        expected = expected[step]
    actual = convert.to_numpy(actual)
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, np.array(expected), rtol=0, atol=PRINTED)


def module(package, name):
    """Return the seeded PyTorch module, or the Flax module with its weights copied in."""
    entry = JOURNEY[name]
    arguments = {key: entry[key] for key in ARGUMENTS if key in entry}
    torch.manual_seed(entry["torch_seed"])
    seeded = getattr(torch_ref, MODULES[name])(**arguments)
    if package is torch_ref:
        return seeded
    copied = getattr(flax_attn, MODULES[name])(**arguments, rngs=nnx.Rngs(0))
    convert.load_state_dict(copied, seeded.state_dict())
    return copied


@SIDES
def test_simplified(package):
    layer = package.SimplifiedSelfAttention()
    found = layer.attend(array(package, INPUTS), return_weights=True)
    query = JOURNEY["simplified"]["query_index"]
    x = array(package, INPUTS)
    assert_printed(x @ x[query], "simplified", "scores")
    assert_printed(found.weights[query], "simplified", "weights")
    assert_printed(found.output[query], "simplified", "context")


def raw_projections(package):
    entry = JOURNEY["raw_matrices"]
    torch.manual_seed(entry["torch_seed"])
    matrices = [torch.rand(3, 2).numpy() for _ in range(3)]
    return [array(package, INPUTS) @ array(package, matrix) for matrix in matrices]


@SIDES
def test_raw_matrices(package):
    queries, keys, values = raw_projections(package)
    query = JOURNEY["raw_matrices"]["query_index"]
    found = package.attend_one_head(queries, keys, values, return_weights=True)
    assert_printed(queries[query], "raw_matrices", "query")
    assert_printed(keys @ queries[query], "raw_matrices", "scores")
    assert_printed(found.weights[query], "raw_matrices", "weights")
    assert_printed(found.output[query], "raw_matrices", "context")


@SIDES
def test_raw_matrices_as_one_head_of_many(package):
    heads = [x[:, None] for x in raw_projections(package)]
    found = package.attend(*heads, return_weights=True)
    query = JOURNEY["raw_matrices"]["query_index"]
    assert_printed(found.weights[0, query], "raw_matrices", "weights")
    assert_printed(found.output[query, 0], "raw_matrices", "context")


@SIDES
def test_self_attention(package):
    layer = module(package, "self_attention")
    found = layer.attend(array(package, INPUTS), return_weights=True)
    assert_printed(found.output, "self_attention", "output")
    assert_printed(found.weights, "self_attention", "weights")


@SIDES
def test_causal_scores_and_both_routes_to_causal_weights(package):
    layer = module(package, "self_attention")
    queries, keys, _ = layer.project(array(package, INPUTS))
    scores = convert.to_numpy(queries @ keys.T)
    for i, row in enumerate(JOURNEY["self_attention"]["causal_scores_unscaled_lower_triangle"]):
        np.testing.assert_allclose(scores[i, : i + 1], row, rtol=0, atol=PRINTED)
    for route in (package.causal_softmax_masked, package.causal_softmax_renormalized):
        assert_printed(route(array(package, scores / 2**0.5)), "self_attention", "causal_weights")
    options = {"mask": package.Mask.causal(), "return_weights": True}
    found = layer.attend(array(package, INPUTS), **options)
    assert_printed(found.weights, "self_attention", "causal_weights")


@SIDES
def test_the_two_routes_agree_to_rounding(package):
    scores = np.random.default_rng(0).normal(size=(2, 3, 7, 7))
    masked, renormalized = (
        {"weights": convert.to_numpy(route(array(package, scores, "float64")))}
        for route in (package.causal_softmax_masked, package.causal_softmax_renormalized)
    )
    assert masked["weights"].dtype == np.float64
    assert tolerance.relative(renormalized, masked)["weights"] <= tolerance.FORWARD
    assert (masked["weights"][..., ~np.tri(7, dtype=bool)] == 0).all()


@SIDES
@pytest.mark.parametrize("name", ["causal_attention", "multi_head_wrapper", "multi_head_attention"])
def test_batched_modules(package, name):
    output = module(package, name)(array(package, BATCH))
    for row in (0, 1):
        assert_printed(output[row], name, "output_each_batch_row")


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_drawn_in_the_order_of_plain_linear_layers(name):
    seeded = module(torch_ref, name)
    torch.manual_seed(JOURNEY[name]["torch_seed"])
    for layer in seeded.modules():
        if isinstance(layer, torch.nn.Linear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            assert (plain.weight == layer.weight).all()


@SIDES
def test_gpt2_sizes(package):
    assert tuple(package.GPT2_CONFIGS) == SIZES
    for name in SIZES:
        assert (
            JOURNEY["gpt2"][name].items() <= dataclasses.asdict(package.GPT2_CONFIGS[name]).items()
        )


def count(package, *arguments, **keywords):
    """Return the number of parameters without allocating any."""
    if package is torch_ref:
        with torch.device("meta"):
            return sum(
                p.numel()
                for p in package.create_gpt2_attention(*arguments, **keywords).parameters()
            )
    layer = nnx.eval_shape(
        lambda: package.create_gpt2_attention(*arguments, **keywords, rngs=nnx.Rngs(0))
    )
    return sum(int(np.prod(p.shape)) for _, p in nnx.to_flat_state(nnx.state(layer, nnx.Param)))


@SIDES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("qkv_bias", [True, False, None])
def test_gpt2_attention_parameters(package, size, qkv_bias):
    d, biased = (
        JOURNEY["gpt2"][size]["d_model"],
        JOURNEY["gpt2"][size]["qkv_bias"] if qkv_bias is None else qkv_bias,
    )
    assert count(package, size, qkv_bias=qkv_bias) == 4 * d * d + d + 3 * d * biased
    assert count(package, size.removeprefix("gpt2-"), qkv_bias=qkv_bias) == count(
        package, size, qkv_bias=qkv_bias
    )


@SIDES
def test_the_published_count_of_the_small_size(package):
    assert (
        count(package, "small", qkv_bias=False)
        == JOURNEY["gpt2"]["attention_parameters_small_qkv_bias_false"]
    )


@SIDES
@pytest.mark.parametrize("size", SIZES)
def test_gpt2_attention_is_built_as_its_config_says(package, size):
    config = JOURNEY["gpt2"][size]
    if package is torch_ref:
        with torch.device("meta"):
            layer = package.create_gpt2_attention(size, 0.25)
    else:
        layer = nnx.eval_shape(lambda: package.create_gpt2_attention(size, 0.25, rngs=nnx.Rngs(0)))
    assert (layer.num_heads, layer.context_length) == (
        config["num_heads"],
        config["context_length"],
    )
    assert layer.head_dim == config["d_model"] // config["num_heads"] == 64
    assert layer.dropout.rate == 0.25
    assert layer.causal
