"""Plain Flax layers and the torch.nn layers of the same names, alone and put together."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.convert import ConversionError, Rule

pytestmark = pytest.mark.usefixtures("usual_promotion")

F64 = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


def channels_last(x):
    return np.moveaxis(x, 1, -1)


LAYERS = {
    "linear": (lambda: nnx.Linear(5, 3, **F64), lambda: torch.nn.Linear(5, 3)),
    "linear without bias": (
        lambda: nnx.Linear(5, 3, use_bias=False, **F64),
        lambda: torch.nn.Linear(5, 3, bias=False),
    ),
    "square": (lambda: nnx.Linear(5, 5, **F64), lambda: torch.nn.Linear(5, 5)),
    "layer norm": (
        lambda: nnx.LayerNorm(5, epsilon=1e-5, use_fast_variance=False, **F64),
        lambda: torch.nn.LayerNorm(5),
    ),
    "rms norm": (
        lambda: nnx.RMSNorm(5, epsilon=1e-5, **F64),
        lambda: torch.nn.RMSNorm(5, eps=1e-5),
    ),
    "our linear": (lambda: flax_attn.Linear(5, 3, **F64), lambda: torch.nn.Linear(5, 3)),
    "our layer norm": (lambda: flax_attn.LayerNorm(5, **F64), lambda: torch.nn.LayerNorm(5)),
    "our rms norm": (lambda: flax_attn.RMSNorm(5, **F64), lambda: torch.nn.RMSNorm(5, eps=1e-5)),
    "sequence": (
        lambda: nnx.Sequential(
            nnx.Linear(5, 3, **F64), jnp.tanh, nnx.Sequential(nnx.Linear(3, 4, **F64))
        ),
        lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Sequential(torch.nn.Linear(3, 4))
        ),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_features(rig, name):
    ours, theirs = (build() for build in LAYERS[name])
    rig.load_both_ways(ours, rig.theirs(theirs), "torch")
    x = rig.normal(2, 7, 5)
    rig.assert_equal(rig.run(ours, x), theirs(torch.from_numpy(x)))


CONVOLUTIONS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


@pytest.mark.parametrize(("rank", "groups"), [(1, 2), (2, 1), (3, 1)])
def test_convolutions(rig, rank, groups):
    size = (2, 3, 4)[:rank]
    ours = nnx.Conv(4, 6, size, padding="VALID", feature_group_count=groups, **F64)
    theirs = rig.theirs(CONVOLUTIONS[rank](4, 6, size, groups=groups))
    rig.load_both_ways(ours, theirs, "torch")
    x = rig.normal(2, 4, *(5, 6, 7)[:rank])
    output = np.moveaxis(rig.run(ours, channels_last(x)), -1, 1)
    rig.assert_equal(output, theirs(torch.from_numpy(x)))


class Classifier(nnx.Module):
    """Embedding, a list of residual layers, a norm."""

    def __init__(self):
        self.embed = nnx.Embed(11, 5, **F64)
        self.layers = nnx.List([flax_attn.Linear(5, 5, **F64) for _ in range(3)])
        self.norm = flax_attn.LayerNorm(5, **F64)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.norm(x)


class TorchClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


def test_a_model_of_them(rig):
    ours, theirs = Classifier(), rig.theirs(TorchClassifier())
    rig.load_both_ways(ours, theirs, "torch")
    tokens = rig.random.integers(0, 11, (2, 7))
    rig.assert_equal(rig.run(ours, tokens), theirs(torch.from_numpy(tokens)))


class Norms(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(5, rngs=nnx.Rngs(0))
        self.norm.shift = nnx.Param(jnp.ones(5))


def test_a_shift_beside_a_bias_is_ambiguous():
    message = (
        r"an entry is made once; this layout makes norm.bias of norm.shift, and of norm.bias\."
        r" Rename one"
    )
    with pytest.raises(ConversionError, match=message):
        convert.state_dict(Norms(), "torch")
    with pytest.raises(ConversionError, match=message):
        convert.load_state_dict(
            Norms(), {"norm.weight": np.ones(5), "norm.bias": np.ones(5)}, "torch"
        )


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (
            lambda: nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0)),
            r"key \(LinearGeneral\)",
        ),
        (lambda: nnx.Einsum("a,ab->b", (5, 3), rngs=nnx.Rngs(0)), "Einsum"),
        (lambda: nnx.ConvTranspose(5, 3, (2,), rngs=nnx.Rngs(0)), "ConvTranspose"),
    ],
    ids=["heads", "einsum", "transposed"],
)
def test_other_kernels_are_refused(layer, name):
    with pytest.raises(
        ConversionError, match=rf"{name} cannot be stored.*For nnx.MultiHeadAttention take"
    ):
        convert.state_dict(layer(), "torch")


def test_running_statistics_cross_both_ways():
    published = {
        "running_mean": np.full(5, 2.0),
        "running_var": np.full(5, 3.0),
        "num_batches_tracked": np.array(7),
    }
    published |= {"weight": np.full(5, 4.0), "bias": np.full(5, 5.0)}
    layer = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    convert.load_state_dict(layer, published, "torch")
    assert {name: float(tensor[0]) for name, tensor in convert.tensors(layer).items()} == {
        "bias": 5.0,
        "scale": 4.0,
        "mean": 2.0,
        "var": 3.0,
    }
    stored = convert.state_dict(layer, "torch")
    assert {name: float(array[0]) for name, array in stored.items()} == {
        name: float(array[0]) for name, array in published.items() if array.ndim
    }


def test_statistics_are_not_lost_in_silence():
    with pytest.raises(ConversionError, match=r"no place for mean \(5,\), var \(5,\)"):
        convert.state_dict(
            nnx.BatchNorm(5, rngs=nnx.Rngs(0)),
            [Rule(("scale",), "weight"), Rule(("bias",), "bias")],
        )
    published = torch.nn.BatchNorm1d(5).state_dict()
    with pytest.raises(ConversionError, match=r"unexpected running_mean \(5,\)"):
        convert.load_state_dict(nnx.LayerNorm(5, rngs=nnx.Rngs(0)), published, "torch")
