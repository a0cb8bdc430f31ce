"""`convert.auto` pairs parameters of a user's own with those of layers, single or in a list."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from flax_attn import convert
from flax_attn.convert import ConversionError, Rule, load_state_dict, state_dict
from flax_attn.convert.match.auto import possible_pairings
from parity_tests.convert.modules import Flax, Torch

R = nnx.Rngs(0)
D, H, EXPERTS = 4, 6, 3
ZEROS = {"kernel_init": nnx.initializers.zeros, "rngs": R}


def params(**shapes):
    return Flax(**{name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})


def expert(up="up", down="down"):
    return Torch(**{up: nn.Linear(D, H), down: nn.Linear(H, D)})


def experts(**names):
    return nn.ModuleList(expert(**names) for _ in range(EXPERTS))


def stacked(up="w_up", up_bias="b_up", down="w_down", down_bias="b_down", width=H):
    return {
        up: (EXPERTS, D, width),
        up_bias: (EXPERTS, width),
        down: (EXPERTS, width, D),
        down_bias: (EXPERTS, D),
    }


def partners(ours, theirs, **options):
    rows = convert.auto(ours, theirs, **options).rows
    return {row.theirs: (*row.ours, row.pattern) for row in rows}


def lines(ours, theirs, **options):
    with pytest.raises(ConversionError) as caught:
        convert.auto(ours, theirs, **options)
    return str(caught.value).splitlines()


EXPECTED = {
    "experts.*.up.weight": ("w_up", "e i o -> e o i"),
    "experts.*.up.bias": ("b_up", ""),
    "experts.*.down.weight": ("w_down", "e i o -> e o i"),
    "experts.*.down.bias": ("b_down", ""),
}


def test_stacked_parameters_are_the_layers_of_a_list():
    assert partners(params(**stacked()), Torch(experts=experts())) == EXPECTED


def test_the_weights_of_a_list_are_loaded_and_stored():
    theirs = Torch(experts=experts())
    ours = params(**stacked())
    pairing = convert.auto(ours, theirs)
    load_state_dict(ours, theirs.state_dict(), pairing)
    for i, one in enumerate(theirs.experts):
        np.testing.assert_array_equal(ours.w_up[i], one.up.weight.detach().numpy().T)
        np.testing.assert_array_equal(ours.b_down[i], one.down.bias.detach().numpy())
    back = state_dict(ours, pairing)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(back[name], tensor.numpy())


def test_numbers_tell_stacked_parameters_apart():
    theirs = Torch(experts=experts(up="fc1", down="fc2"))
    found = partners(params(**stacked("w1", "b1", "w2", "b2")), theirs)
    assert {name: own for name, (own, _) in found.items()} == {
        "experts.*.fc1.weight": "w1",
        "experts.*.fc1.bias": "b1",
        "experts.*.fc2.weight": "w2",
        "experts.*.fc2.bias": "b2",
    }


def test_experts_in_several_blocks():
    def block():
        return Flax(norm=nnx.LayerNorm(D, rngs=R), moe=params(**stacked()))

    def torch_block():
        return Torch(norm=nn.LayerNorm(D), moe=Torch(experts=experts()))

    # As many blocks as experts: the inner number is that of the list.
    count = EXPERTS
    ours = Flax(blocks=nnx.List([block() for _ in range(count)]))
    theirs = Torch(layers=nn.ModuleList(torch_block() for _ in range(count)))
    found = partners(ours, theirs)
    assert found["layers.1.moe.experts.*.down.weight"] == ("blocks.1.moe.w_down", "e i o -> e o i")
    assert found["layers.2.norm.weight"] == ("blocks.2.norm.scale", "")
    assert len(found) == count * 6


def test_a_list_of_ours_is_one_parameter_of_theirs():
    linear = [nnx.Linear(D, H, use_bias=False, **ZEROS) for _ in range(EXPERTS)]
    ours = Flax(experts=nnx.List([Flax(up=one) for one in linear]))
    weight = torch.randn(EXPERTS, H, D)
    theirs = Torch(experts=Torch(up=nn.Parameter(weight)))
    pairing = convert.auto(ours, theirs)
    load_state_dict(ours, theirs.state_dict(), pairing)
    for one, wanted in zip(linear, weight.numpy(), strict=True):
        np.testing.assert_array_equal(one.kernel[...], wanted.T)


def test_stacked_parameters_of_both_sides_may_lie_in_two_ways():
    ours = params(w_up=(EXPERTS, D, H))
    theirs = Torch(up=nn.Parameter(torch.zeros(EXPERTS, H, D)))
    assert partners(ours, theirs) == {"up": ("w_up", "s0 i o -> s0 o i")}


@pytest.mark.parametrize(
    ("shape", "theirs", "pattern"),
    [
        ((D, H), nn.Linear(D, H), "i o -> o i"),
        ((H, D), nn.Linear(D, H), ""),
        ((3, D, H), nn.Conv1d(D, H, 3), "s0 i o -> o i s0"),
        ((H, D), nn.Embedding(H, D), ""),
    ],
    ids=["turned", "same", "convolution", "embedding"],
)
def test_a_parameter_of_ones_own_is_the_weight_of_a_layer(shape, theirs, pattern):
    bias = {} if isinstance(theirs, nn.Embedding) else {"b_last": (H,)}
    found = partners(params(w_last=shape, **bias), Torch(last_layer=theirs))
    assert found["last_layer.weight"] == ("w_last", pattern)
    assert ("last_layer.bias" in found) == bool(bias)


NAMES = ("position.weight", "out.weight")


def test_a_square_table_of_ids_is_not_transposed():
    ours = params(position=(D, D), w_out=(D, D))
    theirs = Torch(position=nn.Embedding(D, D), out=nn.Linear(D, D, bias=False))
    assert partners(params(position=(D, D)), Torch(position=nn.Embedding(D, D))) == {
        "position.weight": ("position", "")
    }
    # Whether the matrix beside it is transposed, the outputs tell.
    rows = [row for one in possible_pairings(ours, theirs) for row in one.rows]
    found = {name: [row.pattern for row in rows if row.theirs == name] for name in NAMES}
    assert found == {"position.weight": ["", ""], "out.weight": ["i o -> o i", ""]}


# As Llama and T5 call the gate and what is gated.
@pytest.mark.parametrize("names", [("w1", "w3"), ("wi_0", "wi_1")])
def test_a_fused_gate_beside_names_without_words(names):
    ours = params(w_gate_up=(D, 2 * H))
    theirs = Torch(**{name: nn.Linear(D, H, bias=False) for name in names})
    orders = {row.rule.names for one in possible_pairings(ours, theirs) for row in one.rows}
    assert orders == {names, names[::-1]}


def test_an_order_that_names_contradict_is_left_out_of_those_that_are_tried():
    def norms(*names):
        return {name: nnx.LayerNorm(D, rngs=R) for name in names}

    ours = Flax(**norms("first_norm", "head_norm", "last_norm"))
    theirs = Torch(**{name: nn.LayerNorm(D) for name in ("norm_a", "head_norm", "norm_b")})
    found = possible_pairings(ours, theirs)
    assert found
    heads = {row.ours for one in found for row in one.rows if row.theirs == "head_norm.weight"}
    assert heads == {("head_norm.scale",)}


def test_a_size_is_no_evidence_where_names_have_no_word_in_common():
    ours = params(position=(D, H))
    theirs = Torch(fc=nn.Linear(H, D, bias=False))
    reason = "but their names have no word in common"
    assert f"  flax position (4, 6) may be torch fc.weight (4, 6), {reason}" in lines(ours, theirs)
    # The outputs may tell.
    (row,) = possible_pairings(ours, theirs)[0].rows
    assert (row.ours, row.evidence) == (("position",), "outputs")


def test_heads_that_are_an_axis_of_ones_own():
    ours = params(w_q=(D, 2, 3), w_k=(2, D, 3), w_o=(2, 3, D), b_q=(2, 3))
    theirs = Torch(
        q_proj=nn.Linear(D, H), k_proj=nn.Linear(D, H, bias=False), o_proj=nn.Linear(H, D, False)
    )
    assert partners(ours, theirs) == {
        "q_proj.weight": ("w_q", "i n h -> (n h) i"),
        "q_proj.bias": ("b_q", "n h -> (n h)"),
        "k_proj.weight": ("w_k", "n i h -> (n h) i"),
        "o_proj.weight": ("w_o", "n h o -> o (n h)"),
    }


def test_whether_a_square_matrix_is_transposed_is_not_guessed():
    theirs = Torch(first=nn.Linear(D, D, bias=False))
    ours = params(w_first=(D, D))
    found = lines(ours, theirs)
    assert found[1] == (
        "  flax w_first (4, 4) may be torch first.weight (4, 4) by i o -> o i or as it is"
    )
    patterns = [pairing.rows[0].pattern for pairing in possible_pairings(ours, theirs)]
    assert patterns == ["i o -> o i", ""]


def test_a_kernel_lies_as_those_of_flax_do():
    ours = Flax(fc=params(kernel=(D, D), scale=(D,)))
    theirs = Torch(fc=nn.Linear(D, D, bias=False), scale=nn.Parameter(torch.ones(D)))
    assert partners(ours, theirs)["fc.weight"] == ("fc.kernel", "i o -> o i")


def test_names_that_say_nothing_are_not_settled_by_order():
    theirs = Torch(experts=experts(up="foo", down="bar"))
    found = lines(params(**stacked("w_in", "b_in", "w_out", "b_out")), theirs)
    assert "  no partner for flax w_in (3, 4, 6)" in found


def test_a_scale_is_no_bias():
    found = lines(params(scale=(D,)), Torch(fc=nn.Linear(D, D)), rules=[])
    assert "  no partner for flax scale (4,)" in found


def test_layers_that_equinox_has_stacked():
    keys = jax.random.split(jax.random.key(0), EXPERTS)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(D, H, key=key))(keys)
    theirs = nn.ModuleList(nn.Linear(D, H) for _ in range(EXPERTS))
    found = partners({"layers": layers}, Torch(layers=theirs))
    assert found == {"layers.*.weight": ("layers.weight", ""), "layers.*.bias": ("layers.bias", "")}


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x):
        over = linen.scan(
            Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=EXPERTS
        )
        return over(name="layers")(x, None)[0]


class Body(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.LayerNorm(name="norm")(linen.Dense(D, name="fc")(x)), None


def test_layers_that_linen_has_scanned():
    module = Scanned()
    x = jnp.zeros((2, D), jnp.float32)
    bound = module.bind(module.init(jax.random.key(0), x))
    theirs = [Torch(norm=nn.LayerNorm(D), fc=nn.Linear(D, D)) for _ in range(EXPERTS)]
    found = partners(bound, Torch(layers=nn.ModuleList(theirs)))
    assert found == {
        "layers.*.norm.weight": ("layers.norm.scale", ""),
        "layers.*.norm.bias": ("layers.norm.bias", ""),
        "layers.*.fc.weight": ("layers.fc.kernel", "e i o -> e o i"),
        "layers.*.fc.bias": ("layers.fc.bias", ""),
    }


def test_rules_of_lists():
    rule = Rule(("w_up",), "experts.*.up.weight", "e i o -> e o i")
    assert partners(params(**stacked()), Torch(experts=experts()), rules=[rule]) == {
        **EXPECTED,
        "experts.*.up.weight": ("w_up", "e i o -> e o i"),
    }


def test_rules_of_lists_that_do_not_fit():
    rules = [Rule(("w_up",), "experts.*.up.weight"), Rule(("b_up",), "experts.*.up.foo")]
    found = lines(params(**stacked()), Torch(experts=experts()), rules=rules)
    assert found[1] == "  w_up: experts.0.up.weight is (6, 4), the rule makes (4, 6)"
    assert "  b_up: there is no parameter experts.2.up.foo" in found


def test_a_rule_that_finds_no_parameter():
    rule = Rule(("w_upp",), "experts.*.up.weight")
    # It may be one for other modules, as long as all of these have a partner.
    assert partners(params(**stacked()), Torch(experts=experts()), rules=[rule]) == EXPECTED
    found = lines(params(**stacked(), more=(2,)), Torch(experts=experts()), rules=[rule])
    assert found[1] == "  the rule for w_upp finds no parameter (nearest: w_up)"


def norm_params(*stack):
    return {"g": jnp.ones((*stack, D)), "b": jnp.zeros((*stack, D))}


def block_params(*stack):
    """A transformer block as a tree of arrays, several blocks stacked along a first axis."""

    def zeros(*shape):
        return jnp.zeros((*stack, *shape))

    projections = {name: zeros(D, 2, 2) for name in ("wq", "wk", "wv")}
    attention = {**projections, "wo": zeros(2, 2, D), "bo": zeros(D)}
    mlp = {"w1": zeros(D, H), "b1": zeros(H), "w2": zeros(H, D), "b2": zeros(D)}
    norms = {"ln1": norm_params(*stack), "ln2": norm_params(*stack)}
    return {**norms, "attn": attention, "mlp": mlp}


def torch_transformer(count):
    def block():
        inputs = {name: nn.Linear(D, D, bias=False) for name in ("q", "k", "v")}
        norms = {"norm1": nn.LayerNorm(D), "norm2": nn.LayerNorm(D)}
        return Torch(**norms, **inputs, o=nn.Linear(D, D), fc1=nn.Linear(D, H), fc2=nn.Linear(H, D))

    blocks = nn.ModuleList(block() for _ in range(count))
    embed = nn.Embedding(7, D)
    return Torch(tok=embed, layers=blocks, final=nn.LayerNorm(D), head=nn.Linear(D, 7, bias=False))


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_function_of_a_tree_of_parameters(is_stacked):
    count = 2
    blocks = block_params(count) if is_stacked else [block_params() for _ in range(count)]
    embeddings = {"wte": jnp.zeros((7, D)), "head": jnp.zeros((D, 7))}
    params = {**embeddings, "final_norm": norm_params(), "layers": blocks}
    function = jax.tree_util.Partial(lambda params, x: x, params)
    found = partners(function, torch_transformer(count))
    layer, behind = ("*", "e ") if is_stacked else ("1", "")
    own = "layers" if is_stacked else "layers.1"

    def pattern(left, right):
        return f"{behind}{left} -> {behind}{right}"

    wanted = {
        "tok.weight": ("wte", ""),
        "head.weight": ("head", "i o -> o i"),
        "final.bias": ("final_norm.b", ""),
        f"layers.{layer}.norm2.weight": (f"{own}.ln2.g", ""),
        f"layers.{layer}.k.weight": (f"{own}.attn.wk", pattern("i n h", "(n h) i")),
        f"layers.{layer}.o.weight": (f"{own}.attn.wo", pattern("n h o", "o (n h)")),
        f"layers.{layer}.o.bias": (f"{own}.attn.bo", ""),
        f"layers.{layer}.fc1.weight": (f"{own}.mlp.w1", pattern("i o", "o i")),
        f"layers.{layer}.fc2.bias": (f"{own}.mlp.b2", ""),
    }
    assert wanted.items() <= found.items()


def test_names_that_share_no_word_are_not_paired():
    ours = params(w_left=(D, H), w_right=(D, H))
    theirs = Torch(right_of=nn.Linear(D, H, bias=False), other=nn.Linear(D, H, bias=False))
    found = lines(ours, theirs)
    assert {"  no partner for flax w_left (4, 6)", "  no partner for flax w_right (4, 6)"} <= {
        *found
    }
