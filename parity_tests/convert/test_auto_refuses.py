"""What `convert.auto` refuses: parameters with two partners or none, and names that disagree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_attn import convert
from flax_attn.convert import ConversionError, Rule
from parity_tests.convert.modules import Flax, Torch

R = nnx.Rngs(0)
D = 6


def flax_linears(*names, d_in=D, d_out=D):
    return Flax(**{name: nnx.Linear(d_in, d_out, rngs=R) for name in names})


def torch_linears(*names, d_in=D, d_out=D):
    return Torch(**{name: nn.Linear(d_in, d_out) for name in names})


def partners(ours, theirs, **options):
    """Return which kernel is which weight."""
    rows = convert.auto(ours, theirs, **options).rows
    return {
        row.theirs.removesuffix(".weight"): row.ours
        for row in rows
        if not row.theirs.endswith("bias")
    }


def lines(ours, theirs, **options):
    with pytest.raises(ConversionError) as caught:
        convert.auto(ours, theirs, **options)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "theirs", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj"), ("v", "k", "q")]
)
@pytest.mark.parametrize(
    "ours", [("query", "key", "value"), ("W_key", "W_value", "W_query"), ("to_v", "to_k", "to_q")]
)
def test_query_key_and_value_go_by_name(ours, theirs):
    found = partners(flax_linears(*ours), torch_linears(*theirs))
    letters = {
        name: next(letter for letter in "qkv" if letter in name.removesuffix("_proj"))
        for name in theirs
    }
    words = {
        "q": ("query", "W_query", "to_q"),
        "k": ("key", "W_key", "to_k"),
        "v": ("value", "W_value", "to_v"),
    }
    for name, (kernel,) in found.items():
        assert kernel.removesuffix(".kernel") in words[letters[name]]


@pytest.mark.parametrize(
    "theirs", [("a", "b", "c"), ("q", "k", "other"), ("key1", "key2", "key3"), ("q", "k", "u")]
)
def test_query_key_and_value_never_go_by_order(theirs):
    assert lines(flax_linears("query", "key", "value"), torch_linears(*theirs))[1].startswith(
        "  ambiguous: flax query.kernel (6, 6), query.bias (6,) (Linear); key.kernel"
    )


def test_query_and_key_of_each_others_shape_are_refused():
    ours = Flax(query=nnx.Linear(4, D, rngs=R), key=nnx.Linear(5, D, rngs=R))
    theirs = Torch(q=nn.Linear(5, D), k=nn.Linear(4, D))
    assert [line.split(" are in")[0] for line in lines(ours, theirs)[1:-1]] == [
        (
            "  flax query.kernel (4, 6), query.bias (6,) (Linear) and torch k.weight (6, 4), k.bias"
            " (6,) (Linear)"
        ),
        (
            "  flax key.kernel (5, 6), key.bias (6,) (Linear) and torch q.weight (6, 5), q.bias"
            " (6,) (Linear)"
        ),
    ]


def test_a_query_is_no_key_of_the_same_shape():
    ours = Flax(query=nnx.Linear(4, D, rngs=R), value=nnx.Linear(5, D, rngs=R))
    found = lines(ours, Torch(k=nn.Linear(4, D), v=nn.Linear(5, D)))
    assert found[1].startswith(
        "  flax query.kernel (4, 6), query.bias (6,) (Linear) and torch k.weight (6, 4)"
    )


def test_names_that_contradict_the_shapes_are_refused():
    ours = Flax(up=nnx.Linear(4, D, rngs=R), down=nnx.Linear(D, 4, rngs=R))
    found = lines(ours, Torch(up=nn.Linear(D, 4), down=nn.Linear(4, D)))
    assert "flax up.kernel (4, 6), up.bias (6,) (Linear) and torch down.weight" in found[1]
    assert found[1].endswith("are in the same place, but their names differ")


def test_like_layers_in_the_same_order_go_by_order():
    assert partners(flax_linears("a", "b"), torch_linears("x", "y")) == {
        "x": ("a.kernel",),
        "y": ("b.kernel",),
    }


def test_like_layers_in_another_order_are_ambiguous():
    def parts(norm, linear, *order):
        made = {"n1": norm, "n2": norm, "l": linear}
        return {name: made[name]() for name in order}

    ours = Flax(
        **parts(lambda: nnx.LayerNorm(D, rngs=R), lambda: nnx.Linear(D, D, rngs=R), "n1", "n2", "l")
    )
    theirs = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D))
    assert partners(ours, theirs) == {
        "0": ("n1.scale",),
        "1": ("l.kernel",),
        "2": ("n2.scale",),
    }  # both are numbered
    named = Torch(before=nn.LayerNorm(D), middle=nn.Linear(D, D), after=nn.LayerNorm(D))
    assert lines(ours, named)[1:] == [
        (
            "  ambiguous: flax n1.scale (6,), n1.bias (6,) (LayerNorm); n2.scale (6,), n2.bias (6,)"
            " (LayerNorm) fit torch before.weight (6,), before.bias (6,) (LayerNorm); after.weight"
            " (6,), after.bias (6,) (LayerNorm) in more than one way"
        ),
        (
            "Name them alike, or pair them by rules: convert.auto(..., rules=[Rule(('n1.scale',),"
            " 'before.weight'), ...])"
        ),
    ]


@pytest.mark.parametrize("ours", [("second", "first"), ("in2", "in1")])
def test_order_gives_way_to_names_and_numbers(ours):
    theirs = {"second": ("first", "third"), "in2": ("a", "b")}[ours[0]]
    assert "ambiguous" in lines(flax_linears(*ours), torch_linears(*theirs))[1]


def test_names_go_before_order_though_a_module_around_them_has_a_word_of_theirs():
    # "linear" says nothing, so that `a` is a word of the module and of one of its layers.
    ours = Flax(part_a=flax_linears("linear_a", "linear"))
    theirs = Torch(part_a=Torch(inner=torch_linears("linear", "linear_a")))
    assert partners(ours, theirs) == {
        "part_a.inner.linear": ("part_a.linear.kernel",),
        "part_a.inner.linear_a": ("part_a.linear_a.kernel",),
    }


def test_numbers_against_the_order_are_ambiguous_though_one_is_in_another_module():
    theirs = Torch(block2=nn.Linear(D, D), block1=torch_linears("inner"))
    found = lines(flax_linears("layer0", "layer1"), theirs)
    assert "ambiguous" in found[1]


def test_a_sequence_of_layers_is_paired_with_layers_that_are_numbered():
    def linear():
        return nnx.Linear(D, D, rngs=R)

    ours = Flax(
        delta2=linear(),
        delta1=linear(),
        gamma1=linear(),
        gamma2=linear(),
        w_q=linear(),
        w_k=linear(),
    )

    def pair():
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    theirs = Torch(w_ks=nn.Linear(D, D), w_qs=nn.Linear(D, D), fc_gamma=pair(), fc_delta=pair())
    assert partners(ours, theirs) == {
        "w_ks": ("w_k.kernel",),
        "w_qs": ("w_q.kernel",),
        "fc_gamma.0": ("gamma1.kernel",),
        "fc_gamma.2": ("gamma2.kernel",),
        "fc_delta.0": ("delta1.kernel",),
        "fc_delta.2": ("delta2.kernel",),
    }


def test_numbers_do_not_tell_query_and_key_apart():
    ours = Flax(query1=nnx.Linear(D, D, rngs=R), query2=nnx.Linear(D, D, rngs=R))
    theirs = Torch(key=nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)))
    with pytest.raises(convert.ConversionError):
        convert.auto(ours, theirs)


def test_rules_settle_a_part():
    ours, theirs = flax_linears("query", "other", "same"), torch_linears("a", "b", "same")
    rules = [
        Rule(("query.kernel",), "a.weight", "i o -> o i"),
        Rule(("query.bias",), "a.bias"),
    ]
    assert partners(ours, theirs, rules=rules) == {
        "a": ("query.kernel",),
        "b": ("other.kernel",),
        "same": ("same.kernel",),
    }
    evidence = {row.theirs: row.evidence for row in convert.auto(ours, theirs, rules=rules).rows}
    assert evidence["a.weight"] == evidence["a.bias"] == "rule"


def test_rules_of_a_fused_projection():
    ours = Flax(att=nnx.MultiHeadAttention(2, D, decode=False, rngs=R))
    theirs = Torch(att=Torch(qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D)))
    parts = ("query", "key", "value")
    names = tuple(f"att.{name}.kernel" for name in parts)
    assert lines(ours, theirs)[1] == (
        f"  flax {' + '.join(names)} (6, 2, 3) may be torch att.qkv.weight (18, 6). In which order"
        f" is not known; one after the other: Rule({names}, 'att.qkv.weight', 'i n h -> (n h) i')"
    )
    rules = [
        Rule(tuple(f"{name}.kernel" for name in parts), "qkv.weight", "i n h -> (n h) i"),
        Rule(tuple(f"{name}.bias" for name in parts), "qkv.bias", "n h -> (n h)"),
    ]
    assert partners(ours, theirs, rules=rules) == {
        "att.qkv": tuple(f"att.{name}.kernel" for name in parts),
        "att.proj": ("att.out.kernel",),
    }


def test_rules_that_do_not_fit():
    rules = [Rule(("a.kernel",), "b.weight"), Rule(("a.bias",), "c.bias")]
    assert lines(flax_linears("a", d_in=4), torch_linears("b", d_in=4), rules=rules) == [
        "these rules do not fit the PyTorch module:",
        "  a.kernel: b.weight is (6, 4), the rule makes (4, 6)",
        "  a.bias: there is no parameter c.bias",
    ]


GATES = ". In which order yours holds the gates is not known: keep this name and shape"


def packed(name, shape):
    """Return modules of ours and of PyTorch, ours with one parameter of this name and shape."""
    ours = Flax(lstm=Flax(**{name: nnx.Param(jnp.ones(shape))}))
    return ours, Torch(lstm=nn.LSTM(2, 3, bias=False))


@pytest.mark.parametrize(
    ("name", "shape"), [("weight_ih_l0", (2, 12)), ("kernel", (12, 2)), ("bias_ih_l0", (12,))]
)
def test_what_torch_packs_is_refused_under_another_name_or_shape(name, shape):
    found = lines(*packed(name, shape))
    assert "  no partner for torch lstm.weight_ih_l0 (12, 2) (LSTM)" in "\n".join(found)


def test_the_parts_of_a_packed_projection_have_one_line():
    theirs = Torch(attn=nn.MultiheadAttention(D, 2))
    found = lines(Flax(attn=Flax(out_proj=nnx.Linear(D, D, rngs=R))), theirs)
    assert sum("in_proj_weight" in line for line in found) == 1


def test_what_has_no_partner_is_listed_all_at_once():
    ours = Flax(
        fc=nnx.Linear(4, D, rngs=R),
        norm=nnx.LayerNorm(D, rngs=R),
        gain=nnx.Param(jnp.ones(3)),
        conv=nnx.Conv(3, D, (2,), rngs=R),
        narrow=nnx.Linear(3, 2, rngs=R),
    )
    theirs = Torch(
        fc=nn.Linear(4, D, bias=False),
        norm=nn.BatchNorm1d(D),
        conv=nn.Conv1d(3, D, 2),
        narrow=nn.Linear(3, 5),
        lstm=nn.LSTM(2, 3, bias=False),
    )
    assert lines(ours, theirs) == [
        "the parameters of Flax and Torch do not pair:",
        "  no partner for flax fc.bias (6,): fc has no bias",
        "  no partner for flax gain (3,)",
        (
            "  no partner for flax norm.scale (6,), norm.bias (6,) (LayerNorm); by name norm.weight"
            " (6,), norm.bias (6,), norm.running_mean (6,), norm.running_var (6,) (BatchNorm)"
        ),
        (
            "  no partner for flax narrow.kernel (3, 2), narrow.bias (2,) (Linear); by name"
            " narrow.weight (5, 3), narrow.bias (5,) (Linear)"
        ),
        (
            "  no partner for torch norm.weight (6,), norm.bias (6,), norm.running_mean (6,),"
            " norm.running_var (6,) (BatchNorm); by name norm.scale (6,), norm.bias (6,)"
            " (LayerNorm)"
        ),
        (
            "  no partner for torch narrow.weight (5, 3), narrow.bias (5,) (Linear); by name"
            " narrow.kernel (3, 2), narrow.bias (2,) (Linear)"
        ),
        "  no partner for torch lstm.weight_ih_l0 (12, 2) (LSTM)" + GATES,
        "  no partner for torch lstm.weight_hh_l0 (12, 3) (LSTM)" + GATES,
        (
            "Name them alike, or pair them by rules: convert.auto(..., rules=[Rule(('norm.scale',),"
            " 'norm.weight'), ...])"
        ),
    ]


def test_a_norm_of_another_kind_is_refused():
    message = (
        "flax norm.scale .* and torch norm.weight .* are in the same place, but their kinds differ"
    )
    with pytest.raises(ConversionError, match=message):
        convert.auto(Flax(norm=nnx.LayerNorm(D, rngs=R)), Torch(norm=nn.GroupNorm(2, D)))


def test_the_key_biases_of_torch_are_named():
    theirs = nn.MultiheadAttention(D, 2, add_bias_kv=True)
    found = lines(nnx.MultiHeadAttention(2, D, decode=False, rngs=R), theirs)
    assert [line for line in found if "bias_" in line] == [
        "  no partner for torch bias_k (1, 1, 6)",
        "  no partner for torch bias_v (1, 1, 6)",
    ]


def test_stacked_layers_are_named():
    stacked = nnx.vmap(lambda key: nnx.Linear(4, D, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    assert "  no partner for flax kernel (3, 4, 6) (stacked Linear)" in lines(
        stacked, nn.Linear(4, D)
    )


def test_a_long_list_is_cut():
    found = lines(flax_linears(*(f"a{n}" for n in range(30)), d_in=4), torch_linears("b"))
    assert len(found) == 23
    assert found[-2] == "  and 11 more"


@pytest.mark.parametrize("theirs", [lambda x: x, np.sin, 3])
def test_pairs_are_made_with_modules(theirs):
    with pytest.raises(
        ConversionError, match=r"paired with those of an nn\.Module; got .* Give a layout or rules"
    ):
        convert.auto(flax_linears("a"), theirs)


def test_nothing_to_pair():
    assert convert.auto(jnp.sin, nn.Tanh()).rows == ()


# Tied parameters.


def test_tied_parameters_are_paired_once():
    embed = nnx.Embed(7, D, rngs=R)
    ours = Flax(embed=embed, norm=nnx.LayerNorm(D, rngs=R))
    theirs = Torch(head=nn.Linear(D, 7, bias=False), norm=nn.LayerNorm(D), embed=nn.Embedding(7, D))
    theirs.embed.weight = theirs.head.weight
    pairing = convert.auto(ours, theirs)
    assert {row.theirs: row.ours[0] for row in pairing.rows}["head.weight"] == "embed.embedding"
    convert.load_state_dict(ours, theirs.state_dict(), pairing)  # which holds it twice
    assert (np.asarray(embed.embedding[...]) == theirs.head.weight.detach().numpy()).all()


def test_a_module_that_stands_twice_is_paired_once():
    shared, other = nnx.Linear(D, D, rngs=R), nn.Linear(D, D)
    assert partners(Flax(a=shared, b=shared), Torch(x=other, y=other)) == {"x": ("a.kernel",)}


def test_parameters_tied_on_one_side_alone():
    theirs = torch_linears("a", "b")
    theirs.b.weight = theirs.a.weight
    assert any(
        "no partner for flax b.kernel (6, 6)" in line
        for line in lines(flax_linears("a", "b"), theirs)
    )


def test_a_pairing_is_a_layout(tmp_path):
    ours, other, theirs = flax_linears("a", "b"), flax_linears("a", "b"), torch_linears("x", "y")
    pairing = convert.auto(ours, theirs)
    assert convert.as_layout(pairing) is pairing
    convert.save(ours, tmp_path / "w.safetensors", pairing)
    convert.load(other, tmp_path / "w.safetensors", pairing)
    stored = convert.state_dict(other, pairing)
    assert list(stored) == ["x.bias", "x.weight", "y.bias", "y.weight"]
    assert (stored["y.weight"] == np.asarray(ours.b.kernel[...]).T).all()


def test_names_that_end_alike_are_kept_apart():
    ours = Flax(
        scale=nnx.Param(jnp.ones(D)),
        norm=nnx.RMSNorm(D, rngs=R),
        a=Flax(norm=nnx.RMSNorm(D, rngs=R)),
    )
    theirs = Torch(
        gain=nn.Parameter(torch.ones(D)), norm=nn.RMSNorm(D), a=Torch(norm=nn.RMSNorm(D))
    )
    stored = convert.state_dict(ours, convert.auto(ours, theirs))
    assert sorted(stored) == ["a.norm.weight", "gain", "norm.weight"]


def test_buffers_are_ignored():
    theirs = torch_linears("a")
    theirs.register_buffer("mask", torch.ones(3))
    ours = flax_linears("a")
    convert.load_state_dict(ours, theirs.state_dict(), convert.auto(ours, theirs))


def test_equinox_batch_norm_has_its_statistics_elsewhere():
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(D, "batch", mode="batch")
    assert any("running_mean" in line for line in lines(norm, nn.BatchNorm1d(D)))


class Tower(nnx.Module):
    """A table, two layers and a head."""

    def __init__(self, width):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 11, rngs=rngs)


def test_modules_of_other_sizes_are_told_so_in_few_lines():
    torch_tower = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(11, 6),
            "layers": torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(9)]),
            "head": torch.nn.Linear(6, 11),
        }
    )
    with pytest.raises(convert.ConversionError) as raised:
        convert.auto(Tower(8), torch_tower)
    heading, sizes, *others = str(raised.value).splitlines()
    assert heading.endswith("do not pair:")
    assert sizes == (
        "  only flax has the sizes 8, and only torch 6: build both modules in the same sizes"
    )
    assert len(others) == 7
