"""`convert.auto` on language models of Hugging Face, and on modules of Linen, Equinox and ours."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.parity import tolerance

pytestmark = pytest.mark.usefixtures("usual_promotion")

D, HEADS, HIDDEN = 8, 2, 20
F64 = {"param_dtype": jnp.float64}
R = nnx.Rngs(0)


def randomised(module):
    """Return a PyTorch module in float64 and eval mode, every parameter random."""
    draw = np.random.default_rng(0)
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.data.copy_(torch.from_numpy(draw.normal(size=tuple(parameter.shape)) / 3))
    return module


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape)


def assert_equal(ours, theirs, rule=tolerance.FORWARD):
    errors = tolerance.relative({"output": np.asarray(ours)}, {"output": theirs.detach().numpy()})
    assert errors["output"] <= rule, errors


def gpt2(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 3,
        "n_positions": 9,
        "vocab_size": 13,
        "tie_word_embeddings": tied,
    }
    config = flax_attn.models.GPT2Config(
        vocab_size=13,
        context_length=9,
        d_model=12,
        num_heads=3,
        num_layers=3,
        dropout=0.0,
        tied=tied,
    )
    return flax_attn.models.GPT2(config, rngs=R, **F64), GPT2LMHeadModel(GPT2Config(**sizes))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_of_hugging_face(tied):
    ours, theirs = gpt2(tied)
    pairing = convert.auto(ours, theirs)
    fused = {row.theirs: row.ours for row in pairing.rows if "c_attn.weight" in row.theirs}
    names = tuple(f"trf_blocks.1.att.W_{name}.kernel" for name in ("query", "key", "value"))
    assert fused["transformer.h.1.attn.c_attn.weight"] == names
    randomised(theirs)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    ours.eval()
    ids = np.random.default_rng(2).integers(0, 13, (2, 7))
    assert_equal(ours(jnp.asarray(ids)), theirs(torch.from_numpy(ids)).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_of_hugging_face(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=9,
            tie_word_embeddings=tied,
        )
    )
    config = flax_attn.models.LlamaConfig(
        vocab_size=13,
        context_length=9,
        d_model=12,
        d_hidden=20,
        num_heads=6,
        num_kv_heads=2,
        num_layers=3,
        tied=tied,
    )
    ours = flax_attn.models.Llama(config, rngs=R, **F64)
    by_name = convert.state_dict(ours, flax_attn.models.Llama.family.layout)
    paired = convert.state_dict(ours, convert.auto(ours, theirs))
    assert paired.keys() == by_name.keys()
    assert all((array == by_name[name]).all() for name, array in paired.items())


def test_gpt2_is_paired_as_its_own_layout():
    ours, theirs = gpt2(tied=True)
    by_name, paired = (
        convert.state_dict(ours, layout)
        for layout in (flax_attn.models.GPT2.family.layout, convert.auto(ours, theirs))
    )
    assert paired.keys() == by_name.keys()
    assert all((array == by_name[name]).all() for name, array in paired.items())


TWINS = {
    "SelfAttention": (5, 6),
    "CausalAttention": (5, 6, 9, 0.0),
    "MultiHeadAttentionWrapper": (5, 6, 9, 0.0, 3),
    "MultiHeadAttention": (6, 6, 9, 0.0, 3, True),
    "FeedForward": (6, 6),
    "GatedFeedForward": (6, 6),
    "LayerNorm": (6,),
    "RMSNorm": (6,),
    "Embedding": (5, 6),
}


@pytest.mark.parametrize("name", TWINS)
def test_our_modules_are_paired_as_in_torch_ref(name):
    ours = getattr(flax_attn, name)(*TWINS[name], rngs=R)
    theirs = getattr(torch_ref, name)(*TWINS[name])
    by_name, paired = convert.state_dict(ours), convert.state_dict(ours, convert.auto(ours, theirs))
    assert paired.keys() == by_name.keys()
    assert all((array == by_name[name]).all() for name, array in paired.items())


class LinenBlock(linen.Module):
    """Names that Linen gives."""

    @linen.compact
    def __call__(self, x):
        options = {"param_dtype": jnp.float64}
        norm = {"epsilon": 1e-5, "use_fast_variance": False, **options}
        y = linen.LayerNorm(**norm)(x)
        x = x + linen.MultiHeadDotProductAttention(
            HEADS, bias_init=linen.initializers.normal(), **options
        )(y)
        y = linen.LayerNorm(**norm)(x)
        return x + linen.Dense(D, **options)(
            jax.nn.gelu(linen.Dense(HIDDEN, **options)(y), approximate=False)
        )


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(11, D, param_dtype=jnp.float64, name="tok")(ids)
        x = x + self.param("positions", linen.initializers.normal(), (1, 5, D), jnp.float64)
        for n in range(3):
            x = LinenBlock(name=f"block_{n}")(x)
        return linen.Dense(11, use_bias=False, param_dtype=jnp.float64, name="head")(x)


class TorchTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.pos = nn.Parameter(torch.zeros(5, D))
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(D, HEADS, HIDDEN, **options) for _ in range(3)]
        )
        self.head = nn.Linear(D, 11, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("is_sorted", [False, True], ids=["created", "sorted"])
def test_a_linen_transformer(is_sorted):
    ids = np.random.default_rng(2).integers(0, 11, (2, 5))
    module, theirs = LinenTransformer(), randomised(TorchTransformer())
    variables = module.init(jax.random.key(0), jnp.asarray(ids))
    variables = (
        jax.tree.map(lambda x: x, variables) if is_sorted else variables
    )  # a transformed tree is sorted
    pairing = convert.auto(module.bind(variables), theirs)
    arrays = convert.from_layout(theirs.state_dict(), pairing, like=variables["params"])
    params = jax.tree.map(lambda x: x, variables["params"])
    for name, array in arrays.items():
        *path, last = name.split(".")
        at = params
        for part in path:
            at = at[part]
        at[last] = jnp.asarray(array)
    output = module.apply({"params": params}, jnp.asarray(ids))
    assert_equal(output, theirs(torch.from_numpy(ids)), rule=1e-6)  # its softmax is in float32


def test_batch_norm_of_linen():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(4, (3, 3), name="conv")(x)
            return linen.BatchNorm(use_running_average=True, name="bn")(x)

    net = Net()
    bound = net.bind(net.init(jax.random.key(0), jnp.ones((1, 6, 6, 3))))
    pairing = convert.auto(bound, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert {row.theirs: row.ours for row in pairing.rows} == {
        "0.weight": ("conv.kernel",),
        "0.bias": ("conv.bias",),
        "1.weight": ("bn.scale",),
        "1.bias": ("bn.bias",),
        "1.running_mean": ("bn.mean",),
        "1.running_var": ("bn.var",),
    }


@pytest.mark.parametrize(
    ("norm", "theirs"),
    [
        (linen.LayerNorm(), nn.LayerNorm(6)),
        (linen.RMSNorm(), nn.RMSNorm(6)),
        (linen.GroupNorm(3), nn.GroupNorm(3, 6)),
    ],
)
def test_a_norm_of_linen_by_itself(norm, theirs):
    bound = norm.bind(norm.init(jax.random.key(0), jnp.ones((2, 5, 6))))
    pairing = convert.auto(bound, theirs)
    assert {row.theirs: row.ours for row in pairing.rows}["weight"] == ("scale",)


def test_linen_inside_nnx():
    inputs = jnp.zeros((1, 5), int)
    bridged = nnx.bridge.ToNNX(LinenTransformer(), rngs=nnx.Rngs(0)).lazy_init(inputs)
    theirs = randomised(TorchTransformer())
    convert.load_state_dict(bridged, theirs.state_dict(), convert.auto(bridged, theirs))
    ids = np.random.default_rng(2).integers(0, 11, (2, 5))
    assert_equal(bridged(jnp.asarray(ids)), theirs(torch.from_numpy(ids)), rule=1e-6)


class EquinoxBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self):
        key = jax.random.key(0)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, **biases, key=key)
        self.mlp = eqx.nn.MLP(
            D, D, HIDDEN, 1, activation=lambda x: jax.nn.gelu(x, approximate=False), key=key
        )

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class EquinoxViT(eqx.Module):
    patch: eqx.nn.Conv2d
    cls: jax.Array
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self):
        key = jax.random.key(0)
        self.patch = eqx.nn.Conv2d(3, D, 4, 4, key=key)
        self.cls, self.blocks = jnp.zeros(D), [EquinoxBlock() for _ in range(3)]
        self.head = eqx.nn.Linear(D, 7, key=key)

    def __call__(self, image):
        x = jnp.concatenate([self.cls[None], self.patch(image).reshape(D, -1).T])
        for block in self.blocks:
            x = block(x)
        return self.head(x[0])


class TorchViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.token = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.zeros(1, 1, D))
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(D, HEADS, HIDDEN, **options) for _ in range(3)]
        )
        self.classifier = nn.Linear(D, 7)

    def forward(self, images):
        x = self.conv(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), 1, D), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x[:, 0])


def test_a_vision_transformer_of_equinox():
    ours, theirs = eqx.filter_vmap(EquinoxViT()), randomised(TorchViT())
    pairing = convert.auto(ours, theirs)
    leaves, tree = jax.tree_util.tree_flatten_with_path(EquinoxViT())
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    like = {
        name: leaf
        for name, (_, leaf) in zip(names, leaves, strict=True)
        if eqx.is_inexact_array(leaf)
    }
    arrays = convert.from_layout(theirs.state_dict(), pairing, like=like)
    model = jax.tree.unflatten(
        tree,
        [
            jnp.asarray(arrays[n]) if n in arrays else leaf
            for n, (_, leaf) in zip(names, leaves, strict=True)
        ],
    )
    images = normal(2, 3, 8, 12)
    assert_equal(jax.jit(jax.vmap(model))(jnp.asarray(images)), theirs(torch.from_numpy(images)))
