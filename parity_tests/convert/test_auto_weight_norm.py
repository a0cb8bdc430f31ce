"""`convert.auto` pairs what PyTorch computes weights from: by weight norm, or spectral norm."""

import re
import warnings

import jax.numpy as jnp
import pytest
from flax import nnx
from torch import nn, zeros
from torch.nn.utils import parametrizations

from flax_attn import convert
from flax_attn.convert import ConversionError
from flax_attn.convert.match.auto import possible_pairings
from parity_tests.convert.modules import Flax, Torch

R = nnx.Rngs(0)
G, V = "parametrizations.weight.original0", "parametrizations.weight.original1"


def partners(ours, theirs):
    return {row.theirs: (*row.ours, row.pattern) for row in convert.auto(ours, theirs).rows}


def own(**shapes):
    return Flax(**{name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})


def older(norm, layer):
    """Return a layer under an older function of PyTorch, which says that there is a newer one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return norm(layer)


@pytest.mark.parametrize(
    ("gain", "weight"),
    [("g", "v"), ("weight_g", "weight_v"), ("scale", "kernel"), ("g", "kernel"), ("gain", "w")],
)
def test_a_linear_layer_under_weight_norm(gain, weight):
    ours = Flax(a=own(**{weight: (3, 5), gain: (5,), "bias": (5,)}))
    expected = [("a.bias", ""), (f"a.{gain}", "s0 -> s0 1"), (f"a.{weight}", "i o -> o i")]
    newer = parametrizations.weight_norm(nn.Linear(3, 5))
    names = ["a.bias", f"a.{G}", f"a.{V}"]
    assert partners(ours, Torch(a=newer)) == dict(zip(names, expected, strict=True))
    names = ["a.bias", "a.weight_g", "a.weight_v"]
    theirs = Torch(a=older(nn.utils.weight_norm, nn.Linear(3, 5)))
    assert partners(ours, theirs) == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4)])
def test_a_gain_may_keep_axes_of_size_one(shape):
    ours = own(v=(7, 3, 4), g=shape, bias=(4,))
    found = partners(ours, parametrizations.weight_norm(nn.Conv1d(3, 4, 7)))
    assert found[V] == ("v", "s0 i o -> o i s0")
    assert found[G][0] == "g"
    # An axis of size one may be named.
    assert found[G][1] in ("s0 -> s0 1 1", "s0 i o -> o i s0")


def test_a_layer_of_flax_that_has_a_gain_beside_it():
    ours = Flax(up=nnx.Linear(3, 5, rngs=R), g=nnx.Param(jnp.zeros(5)))
    theirs = Torch(up=parametrizations.weight_norm(nn.Linear(3, 5)))
    assert partners(ours, theirs) == {
        "up.bias": ("up.bias", ""),
        f"up.{G}": ("g", "s0 -> s0 1"),
        f"up.{V}": ("up.kernel", "i o -> o i"),
    }


def test_equal_layers_under_weight_norm():
    names = ("conv1", "conv2")
    ours = Flax(**{name: own(v=(3, 4, 4), g=(1, 1, 4), bias=(4,)) for name in names})
    theirs = {name: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)) for name in names}
    found = partners(ours, Torch(**theirs))
    for name in names:
        assert found[f"{name}.{G}"] == (f"{name}.g", "s0 i o -> o i s0")
        assert found[f"{name}.{V}"] == (f"{name}.v", "s0 i o -> o i s0")


def test_whether_a_transposed_kernel_of_ones_own_is_flipped_is_not_guessed():
    theirs = Torch(up=nn.ConvTranspose1d(3, 5, 4))
    ours = Flax(up=own(kernel=(4, 3, 5), bias=(5,)))
    expected = (
        "flax up.kernel (4, 3, 5) may be torch up.weight (3, 5, 4) by s0 i o -> i o s0. Whether its"
        " kernel is flipped is not known"
    )
    with pytest.raises(ConversionError, match=re.escape(expected)):
        convert.auto(ours, theirs)
    outputs_first = Flax(up=own(kernel=(4, 5, 3), bias=(5,)))
    for module, pattern in ((ours, "s0 i o -> i o s0"), (outputs_first, "s0 o i -> i o s0")):
        rows = [row for one in possible_pairings(module, theirs) for row in one.rows]
        rules = [row.rule for row in rows if row.theirs == "up.weight"]
        assert [(rule.pattern, rule.flipped) for rule in rules] == [
            (pattern, ()),
            (pattern, ("s0",)),
        ]


def test_the_vectors_of_spectral_norm_are_running_statistics():
    statistics = {name: nnx.BatchStat(jnp.zeros(size)) for name, size in (("u", 4), ("v", 6))}
    ours = Flax(a=Flax(kernel=nnx.Param(jnp.zeros((2, 3, 4))), **statistics))
    newer = Torch(a=parametrizations.spectral_norm(nn.Conv1d(3, 4, 2, bias=False)))
    inside = "a.parametrizations.weight."
    assert partners(ours, newer) == {
        f"{inside}original": ("a.kernel", "s0 i o -> o i s0"),
        f"{inside}0._u": ("a.u", ""),
        f"{inside}0._v": ("a.v", ""),
    }
    layer = nn.Conv1d(3, 4, 2, bias=False)
    found = convert.auto(ours, Torch(a=older(nn.utils.spectral_norm, layer)))
    assert {row.theirs for row in found.rows if row.trainable} == {"a.weight_orig"}
    assert {row.theirs for row in found.rows} == {"a.weight_orig", "a.weight_u", "a.weight_v"}


def test_any_other_function_of_one_tensor():
    ours = nnx.Linear(3, 5, rngs=R)
    theirs = parametrizations.orthogonal(nn.Linear(3, 5), use_trivialization=False)
    assert partners(ours, theirs)["parametrizations.weight.original"] == ("kernel", "i o -> o i")


@pytest.mark.parametrize(("shape", "wanted"), [((), (1,)), ((1,), ()), ((1, 4), (4,))])
def test_axes_of_size_one_do_not_count(shape, wanted):
    ours = Flax(a=own(gate=shape, other=(3,)))
    theirs = Torch(a=Torch(gate=nn.Parameter(zeros(wanted)), layer=nn.Linear(3, 1, bias=False)))
    found = convert.auto(ours, theirs)
    stored = convert.state_dict(ours, layout=found)
    assert stored["a.gate"].shape == wanted


def test_a_module_of_ones_own_may_be_named_parametrizations():
    ours = Flax(parametrizations=nnx.List([nnx.Linear(3, 5, rngs=R)]))
    theirs = Torch(parametrizations=nn.ModuleList([nn.Linear(3, 5)]))
    assert partners(ours, theirs)["parametrizations.0.weight"][0] == "parametrizations.0.kernel"
