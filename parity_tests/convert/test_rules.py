"""The engine: names with placeholders, sizes read off shapes, one entry for one rule."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.convert import ConversionError
from flax_attn.convert.entry import Entry
from flax_attn.convert.planning import plan
from flax_attn.convert.rules import Layout, Rule

RANDOM = np.random.default_rng(0)
WIDTHS = {"query": 2, "key": 2, "value": 6}


def names(shapes, *rules):
    return {entry.ours: entry.theirs for entry in plan(shapes, Layout(rules))}


def test_a_placeholder_is_one_part_of_a_name_and_is_carried_over():
    rule = Rule(
        ("blocks.{i}.att.W_query.kernel",),
        "encoder.layer.{i}.attention.self.query.weight",
        "i o -> o i",
    )
    shapes = {
        f"{place}.att.W_query.kernel": (3, 2)
        for place in ("blocks.0", "blocks.11", "model.blocks.2")
    }
    assert names(shapes, rule) == {
        ("blocks.0.att.W_query.kernel",): "encoder.layer.0.attention.self.query.weight",
        ("blocks.11.att.W_query.kernel",): "encoder.layer.11.attention.self.query.weight",
        ("model.blocks.2.att.W_query.kernel",): "model.encoder.layer.2.attention.self.query.weight",
    }


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.1.kernel",
        "blocks.kernel",
        "blocks..kernel",
        "myblocks.0.kernel",
        "blocks.0.kernels",
    ],
)
def test_a_placeholder_is_no_more_and_no_less_than_one_part(name):
    with pytest.raises(ConversionError, match=rf"no place for {name} \(3,\)"):
        names({name: (3,)}, Rule(("blocks.{i}.kernel",), "{i}.weight"))


def test_placeholders_may_change_places():
    rule = Rule(("{side}.{i}.a", "{side}.{i}.b"), "{i}.{side}")
    shapes = {f"x.left.{i}.{part}": (3,) for i in (0, 1) for part in "ab"}
    assert names(shapes, rule) == {
        ("x.left.0.a", "x.left.0.b"): "x.0.left",
        ("x.left.1.a", "x.left.1.b"): "x.1.left",
    }


def test_the_parts_of_an_entry_come_from_one_place():
    with pytest.raises(ConversionError, match=r"no place for 0.a \(3,\), 1.b \(3,\)"):
        names({"0.a": (3,), "1.b": (3,)}, Rule(("{i}.a", "{i}.b"), "{i}.c"))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("layers.{i}.kernel",), "weight"),
        (("kernel",), "{i}.weight"),
        (("{i}.a", "{j}.b"), "{i}.c"),
        (("{i}.{i}",), "{i}"),
        (("{i}",), "{i}.{i}"),
    ],
)
def test_a_rule_that_cannot_be_read_both_ways(ours, theirs):
    with pytest.raises(ConversionError, match=r"has the same placeholders, each once; got .* and "):
        Rule(ours, theirs)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_rule_has_a_tuple_of_names_and_a_pattern_of_two_sides():
    with pytest.raises(
        ConversionError, match=r"a tuple of names .*; got 'kernel'\. Pass \('kernel',"
    ):
        Rule("kernel", "weight", "i o -> o i")
    rule = r"two sides, as in 'i o -> o i'; got 'i o - o i' for weight\. Pass '' to leave"
    with pytest.raises(ConversionError, match=rule):
        Rule(("kernel",), "weight", "i o - o i")


def test_two_parameters_of_one_entry_are_refused():
    rules = (Rule(("a",), "c"), Rule(("b",), "c"), Rule(("d", "e"), "f"))
    with pytest.raises(
        ConversionError, match=r"makes c of a, and of b; x.c of x.a, and of x.b. Rename one"
    ):
        names({"a": (3,), "b": (3,), "d": (2,), "e": (2,), "x.a": (3,), "x.b": (3,)}, *rules)


@pytest.mark.parametrize(
    ("pattern", "ours", "theirs"),
    [
        ("i n h -> (n h) i", (5, 3, 2), (6, 5)),
        ("n h o -> o (n h)", (3, 2, 5), (5, 6)),
        ("n h -> (n h)", (3, 2), (6,)),
        ("... i o -> o i ...", (7, 5, 3), (3, 5, 7)),
        ("... i o -> o i ...", (5, 3), (3, 5)),
        ("n ... h -> ... (n h)", (3, 7, 5, 2), (7, 5, 6)),
        ("i n h -> i 1 (h n)", (5, 3, 2), (5, 1, 6)),
    ],
)
def test_sizes_are_read_off_the_shape(pattern, ours, theirs):
    (entry,) = plan({"a.w": ours}, Layout((Rule(("w",), "v", pattern),)))
    array = RANDOM.normal(size=ours)
    assert entry.shape == entry.join({"a.w": array}).shape == theirs
    assert (entry.split(entry.join({"a.w": array}))["a.w"] == array).all()


@pytest.mark.parametrize(
    ("pattern", "shape", "flipped", "expected"),
    [
        ("s0 i o -> i o s0", (4, 3, 5), ("s0",), lambda x: x[::-1].transpose(1, 2, 0)),
        ("a b i -> i (a b)", (2, 4, 3), ("a", "b"), lambda x: x[::-1, ::-1].reshape(8, 3).T),
        ("... a b -> b ... a", (2, 4, 3), ("a",), lambda x: x[:, ::-1].transpose(2, 0, 1)),
        (
            "a ... b -> b ... a",
            (2, 4, 3),
            ("a", "b"),
            lambda x: x[::-1, :, ::-1].transpose(2, 1, 0),
        ),
    ],
)
def test_an_axis_may_be_flipped(pattern, shape, flipped, expected):
    rule = Rule(("w",), "v", pattern, flipped=flipped)
    (entry,) = plan({"a.w": shape}, Layout((rule,)))
    array = RANDOM.normal(size=shape)
    joined = entry.join({"a.w": array})
    assert (joined == expected(array)).all()
    assert (entry.split(joined)["a.w"] == array).all()


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("pattern", "flipped"), [("", ("i",)), ("i o -> o i", ("p",)), ("i o -> o i", "i")]
)
def test_flipped_axes_are_those_of_the_pattern(pattern, flipped):
    message = f"a tuple of axes on the left side of the pattern; got {flipped!r} for {pattern!r}"
    with pytest.raises(ConversionError, match=re.escape(message)):
        Rule(("w",), "v", pattern, flipped=flipped)


def test_each_part_has_its_own_sizes():
    rule = Rule(("q", "k"), "qk", "i n h -> (n h) i")
    shapes = {"q": (5, 4, 2), "k": (5, 3, 2)}  # grouped queries
    (entry,) = plan(shapes, Layout((rule,)))
    arrays = {name: RANDOM.normal(size=shape) for name, shape in shapes.items()}
    joined = entry.join(arrays)
    assert joined.shape == (14, 5)
    assert (joined[8 + 2 * 2 + 1] == arrays["k"][:, 2, 1]).all()
    assert all((array == arrays[name]).all() for name, array in entry.split(joined).items())


def test_sizes_of_the_nearest_module_count():
    rule = Rule(("{block}.att.kernel",), "{block}.kernel", "i (n h) -> i n h")
    sizes = {"": {"h": 6}, "far.att.": {"h": 3}, "far.att.kernel.": {"h": 1}}
    entries = plan(
        {"far.att.kernel": (5, 6), "near.att.kernel": (5, 6)},
        Layout((rule,)),
        lambda at: sizes.get(at, {}),
    )
    assert {entry.theirs: entry.shape for entry in entries} == {
        "far.kernel": (5, 2, 3),
        "near.kernel": (5, 1, 6),
    }


def test_a_shape_counts_more_than_a_size_that_is_given():
    (entry,) = plan(
        {"w": (5, 3, 2)},
        Layout((Rule(("w",), "v", "i n h -> (n h) i"),)),
        lambda at: {"h": 9, "z": 4},
    )
    assert entry.shape == (6, 5)


def test_parts_that_do_not_fit_together_go_to_the_next_rule():
    rules = (Rule(("a", "b"), "ab"), Rule(("{name}",), "{name}"))
    assert names({"a": (2, 5), "b": (3, 5)}, *rules) == {("a", "b"): "ab"}
    assert names({"a": (2, 5), "b": (3, 4)}, *rules) == {("a",): "a", ("b",): "b"}


def test_joined_and_split_arrays_are_their_own():
    entry = Entry(Rule(("a",), "b"), ("a",), "b", ((3,),), {})
    array = np.ones(3)
    entry.join({"a": array})[...] = 5
    entry.split(array)["a"][...] = 7
    assert (array == 1).all()


class Scaled(nnx.Module):
    """A scalar beside a tower of layers."""

    def __init__(self):
        self.temperature = nnx.Param(jnp.array(2.5))
        self.tower = nnx.List(
            [flax_attn.SelfAttention(4, 6, d_key=2, rngs=nnx.Rngs(i)) for i in range(2)]
        )


def test_rules_alone_are_a_layout_of_a_whole_model(tmp_path):
    rules = (
        Rule(("tower.{i}.W_{name}.kernel",), "h.{i}.{name}.weight", "i o -> o i"),
        Rule(("temperature",), "tau"),
    )
    module, other = Scaled(), Scaled()
    module.temperature[...] = jnp.array(3.5)
    stored = convert.state_dict(module, rules)
    shapes = {f"h.{i}.{name}.weight": (width, 4) for i in (0, 1) for name, width in WIDTHS.items()}
    assert {name: array.shape for name, array in stored.items()} == {**shapes, "tau": ()}
    assert (stored["h.1.key.weight"] == np.asarray(module.tower[1].W_key.kernel[...]).T).all()
    convert.save(module, tmp_path / "w.safetensors", list(rules))
    convert.load(other, tmp_path / "w.safetensors", Layout(rules))
    assert other.temperature[...] == 3.5
    assert all(
        (array == stored[name]).all() for name, array in convert.state_dict(other, rules).items()
    )


def test_rules_that_leave_a_parameter_out():
    with pytest.raises(ConversionError, match=r"no place for temperature \(\)"):
        convert.state_dict(Scaled(), [Rule(("tower.{i}.W_{name}.kernel",), "h.{i}.{name}")])


@pytest.mark.parametrize("layout", [3, None, ["torch"], "torch_rf"])
def test_what_is_no_layout(layout, no_shape_checks):
    with pytest.raises(ConversionError, match=r"a Layout or a sequence of Rules; got"):
        convert.as_layout(layout)


def test_a_layout_by_name_by_rules_and_itself():
    table = convert.LAYOUTS["torch"]
    assert convert.as_layout("torch") is convert.as_layout(table) is table
    assert convert.as_layout(list(table.rules)).rules == table.rules


STACKED = Rule(("experts.up.kernel",), "mlp.experts.*.up.weight", "e i o -> e o i")
IN_TURN = Rule(("experts.{name}.a", "experts.{name}.b"), "{name}", axis=1, interleaved=True)


def test_an_entry_is_stored_in_pieces_and_read_again():
    kernel = RANDOM.normal(size=(3, 2, 5))
    stored = convert.to_layout({"experts.up.kernel": kernel}, [STACKED])
    assert list(stored) == [f"mlp.experts.{i}.up.weight" for i in range(3)]
    assert all((stored[f"mlp.experts.{i}.up.weight"] == kernel[i].T).all() for i in range(3))
    again = convert.from_layout(stored, [STACKED], {"experts.up.kernel": kernel})
    assert (again["experts.up.kernel"] == kernel).all()


FUSED = Rule(("qkv.kernel",), "*.weight", "i o -> o i", names=("q", "k", "v"), shares=(4, 1, 1))


@pytest.mark.parametrize("groups", [1, 2])
def test_one_parameter_is_stored_under_several_names(groups):
    kernel = RANDOM.normal(size=(3, 12))
    rule = replace(FUSED, groups=groups)
    stored = convert.to_layout({"qkv.kernel": kernel}, [rule])
    # In each group four shares of the query, one of the key and one of the value.
    columns = np.arange(12).reshape(groups, 6, -1)
    parts = columns[:, :4], columns[:, 4:5], columns[:, 5:]
    wanted = [kernel[:, part.ravel()] for part in parts]
    for name, array in zip(("q", "k", "v"), wanted, strict=True):
        np.testing.assert_array_equal(stored[f"{name}.weight"], array.T)
    again = convert.from_layout(stored, [rule], {"qkv.kernel": kernel})
    np.testing.assert_array_equal(again["qkv.kernel"], kernel)


def test_shares_that_do_not_divide_an_axis():
    reason = (
        r"qkv\.kernel is cut along an axis of 8, which is no multiple of 6: the shares \(4, 1, 1\)"
        r" in 1 groups\. Give the shares of q, k, v in the rule"
    )
    with pytest.raises(ConversionError, match=reason):
        convert.to_layout({"qkv.kernel": np.zeros((3, 8))}, [FUSED])


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"names": ()}, r"got shares \(4, 1, 1\) without names\. Pass names"),
        ({"names": "qkv"}, r"names are a tuple, .*; got 'qkv' for \*\.weight"),
        ({"theirs": "qkv.weight"}, r"the one \* in the name of the entry; got .* for qkv\.weight"),
        ({"ours": ("a", "b")}, r"got a, b and names \('q', 'k', 'v'\)\. Write a rule for each"),
        ({"shares": (4, 1)}, r"each name has a share; got names .* and shares \(4, 1\)"),
        ({"groups": 0}, r"an axis has at least one group; got groups=0 for \*\.weight"),
    ],
)
def test_names_that_do_not_fit_the_rule(changed, reason):
    with pytest.raises(ConversionError, match=reason):
        replace(FUSED, **changed)


def test_a_name_of_a_piece_is_made_once():
    rules = [FUSED, Rule(("q.kernel",), "q.weight", "i o -> o i")]
    shapes = {"qkv.kernel": (3, 12), "q.kernel": (3, 8)}
    with pytest.raises(ConversionError, match=r"makes q\.weight of qkv\.kernel, and of q\.kernel"):
        plan(shapes, Layout(tuple(rules)))


def test_a_piece_that_is_missing_is_named():
    kernel = np.zeros((3, 2, 5))
    stored = convert.to_layout({"experts.up.kernel": kernel}, [STACKED])
    stored["mlp.experts.3.up.weight"] = stored.pop("mlp.experts.1.up.weight")
    with pytest.raises(ConversionError) as caught:
        convert.from_layout(stored, [STACKED], {"experts.up.kernel": kernel})
    assert "missing mlp.experts.1.up.weight (5, 2)" in str(caught.value)
    assert "unexpected mlp.experts.3.up.weight (5, 2)" in str(caught.value)


def test_parts_take_turns_along_an_axis():
    parts = {
        "experts.up.a": RANDOM.normal(size=(3, 2, 4)),
        "experts.up.b": RANDOM.normal(size=(3, 2, 4)),
    }
    joined = convert.to_layout(parts, [IN_TURN])["up"]
    assert joined.shape == (3, 4, 4)
    assert (joined[:, ::2] == parts["experts.up.a"]).all()
    assert (joined[:, 1::2] == parts["experts.up.b"]).all()
    again = convert.from_layout({"up": joined}, [IN_TURN], parts)
    assert all((again[name] == parts[name]).all() for name in parts)


def test_grouped_parts_stand_together_in_each_group():
    rule = Rule(("query", "gate"), "q_proj", "i (n h) -> n h i", axis=1, grouped=True)
    query, gate = RANDOM.normal(size=(2, 3, 8))  # 4 heads, 2 wide
    stored = convert.to_layout(
        {"query": query, "gate": gate}, [rule], axes=lambda prefix: {"h": 2}
    )["q_proj"]
    expected = np.concatenate(
        [np.concatenate([x[:, i : i + 2] for x in (query, gate)], 1) for i in (0, 2, 4, 6)], 1
    )
    np.testing.assert_array_equal(stored, expected.T)
    back = convert.from_layout(
        {"q_proj": stored}, [rule], {"query": query, "gate": gate}, axes=lambda prefix: {"h": 2}
    )
    np.testing.assert_array_equal([back["query"], back["gate"]], [query, gate])


def test_groups_need_not_be_equally_wide_in_all_parts():
    rule = Rule(("a", "b"), "both", "(k f) -> k f", axis=1, grouped=True)
    arrays = {"a": np.arange(2), "b": np.arange(10, 16)}
    stored = convert.to_layout(arrays, [rule], axes=lambda prefix: {"k": 2})["both"]
    assert stored.tolist() == [0, 10, 11, 12, 1, 13, 14, 15]
    back = convert.from_layout({"both": stored}, [rule], arrays, axes=lambda prefix: {"k": 2})
    assert {name: part.tolist() for name, part in back.items()} == {
        "a": [0, 1],
        "b": [10, 11, 12, 13, 14, 15],
    }


def test_a_rule_applies_beside_another_parameter_alone():
    shapes = {"0.out": (3,), "1.out": (3,), "1.A_log": (3,)}
    rules = (
        Rule(("{i}.out",), "{i}.linear", beside="{i}.A_log"),
        Rule(("{i}.out",), "{i}.full"),
        Rule(("{n}",), "{n}"),
    )
    found = names(shapes, *rules)
    assert (found[("0.out",)], found[("1.out",)]) == ("0.full", "1.linear")


def test_what_stands_beside_has_the_same_placeholders():
    with pytest.raises(ConversionError, match="if each of its names has the same placeholders"):
        Rule(("{i}.out",), "{i}.linear", beside="A_log")
