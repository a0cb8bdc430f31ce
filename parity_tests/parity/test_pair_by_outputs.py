"""Parameters whose names do not tell which is which: the outputs do."""

import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn.convert.match.auto import auto, possible_pairings
from flax_attn.parity import PairingError, compare

WIDTH = 6
INPUTS = [(2, 5, WIDTH)]


def linear():
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


class TorchGated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.w2(x)) * self.w1(x)


class Gated(nnx.Module):
    def __init__(self):
        self.up, self.gate = linear(), linear()

    def __call__(self, x):
        return nnx.tanh(self.gate(x)) * self.up(x)


class OtherOrder(Gated):
    """The first of its layers is the second of PyTorch's."""

    def __init__(self):
        self.gate, self.up = linear(), linear()


class Wrong(Gated):
    def __call__(self, x):
        return nnx.sigmoid(self.gate(x)) * self.up(x)


class Layers(nnx.Module):
    def __init__(self, kind, count):
        self.layers = nnx.List([kind() for _ in range(count)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_parameters_in_the_same_order_need_no_trial():
    report = compare(Gated(), TorchGated().eval(), INPUTS, checks=["forward"])
    assert report.check("forward").passed
    assert not any("pairings" in sentence for sentence in report.coverage.untested)


def test_the_pairing_with_which_outputs_agree_is_taken():
    report = compare(OtherOrder(), TorchGated().eval(), INPUTS)
    assert report.state == "equal where tested"
    assert report.check("gradients").passed
    ours = {entry.theirs: entry.ours for entry in report.entries}
    assert ours["w1.weight"] == ("up.kernel",)
    assert ours["w2.weight"] == ("gate.kernel",)


def test_the_report_says_that_names_did_not_tell():
    report = compare(OtherOrder(), TorchGated().eval(), INPUTS, checks=["forward"])
    first, *_ = report.coverage.untested
    assert first == (
        "whether up.kernel and w1.weight; up.bias and w1.bias; gate.kernel and w2.weight; gate.bias"
        " and w2.bias are pairs: names allow 2 pairings, and with this one the outputs agree. Name"
        " them alike, or pair them by rules"
    )


def test_modules_that_no_pairing_makes_equal_are_different():
    report = compare(Wrong(), TorchGated().eval(), INPUTS, checks=["forward"], locate=False)
    assert report.state == "different"
    first, *_ = report.coverage.untested
    assert "names allow 2 pairings, and the outputs agree with none of them" in first


def test_repeated_layers_are_paired_alike():
    theirs = nn.Sequential(*[TorchGated() for _ in range(5)])
    # Two pairings, not two for each layer.
    assert len(possible_pairings(Layers(OtherOrder, 5), theirs)) == 2
    report = compare(Layers(OtherOrder, 5), theirs.eval(), INPUTS, checks=["forward"])
    assert report.check("forward").passed


def test_query_and_key_are_never_tried():
    class TorchAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.a(x) @ self.b(x).mT

    class Attention(nnx.Module):
        def __init__(self):
            self.query, self.key = linear(), linear()

        def __call__(self, x):
            return self.query(x) @ self.key(x).swapaxes(1, 2)

    with pytest.raises(PairingError, match="in more than one way"):
        compare(Attention(), TorchAttention().eval(), INPUTS)


def test_too_many_pairings_are_refused():
    class TorchMany(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "vwxyz":
                self.add_module(name, nn.Linear(WIDTH, WIDTH))

    class Many(nnx.Module):
        def __init__(self):
            self.one, self.two, self.three, self.four, self.five = (linear() for _ in range(5))

    assert possible_pairings(Many(), TorchMany()) == []


def test_a_layout_that_was_passed_stays():
    theirs = TorchGated().eval()
    pairing = auto(OtherOrder(), theirs)
    report = compare(OtherOrder(), theirs, INPUTS, layout=pairing, checks=["forward"], locate=False)
    assert report.state == "different"
    assert report.pair.layout is pairing
