"""Our blocks against PyTorch's encoder and decoder layers.

Norms come before or after; layers stand alone or in a model.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import Mask, convert
from flax_attn.parity import assert_parity

B, T, S, D, HIDDEN, HEADS = 2, 5, 7, 6, 10, 3
LAYOUT = "torch_transformer"
CHECKS = ["weights", "forward", "gradients"]
NORM_FIRST = pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])


def numerics():
    return {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


def parts(package, activation, bias, norms, **numerics):
    return {
        "ff": package.FeedForward(D, HIDDEN, activation, bias, **numerics),
        **{f"norm{i + 1}": package.LayerNorm(D, bias=bias, **numerics) for i in range(norms)},
    }


def attention(package, causal, bias, **numerics):
    options = {"qkv_bias": bias, "out_bias": bias, "causal": causal}
    return package.MultiHeadAttention(D, D, None, 0.0, HEADS, **options, **numerics)


def encoder_layer(activation="relu", bias=True, norm_first=False):
    att = attention(flax_attn, False, bias, **numerics())
    return flax_attn.TransformerBlock(
        att, **parts(flax_attn, activation, bias, 2, **numerics()), norm_first=norm_first
    )


def decoder_layer(package=flax_attn, activation="relu", bias=True, norm_first=False):
    own = numerics() if package is flax_attn else {}
    cross = package.CrossAttention(D, D, 0.0, HEADS, bias, key_bias=bias, out_bias=bias, **own)
    att = attention(package, True, bias, **own)
    return package.CrossBlock(
        att, cross, **parts(package, activation, bias, 3, **own), norm_first=norm_first
    )


def torch_layer(kind, norm_first, activation="relu", **options):
    layer = kind(
        D, HEADS, HIDDEN, 0.0, activation, norm_first=norm_first, batch_first=True, **options
    )
    return layer.eval()


def decode(layer, x, memory):
    return layer(x, layer.cross.keep(memory))


def decode_with_torch(layer, x, memory):
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, memory, tgt_mask=hidden)


@NORM_FIRST
@pytest.mark.parametrize(("ours", "theirs"), [("relu", "relu"), ("gelu_exact", "gelu")])
def test_encoder_layer(norm_first, ours, theirs):
    block = encoder_layer(ours, norm_first=norm_first)
    layer = torch_layer(torch.nn.TransformerEncoderLayer, norm_first, theirs)
    assert_parity(block, layer, [(B, T, D)], layout=LAYOUT, checks=CHECKS)


@NORM_FIRST
def test_decoder_layer(norm_first):
    block, layer = (
        decoder_layer(norm_first=norm_first),
        torch_layer(torch.nn.TransformerDecoderLayer, norm_first),
    )
    calls = {"flax_call": decode, "torch_call": decode_with_torch}
    assert_parity(block, layer, [(B, T, D), (B, S, D)], layout=LAYOUT, checks=CHECKS, **calls)


@NORM_FIRST
def test_blocks_with_norms_after_the_sums_are_mirrored(norm_first):
    twin = decoder_layer(torch_ref, norm_first=norm_first).eval()
    calls = {"flax_call": decode, "torch_call": decode}
    shapes = [(B, T, D), (B, S, D)]
    assert_parity(
        decoder_layer(norm_first=norm_first),
        twin,
        shapes,
        layout="torch_ref",
        checks=CHECKS,
        **calls,
    )


def test_layers_without_biases():
    layer = torch_layer(torch.nn.TransformerEncoderLayer, True, bias=False)
    assert_parity(
        encoder_layer(bias=False, norm_first=True), layer, [(B, T, D)], layout=LAYOUT, checks=CHECKS
    )


class Classifier(nnx.Module):
    def __init__(self):
        self.embed = flax_attn.Embedding(11, D, **numerics())
        self.encoder = nnx.Dict(layers=nnx.List([encoder_layer() for _ in range(2)]))
        self.head = flax_attn.Linear(D, 4, **numerics())

    def __call__(self, tokens, lengths):
        x = self.embed(tokens)
        for layer in self.encoder.layers:
            x = layer(x, mask=Mask.lengths(key=lengths))
        return self.head(x)


class TorchClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, D), torch.nn.Linear(D, 4)
        layer = torch_layer(torch.nn.TransformerEncoderLayer, False)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens, lengths):
        hidden = torch.arange(tokens.shape[1]) >= lengths[:, None]
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=hidden))


def test_a_model_of_them():
    tokens = np.random.default_rng(0).integers(0, 11, (B, T))
    assert_parity(
        Classifier(),
        TorchClassifier().eval(),
        {"tokens": tokens},
        layout=LAYOUT,
        checks=CHECKS,
        extras={"lengths": [5, 3]},
        flax_call=lambda model, tokens, lengths: model(tokens, lengths),
        torch_call=lambda model, tokens, lengths: model(tokens, lengths),
    )


def test_grouped_queries_are_refused():
    block = encoder_layer()
    block.att = flax_attn.MultiHeadAttention(D, D, None, 0.0, 6, True, num_kv_heads=3, **numerics())
    with pytest.raises(
        convert.ConversionError, match=r"torch_transformer.*no grouped queries; got num_heads=6"
    ):
        convert.state_dict(block, LAYOUT)
