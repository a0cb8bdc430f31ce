"""Parameters that stack the layers of a list, beside the list: they are compared layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn.convert import ConversionError, Layout, Rule
from flax_attn.convert.entry import Entry
from flax_attn.parity import compare
from flax_attn.parity.adapters.recording import Recording

pytestmark = pytest.mark.usefixtures("usual_promotion")

D, EXPERTS = 6, 3
CHECKS = ["forward", "gradients", "second", "training"]
X = [(2, 5, D)]


class Mixture(nnx.Module):
    """Experts that all see each token, weighed by a router."""

    def __init__(self, width=8, scale=1.0, turned=False):
        self.router = nnx.Linear(D, EXPERTS, rngs=nnx.Rngs(0))
        self.w_up = nnx.Param(jnp.zeros((EXPERTS, width, D) if turned else (EXPERTS, D, width)))
        self.b_up = nnx.Param(jnp.zeros((EXPERTS, width)))
        self.w_down = nnx.Param(jnp.zeros((EXPERTS, D, width) if turned else (EXPERTS, width, D)))
        self.scale, self.turned = scale, turned

    def __call__(self, x):
        weights = jax.nn.softmax(self.router(x), -1)
        up, down = ("ehd", "edh") if self.turned else ("edh", "ehd")
        hidden = jnp.einsum(f"btd,{up}->bteh", x, self.w_up[...]) + self.b_up[...]
        hidden = jnp.tanh(hidden * self.scale)
        each = jnp.einsum(f"bteh,{down}->bted", hidden, self.w_down[...])
        return jnp.einsum("bted,bte->btd", each, weights)


class TorchExpert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(D, width)
        self.down = nn.Linear(width, D, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class TorchMixture(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(TorchExpert(width) for _ in range(EXPERTS))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return (each * weights[..., None, :]).sum(-1)


def test_experts_as_one_array_equal_a_list():
    report = compare(Mixture(), TorchMixture(), X, checks=CHECKS)
    assert report.passed, report.explain()
    names = {entry.theirs: entry.ours for entry in report.entries}
    assert names["experts.2.up.weight"] == ("w_up.2",)
    assert len(names) == 2 + 3 * EXPERTS


def test_a_difference_in_the_experts_is_located():
    (cause,) = compare(Mixture(scale=0.5), TorchMixture(), X, checks=["forward"]).causes
    assert cause == "experts.0.up: flax multiplies by 0.5, torch by 1"


# The width of the tokens: the matrices are square, and the outputs tell how they lie.
@pytest.mark.parametrize("turned", [False, True])
def test_whether_square_matrices_are_transposed_is_told_by_the_outputs(turned):
    report = compare(Mixture(D, turned=turned), TorchMixture(D), X, checks=CHECKS)
    assert report.passed, report.explain()
    entries = {entry.theirs: entry for entry in report.entries}
    for name in ("experts.0.up.weight", "experts.2.down.weight"):
        assert entries[name].rule.pattern == ("" if turned else "i o -> o i")
    assert not any("w_up" in line for line in report.coverage.untested)


def test_how_square_matrices_lie_is_open_where_the_outputs_differ():
    report = compare(Mixture(D, scale=0.5), TorchMixture(D), X, checks=["forward"])
    assert not report.passed
    assert any(
        "whether w_up and experts.*.up.weight" in line and "agree with none" in line
        for line in report.coverage.untested
    )


RULES = [
    Rule(("w_up",), "experts.*.up.weight", "e i o -> e o i"),
    Rule(("b_up",), "experts.*.up.bias"),
    Rule(("w_down",), "experts.*.down.weight", "e i o -> e o i"),
    Rule(("router.kernel",), "router.weight", "i o -> o i"),
    Rule(("router.bias",), "router.bias"),
]


def test_a_layout_with_lists():
    report = compare(Mixture(), TorchMixture(), X, checks=CHECKS, layout=RULES)
    assert report.passed, report.explain()


def test_a_list_along_another_axis():
    class Last(Mixture):
        def __init__(self):
            super().__init__()
            self.w_up = nnx.Param(jnp.zeros((D, 8, EXPERTS)))

        def __call__(self, x):
            weights = jax.nn.softmax(self.router(x), -1)
            hidden = jnp.einsum("btd,dhe->bteh", x, self.w_up[...]) + self.b_up[...]
            each = jnp.einsum("bteh,ehd->bted", jnp.tanh(hidden), self.w_down[...])
            return jnp.einsum("bted,bte->btd", each, weights)

    first = Rule(("w_up",), "experts.*.up.weight", "i o e -> e o i")
    report = compare(Last(), TorchMixture(), X, checks=CHECKS, layout=[first, *RULES[1:]])
    assert report.passed, report.explain()


@pytest.mark.parametrize(
    "rule",
    [
        Rule(("w_up", "w_gate"), "up.*.weight", "e i o -> e o i"),
        Rule(("w_up",), "up.*.weight", "e i o -> e o i", grouped=True),
        Rule(("w_up",), "up.*.weight", "(e i) o -> e i o"),
        Rule(("w_up",), "up.*.weight", "... e -> e ..."),
    ],
    ids=["joined along the list", "grouped", "part of an axis", "behind an ellipsis"],
)
def test_a_piece_that_is_no_index_of_ours_is_refused(rule):
    shape = (2, 3, 4)
    entry = Entry(rule, rule.ours, rule.theirs, (shape,) * len(rule.ours), {})
    with pytest.raises(ConversionError, match=r"each piece of up\.\*\.weight is compared with one"):
        entry.apart()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("pattern", "axis"), [("e i o -> e o i", 1), ("i e o -> e i o", 2)])
def test_pieces_of_joined_parameters_are_those_of_the_whole(pattern, axis, interleaved):
    names = ("w_gate", "w_up")
    rule = Rule(names, "gate_up.*.weight", pattern, axis=axis, interleaved=interleaved)
    entry = Entry(rule, names, rule.theirs, ((2, 3, 4),) * 2, {})
    numbers = np.arange(48).reshape(2, 2, 3, 4)
    arrays = dict(zip(names, numbers, strict=True))
    wanted = entry.pieces(entry.join(arrays))
    pieces = {}
    for name, array in arrays.items():
        cut = np.moveaxis(array, entry.list_axis, 0)
        pieces |= {f"{name}.{i}": piece for i, piece in enumerate(cut)}
    found = {piece.theirs: piece.join(pieces) for piece in entry.apart()}
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def test_lists_are_exported_and_repeated(tmp_path):
    options = {"checks": ["forward", "gradients"]}
    live = compare(Mixture(), TorchMixture(), X, record=True, **options)
    found = Recording(live.export(tmp_path))
    repeated = compare(Mixture(), found, found.inputs, **options)
    assert repeated.passed, repeated.explain()
    assert [check.error for check in repeated.checks] == [check.error for check in live.checks]


class BatchNorms(nnx.Module):
    """Norms with running statistics as arrays of a user's own, along a first axis."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones((2, D)))
        self.shift = nnx.Param(jnp.zeros((2, D)))
        self.mean = nnx.BatchStat(jnp.zeros((2, D)))
        self.var = nnx.BatchStat(jnp.ones((2, D)))

    def __call__(self, x):
        for i in range(2):
            x = (x - self.mean[i]) / jnp.sqrt(self.var[i] + 1e-5) * self.scale[i] + self.shift[i]
        return x


def test_running_statistics_in_pieces():
    rules = [
        Rule(("scale",), "*.weight"),
        Rule(("shift",), "*.bias"),
        Rule(("mean",), "*.running_mean"),
        Rule(("var",), "*.running_var"),
    ]
    layout = Layout(tuple(rules), r".*num_batches_tracked")
    theirs = nn.Sequential(nn.BatchNorm1d(D), nn.BatchNorm1d(D)).eval()
    report = compare(BatchNorms(), theirs, [(4, D)], checks=["forward", "gradients"], layout=layout)
    assert report.passed, report.explain()
