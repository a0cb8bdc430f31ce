"""`convert.auto` on layers with kernels of more than two axes, or transposed: equal outputs."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from transformers.pytorch_utils import Conv1D

from flax_attn import convert
from parity_tests.asserts import assert_near

pytestmark = pytest.mark.usefixtures("usual_promotion")

B, T, D, HEADS, WIDTH, HIDDEN = 3, 5, 8, 2, 4, 7
F64 = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


class Mixes(nnx.Module):
    """Splits into heads and joins them, by `LinearGeneral`."""

    def __init__(self):
        self.split = nnx.LinearGeneral(D, (HEADS, HIDDEN), **F64)
        self.join = nnx.LinearGeneral((HEADS, HIDDEN), D, axis=(-2, -1), **F64)

    def __call__(self, x):
        return self.join(jnp.tanh(self.split(x)))


def test_linear_general(rig):
    theirs = rig.theirs(
        nn.ModuleDict({"split": nn.Linear(D, HEADS * HIDDEN), "join": nn.Linear(HEADS * HIDDEN, D)})
    )
    ours, x = Mixes(), rig.normal(B, T, D)
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs, pairing)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    rig.assert_equal(
        np.asarray(ours(jnp.asarray(x))),
        theirs["join"](theirs["split"](torch.from_numpy(x)).tanh()),
    )


class Perceptron(nnx.Module):
    def __init__(self):
        self.up, self.down = nnx.Linear(D, HIDDEN, **F64), nnx.Linear(HIDDEN, D, **F64)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_conv1d_of_hugging_face(rig):
    theirs = rig.theirs(nn.ModuleDict({"up": Conv1D(HIDDEN, D), "down": Conv1D(D, HIDDEN)}))
    ours, x = Perceptron(), rig.normal(B, T, D)
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs, pairing)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    rig.assert_equal(
        np.asarray(ours(jnp.asarray(x))), theirs["down"](theirs["up"](torch.from_numpy(x)).tanh())
    )


class NormedAttention(nn.Module):
    """Attention with norms of the queries and keys of each head, as in `nnx.MultiHeadAttention`."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH, eps=1e-6, bias=False) for _ in range(2))

    def forward(self, x):
        query, key, value = (
            project(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = self.q_norm(query) @ self.k_norm(key).mT / WIDTH**0.5
        return self.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(-2))


def test_norms_of_queries_and_keys(rig):
    theirs, x = rig.theirs(NormedAttention()), rig.normal(B, T, D)
    ours = nnx.MultiHeadAttention(HEADS, D, normalize_qk=True, decode=False, **F64)
    pairing = convert.auto(ours, theirs)
    norms = {row.theirs: row.ours for row in pairing.rows if "norm" in row.theirs}
    assert norms == {"q_norm.weight": ("query_ln.scale",), "k_norm.weight": ("key_ln.scale",)}
    rig.load_both_ways(ours, theirs, pairing)
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    # Asked for weights, Flax takes the softmax in float64.
    output, _ = nnx.capture(ours, nnx.Intermediate)(jnp.asarray(x), sow_weights=True)
    assert_near({"": np.asarray(output)}, {"": theirs(torch.from_numpy(x)).detach().numpy()})


class OwnNorm(nnx.Module):
    def __init__(self, shift):
        self.scale = nnx.Param(jnp.zeros(D))
        if shift:
            self.shift = nnx.Param(jnp.zeros(D))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("LN", nn.LayerNorm(D)),
        ("Normalise", nn.LayerNorm(D)),
        ("Affine", nn.LayerNorm(D)),
        ("RMS", nn.RMSNorm(D)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_norms_of_a_class_of_ones_own(name, theirs):
    shift = "bias" in theirs.state_dict()
    pairing = convert.auto(type(name, (OwnNorm,), {})(shift), theirs)
    assert {row.theirs: row.ours for row in pairing.rows} == {
        "weight": ("scale",),
        **({"bias": ("shift",)} if shift else {}),
    }


def test_a_scale_alone_may_be_no_norm():
    ours = type("LayerScale", (OwnNorm,), {})(shift=False)
    with pytest.raises(convert.ConversionError, match="no word in common"):
        convert.auto(ours, nn.RMSNorm(D))


class Packed(nnx.Module):
    """A module that holds what PyTorch packs, under its names."""

    def __init__(self, theirs):
        for name, tensor in theirs.named_parameters():
            if "." not in name:
                setattr(self, name, nnx.Param(jnp.zeros(tensor.shape, jnp.float64)))
        if isinstance(theirs, nn.MultiheadAttention):
            self.out_proj = nnx.Linear(D, D, **F64)


@pytest.mark.parametrize(
    "theirs", [nn.MultiheadAttention(D, HEADS), nn.LSTM(D, HIDDEN), nn.GRUCell(D, HIDDEN)]
)
def test_what_torch_packs_is_paired_with_its_namesake(rig, theirs):
    pairing = convert.auto(Packed(theirs), theirs)
    rig.load_both_ways(Packed(theirs), theirs.double(), pairing)
    own = [row for row in pairing.rows if "." not in row.theirs]
    assert {row.evidence for row in own} == {"name"}
    assert {row.pattern for row in own} == {""}


class Sides(nnx.Module):
    """The weights of one recurrent layer as two linear layers."""

    def __init__(self, width, gates):
        self.ih = nnx.Linear(width, gates * HIDDEN, **F64)
        self.hh = nnx.Linear(HIDDEN, gates * HIDDEN, **F64)


class Gates(nnx.Module):
    """Those of each gate as linear layers of their own, under the letters of PyTorch's formulas."""

    def __init__(self, width, letters):
        for letter in letters:
            setattr(self, f"W_i{letter}", nnx.Linear(width, HIDDEN, **F64))
            setattr(self, f"W_h{letter}", nnx.Linear(HIDDEN, HIDDEN, **F64))


@pytest.mark.parametrize(
    ("theirs", "gates"),
    [(nn.RNNCell(D, HIDDEN), 1), (nn.GRUCell(D, HIDDEN), 3), (nn.LSTM(D, HIDDEN), 4)],
)
def test_a_recurrent_layer_as_two_linear_layers(rig, theirs, gates):
    ours = Sides(D, gates)
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs.double(), pairing)
    partner = {row.theirs.removesuffix("_l0"): row.ours for row in pairing.rows}
    assert partner == {
        "weight_ih": ("ih.kernel",),
        "weight_hh": ("hh.kernel",),
        "bias_ih": ("ih.bias",),
        "bias_hh": ("hh.bias",),
    }


@pytest.mark.parametrize(
    ("theirs", "letters"), [(nn.GRUCell(D, HIDDEN), "rzn"), (nn.LSTM(D, HIDDEN), "ifgo")]
)
def test_a_recurrent_layer_as_a_linear_layer_for_each_gate(rig, theirs, letters):
    # Their order in the module says nothing: their names do.
    ours = Gates(D, letters[::-1])
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs.double(), pairing)
    partner = {row.theirs.removesuffix("_l0"): row.ours for row in pairing.rows}
    assert partner["weight_ih"] == tuple(f"W_i{letter}.kernel" for letter in letters)
    assert partner["bias_hh"] == tuple(f"W_h{letter}.bias" for letter in letters)


def test_recurrent_layers_on_one_another(rig):
    theirs = nn.LSTM(D, HIDDEN, num_layers=2, bidirectional=True)
    ours = nnx.Module()
    for i, width in enumerate((D, 2 * HIDDEN)):
        setattr(ours, f"l{i}", Sides(width, 4))
        setattr(ours, f"l{i}_reverse", Sides(width, 4))
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs.double(), pairing)
    partner = {row.theirs: row.ours[0] for row in pairing.rows}
    assert partner["weight_ih_l1_reverse"] == "l1_reverse.ih.kernel"
    assert partner["bias_hh_l0"] == "l0.hh.bias"


def test_a_norm_that_one_side_holds_in_its_first_block(rig):
    def block(*names):
        return nn.ModuleDict({name: nn.LayerNorm(D) for name in names})

    blocks = nn.ModuleList([block("ln1", "ln2", "ln0"), block("ln1", "ln2")])
    theirs = nn.ModuleDict({"blocks": blocks, "ln_out": nn.LayerNorm(D)})
    ours = nnx.Module()
    ours.ln0 = nnx.LayerNorm(D, **F64)
    ours.blocks = nnx.List()
    for _ in range(2):
        inner = nnx.Module()
        inner.ln1, inner.ln2 = nnx.LayerNorm(D, **F64), nnx.LayerNorm(D, **F64)
        ours.blocks.append(inner)
    ours.ln_out = nnx.LayerNorm(D, **F64)
    pairing = convert.auto(ours, theirs)
    rig.load_both_ways(ours, theirs.double(), pairing)
    partner = {row.theirs: row.ours[0] for row in pairing.rows}
    assert partner["blocks.0.ln0.weight"] == "ln0.scale"
    assert partner["blocks.1.ln1.bias"] == "blocks.1.ln1.bias"


class TorchSine(nn.Module):
    def __init__(self):
        super().__init__()
        self.freq = nn.Parameter(torch.ones(1, 4))


class TorchFilter(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.act = TorchSine()


class Filter(nnx.Module):
    """It holds the parameter of a module of PyTorch, and another one of that shape."""

    def __init__(self, first, second):
        setattr(self, first, nnx.Param(jnp.ones(4)))
        setattr(self, second, nnx.Param(jnp.zeros(4)))


@pytest.mark.parametrize("names", [("freq", "bias"), ("bias", "freq")])
def test_parameters_are_paired_by_their_own_names_in_whatever_modules(names):
    pairing = convert.auto(Filter(*names), TorchFilter())
    pairs = {row.theirs: (row.ours, row.evidence) for row in pairing.rows}
    assert pairs == {"bias": (("bias",), "name"), "act.freq": (("freq",), "name")}


def test_parameters_of_other_names_are_not_paired_by_one_that_they_share():
    with pytest.raises(convert.ConversionError, match=r"fit torch .* in more than one way"):
        convert.auto(Filter("freq", "shift"), TorchFilter())


class Numbered(nnx.Module):
    def __init__(self, numbers):
        for number in numbers:
            setattr(self, f"layer{number}", nnx.Linear(4, 3, rngs=nnx.Rngs(number)))


class TorchNumbered(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        for number in numbers:
            setattr(self, f"blocks_{number}", nn.Linear(4, 3))


def test_numbers_that_both_sides_have_may_count_from_another_one():
    pairing = convert.auto(Numbered([0, 1, 2]), TorchNumbered([1, 2, 3]))
    pairs = {row.theirs: row.ours[0] for row in pairing.rows}
    assert pairs["blocks_1.weight"] == "layer0.kernel"
    assert pairs["blocks_3.weight"] == "layer2.kernel"
