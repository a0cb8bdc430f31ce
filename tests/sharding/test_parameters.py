"""The names of the axes of parameters, and where models and optimizers lie by them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from flax_attn import GPT2, GPT2Config, Linear, Llama, LlamaConfig, MultiHeadAttention, Scores
from flax_attn.sharding import RULES, rules, sharding_table
from flax_attn.sharding.parameters import abstract, create, shard, shardings
from flax_attn.training import float32_state

GPT = GPT2Config(8, 4, 2, context_length=6, vocab_size=12, dropout=0.1)
LLAMA = LlamaConfig(
    8, 12, num_heads=4, num_layers=2, num_kv_heads=2, context_length=6, vocab_size=10
)


def params(module):
    return {
        ".".join(map(str, path)): param
        for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


def specs(tree, mesh):
    state = shardings(tree, mesh)
    return {".".join(map(str, path)): x.get_value().spec for path, x in nnx.to_flat_state(state)}


def assert_named(module):
    for path, param in params(module).items():
        names = param.out_sharding
        assert len(names) == param.ndim, path
        assert set(names) <= {None, *RULES}, path
        assert any(names) or not path.endswith(("kernel", "embedding")), path


def test_every_axis_of_a_parameter_has_a_name_of_the_table_or_none(learning):
    assert_named(learning.create())


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(("cls", "config"), [(GPT2, GPT), (Llama, LLAMA)])
def test_every_axis_of_a_model_has_a_name_of_the_table_or_none(cls, config, scan_layers):
    assert_named(cls(config, scan_layers=scan_layers, rngs=nnx.Rngs(0)))


EXPECTED = {
    "tok_emb.embedding": P("tensor", "fsdp"),
    "out_head.kernel": P("fsdp", "tensor"),
    "final_norm.scale": P(None),
    "att.W_query.kernel": P("fsdp", "tensor"),
    "att.W_key.kernel": P("fsdp", "tensor"),
    "att.W_value.kernel": P("fsdp", "tensor"),
    "att.out_proj.kernel": P("tensor", "fsdp"),
    "ff.W_gate.kernel": P("fsdp", "tensor"),
    "ff.W_up.kernel": P("fsdp", "tensor"),
    "ff.W_down.kernel": P("tensor", "fsdp"),
    "norm1.scale": P(None),
}


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_llama_lies_on_a_mesh_as_its_names_say(scan_layers):
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    found = specs(abstract(lambda: Llama(LLAMA, scan_layers=scan_layers, rngs=nnx.Rngs(0))), mesh)
    for name, spec in EXPECTED.items():
        if name in found:
            assert found[name] == spec
        elif scan_layers:
            assert found[f"trf_blocks.block.{name}"] == P(None, *spec), name
        else:
            assert [found[f"trf_blocks.{i}.{name}"] for i in range(2)] == [spec] * 2, name


def test_biases_lie_as_what_they_are_added_to():
    found = specs(GPT2(GPT, rngs=nnx.Rngs(0)), AbstractMesh((2, 2), ("fsdp", "tensor")))
    assert found["trf_blocks.0.att.W_query.bias"] == P("tensor")
    assert found["trf_blocks.0.ff.layers.0.bias"] == P("tensor")
    assert (
        found["trf_blocks.0.att.out_proj.bias"] == found["trf_blocks.0.ff.layers.2.bias"] == P(None)
    )
    assert found["pos_emb.embedding"] == P(None, "fsdp")
    assert found["drop_emb.stream.key"] == P()


def test_no_head_is_cut():
    """Of 2 heads of width 6, 4 devices could hold 3 columns each."""
    layer = MultiHeadAttention(
        5, 24, None, 0.0, 4, True, num_kv_heads=2, scores=Scores(sinks=True), rngs=nnx.Rngs(0)
    )
    found = specs(layer, AbstractMesh((4,), ("tensor",)))
    assert found["W_query.kernel"] == P(None, "tensor")
    assert found["out_proj.kernel"] == P("tensor", None)
    assert found["sinks"] == P("tensor")
    assert found["W_key.kernel"] == found["W_value.kernel"] == P(None, None)
    assert found["W_key.bias"] == P(None)
    assert specs(layer, AbstractMesh((2,), ("tensor",)))["W_key.kernel"] == P(None, "tensor")


def test_the_table_in_use_decides():
    layer = Linear(6, 4, axes=("embed", "hidden"), rngs=nnx.Rngs(0))
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    with rules(embed="tensor", hidden=None):
        assert specs(layer, mesh) == {"kernel": P("tensor", None), "bias": P(None)}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_model_is_made_under_a_mesh_and_placed_or_made_where_it_lies(kind, mesh_like):
    mesh = mesh_like(kind, fsdp=2, tensor=4)
    with jax.set_mesh(mesh):
        placed = shard(GPT2(GPT, rngs=nnx.Rngs(3)), mesh)
        made = create(lambda: GPT2(GPT, rngs=nnx.Rngs(3)), mesh)
    assert params(made).keys() == params(placed).keys()
    for path, param in params(placed).items():
        assert params(made)[path].sharding == param.sharding, path
        np.testing.assert_allclose(params(made)[path][...], param[...], rtol=1e-6, err_msg=path)
    assert placed.trf_blocks[0].ff.layers[0].kernel.sharding.shard_shape((8, 32)) == (4, 8)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_an_optimizer_keeps_lies_as_the_parameters_do(scan_layers, mesh_like):
    mesh = mesh_like(fsdp=2, tensor=4)
    options = {"scan_layers": scan_layers, "param_dtype": jnp.bfloat16}
    model = create(lambda: GPT2(GPT, rngs=nnx.Rngs(3), **options), mesh)
    optimizer = create(
        lambda model: nnx.Optimizer(model, float32_state(optax.adam(0.1)), wrt=nnx.Param),
        mesh,
        model,
    )
    own = list(params(model).values())
    state = optimizer.opt_state
    for kept in (state.master, *map(variables, state.inner[0][1:])):
        assert [x.sharding for x in kept] == [x.sharding for x in own]
    for copy, param in zip(state.master, own, strict=True):
        assert copy.dtype == jnp.float32
        np.testing.assert_array_equal(copy[...], np.asarray(param[...], np.float32))


def variables(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def test_sums_over_an_axis_of_a_parameter_are_whole():
    model = Linear(256, 128, axes=("embed", "hidden"), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adafactor(0.1), wrt=nnx.Param)
    found = specs(optimizer, AbstractMesh((2, 2), ("fsdp", "tensor")))
    sums = [name for name in found if name.endswith(("v_row.kernel", "v_col.kernel"))]
    assert [found[name] for name in sums] == [P(), P()]


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("place", [shardings, shard, sharding_table])
def test_a_model_lies_on_a_mesh(place, mesh_like):
    layer, mesh = Linear(6, 4, rngs=nnx.Rngs(0)), mesh_like(fsdp=2)
    rule = r"^mesh must be Mesh or AbstractMesh; got {}\. Pass jax\.make_mesh\(\(4, 2\), "
    for wrong in (None, "fsdp"):
        with pytest.raises(ValueError, match=rule.format(type(wrong).__name__)):
            place(layer, wrong)
    rule = r"^what lies on a mesh must be \w+ or State; got {}\. Pass a module, an nnx\.Optimizer,"
    for wrong, kind in ((Linear, "the class Linear, not an instance"), (jnp.ones(3), "ArrayImpl")):
        with pytest.raises(ValueError, match=rule.format(kind)):
            place(wrong, mesh)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("axes", [3, ("data", 2)])
def test_a_line_of_the_table_has_names(axes):
    rule = rf"^a line of the table has names of mesh axes; got batch={re.escape(repr(axes))}\. Pass"
    with pytest.raises(ValueError, match=rule), rules(batch=axes):
        pass


@pytest.mark.parametrize(
    "place", [shardings, shard, lambda layer, mesh: create(lambda: layer, mesh)]
)
def test_a_mesh_without_an_axis_of_the_table_is_refused(place, mesh_like):
    layer = Linear(6, 4, axes=("embed", "hidden"), rngs=nnx.Rngs(0))
    rule = (
        r"must have an axis of the table, data, fsdp, expert, context, tensor; got the axes rows,"
        r" columns\. Name"
    )
    with pytest.raises(ValueError, match=rule):
        place(layer, mesh_like(rows=2, columns=4))
    with rules(batch="rows"):
        place(layer, mesh_like(rows=2, columns=4))
