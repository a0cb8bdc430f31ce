"""Random pairs of modules: `convert.auto` pairs them exactly or refuses; it is never wrong."""

import string
from itertools import count

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from flax_attn import convert

R = nnx.Rngs(0)
ZEROS = {"kernel_init": nnx.initializers.zeros, "rngs": R}  # drawing them takes most of the time
LEAVES = ("linear", "square", "norm", "raw", "attention", "projections", "embed")
MEANINGLESS = ("foo", "bar", "baz", "qux", "quux")
STYLES = ("same", "numbered", "lost", "partly")


class Flax(nnx.Module):
    pass


class Torch(nn.Module):
    pass


@st.composite
def trees(draw, depth=2):
    """Return a list of kinds, each with a size or what is inside."""
    kinds = draw(
        st.lists(
            st.sampled_from(LEAVES + ("sequence", "module") * (depth > 0)), min_size=1, max_size=4
        )
    )
    return [
        (
            kind,
            draw(trees(depth - 1)) if kind in ("sequence", "module") else draw(st.integers(2, 3)),
        )
        for kind in kinds
    ]


class Twins:
    """Builds both modules of a tree at once, so that it is known which leaf is which."""

    def __init__(self, draw, styles=STYLES, wrap=True):
        self.draw, self.styles, self.wrap, self.leaves = draw, styles, wrap, []

    def module(self, tree):
        """Return modules whose attributes have names and an order of some style."""
        parts = [self.part(*item) for item in tree]
        style = self.draw(st.sampled_from(self.styles))
        own = [f"{kind}_{string.ascii_lowercase[n]}" for n, (kind, _) in enumerate(tree)]
        others = own
        if style == "numbered":
            own, others = (
                [f"layer{n}" for n in range(len(tree))],
                [f"blocks_{n + 1}" for n in range(len(tree))],
            )
        elif style in ("lost", "partly"):
            kept = [style == "partly" and self.draw(st.booleans()) for _ in tree]
            others = [
                name if keep else other
                for name, keep, other in zip(own, kept, MEANINGLESS, strict=False)
            ]
        flax, theirs = Flax(), Torch()
        for n in self.order(len(tree), style):
            setattr(flax, own[n], parts[n][0])
        for n in self.order(len(tree), style):
            setattr(theirs, others[n], self.wrapped(parts[n][1]))
        return flax, theirs

    def order(self, size, style):
        """Return the order of construction: any where names or numbers tell which is which."""
        return (
            self.draw(st.permutations(range(size)))
            if style in ("same", "numbered")
            else range(size)
        )

    def wrapped(self, part):
        if not self.wrap or not isinstance(part, nn.Module) or not self.draw(st.booleans()):
            return part
        outer = Torch()
        outer.inner = part
        return outer

    def sequence(self, tree):
        parts = [self.part(*item) for item in tree if item[0] != "raw"]
        return nnx.List([ours for ours, _ in parts]), nn.ModuleList([theirs for _, theirs in parts])

    def part(self, kind, inside):
        if kind in ("module", "sequence"):
            return getattr(self, kind)(inside)
        made = getattr(self, kind)(inside)
        self.leaves.append((kind, *made))
        return made

    def linear(self, size):
        return nnx.Linear(size, size + 1, **ZEROS), nn.Linear(size, size + 1)

    def square(self, size):
        return nnx.Linear(size, size, **ZEROS), nn.Linear(size, size)

    def norm(self, size):
        return nnx.LayerNorm(size, rngs=R), nn.LayerNorm(size)

    def embed(self, size):
        return nnx.Embed(size, size, rngs=R), nn.Embedding(size, size)

    def raw(self, size):
        return nnx.Param(jnp.zeros((1, size))), nn.Parameter(torch.zeros(size))

    def attention(self, size):
        return nnx.MultiHeadAttention(2, 2 * size, decode=False, **ZEROS), nn.MultiheadAttention(
            2 * size, 2
        )

    def projections(self, size):
        """Return square projections, theirs in any order."""
        theirs = Torch()
        for letter in self.draw(st.permutations("qkvo")):
            setattr(theirs, f"{letter}_proj", nn.Linear(2 * size, 2 * size))
        return nnx.MultiHeadAttention(2, 2 * size, decode=False, **ZEROS), theirs


def number_all(module):
    """Give every element of a PyTorch module a number of its own."""
    numbers = count(1)
    for parameter in module.parameters():
        values = [next(numbers) for _ in range(parameter.numel())]
        parameter.data = torch.tensor(values, dtype=torch.float32).view(parameter.shape)


def expected(kind, theirs):
    """Return the parameters of our leaf that belong to theirs, written out by hand."""
    if kind == "raw":
        return {"": theirs.detach().numpy()[None]}
    weights = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    if kind in ("linear", "square"):
        return {"kernel": weights["weight"].T, "bias": weights["bias"]}
    if kind == "norm":
        return {"scale": weights["weight"], "bias": weights["bias"]}
    if kind == "embed":
        return {"embedding": weights["weight"]}
    d = len(weights["out_proj.bias" if kind == "attention" else "o_proj.bias"])
    found = {}
    for n, name in enumerate(("query", "key", "value")):
        if kind == "attention":
            rows = slice(n * d, (n + 1) * d)
            weight, bias = weights["in_proj_weight"][rows], weights["in_proj_bias"][rows]
        else:
            weight, bias = weights[f"{name[0]}_proj.weight"], weights[f"{name[0]}_proj.bias"]
        found |= {f"{name}.kernel": weight.T.reshape(d, 2, -1), f"{name}.bias": bias.reshape(2, -1)}
    out = "out_proj" if kind == "attention" else "o_proj"
    return found | {
        "out.kernel": weights[f"{out}.weight"].T.reshape(2, -1, d),
        "out.bias": weights[f"{out}.bias"],
    }


def assert_exact(twins, flax, theirs, pairing):
    number_all(theirs)
    convert.load_state_dict(flax, theirs.state_dict(), pairing)
    for kind, ours, leaf in twins.leaves:
        own = {"": ours} if kind == "raw" else convert.parameters(ours)
        wanted = expected(kind, leaf)
        assert own.keys() == wanted.keys()
        for name, param in own.items():
            assert (np.asarray(param[...]) == wanted[name]).all(), (kind, name)
    stored = convert.state_dict(flax, pairing)
    assert all(
        (stored[name] == value.detach().numpy()).all() for name, value in theirs.named_parameters()
    )


EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(st.data())
def test_never_wrong(data):
    twins = Twins(data.draw)
    flax, theirs = twins.module(data.draw(trees()))
    try:
        pairing = convert.auto(flax, theirs)
    except convert.ConversionError:
        return
    assert_exact(twins, flax, theirs, pairing)


@EXAMPLES
@given(st.data(), st.sampled_from(["same", "lost"]))
def test_the_same_names_or_the_same_order_are_enough(data, style):
    twins = Twins(data.draw, (style,), wrap=False)
    flax, theirs = twins.module(data.draw(trees()))
    assert_exact(twins, flax, theirs, convert.auto(flax, theirs))


@settings(EXAMPLES, max_examples=10)
@given(st.data())
def test_what_one_side_has_alone_is_always_refused(data):
    flax, theirs = Twins(data.draw).module(data.draw(trees()))
    modules = [module for module in theirs.modules() if type(module) is Torch]
    data.draw(st.sampled_from(modules)).extra = nn.Linear(2, 2, bias=data.draw(st.booleans()))
    with pytest.raises(convert.ConversionError, match="no partner for torch"):
        convert.auto(flax, theirs)
