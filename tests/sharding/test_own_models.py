"""Models of the user's own on a mesh: Flax's names of axes, a default, a table, and a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from flax_attn import MultiHeadAttention
from flax_attn.sharding import shard, sharding_table, shardings
from flax_attn.sharding.parameters import create


class Tagger(nnx.Module):
    """Flax's own layers around an attention of this library."""

    def __init__(self, rngs, names=None):
        if names is None:
            init = nnx.initializers.lecun_normal()
        else:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.embed = nnx.Embed(24, 16, rngs=rngs)
        self.att = MultiHeadAttention(16, 16, 8, dropout=0.0, num_heads=8, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 40, kernel_init=init, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.norm(self.att(self.embed(ids))))


IDS = np.arange(8 * 6).reshape(8, 6) % 24


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def spec_of(module, mesh, *path):
    found = nnx.to_flat_state(shardings(module, mesh))
    return dict(found)[path].get_value().spec


def test_layers_that_name_no_axis_are_split_along_their_largest(mesh_like):
    mesh = mesh_like(fsdp=8)
    model = Tagger(nnx.Rngs(0))
    alone = model(IDS)
    shard(model, mesh)
    assert model.embed.embedding.sharding.spec == P("fsdp", None)  # 24 x 16
    assert model.head.kernel.sharding.spec == P(None, "fsdp")  # 16 x 40
    assert model.norm.scale.sharding.spec == P()
    with jax.set_mesh(mesh):
        together = nnx.jit(lambda model, ids: model(ids))(model, IDS)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)


def test_an_axis_that_does_not_divide_is_passed_over():
    mesh = abstract_mesh(fsdp=8)
    layer = nnx.Linear(16, 41, rngs=nnx.Rngs(0))
    assert spec_of(layer, mesh, "kernel") == P("fsdp", None)
    convolution = nnx.Conv(3, 5, (7, 7), rngs=nnx.Rngs(0))
    assert spec_of(convolution, mesh, "kernel") == P()


def test_an_explicit_axis_splits_only_what_names_it():
    explicit = AbstractMesh((8,), ("fsdp",), (AxisType.Explicit,))
    assert spec_of(nnx.Linear(16, 40, rngs=nnx.Rngs(0)), explicit, "kernel") == P()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("fsdp", "tensor"), P("fsdp", "tensor")),
        (P("tensor"), P("tensor", None)),
        ((("fsdp", "tensor"), None), P(("fsdp", "tensor"), None)),
        ((None, "heads"), P(None, "tensor")),
    ],
)
def test_flaxs_metadata_names_axes_of_the_mesh_and_of_the_table(names, expected, mesh_like):
    mesh = mesh_like(fsdp=2, tensor=4)
    with nnx.use_eager_sharding(False):
        model = Tagger(nnx.Rngs(0), names)
    shard(model, mesh)
    assert model.head.kernel.sharding.spec == expected


def test_flaxs_rules_say_what_a_logical_name_means():
    mesh = abstract_mesh(fsdp=2, tensor=4)
    with nnx.use_eager_sharding(False):
        model = Tagger(nnx.Rngs(0), ("width", "classes"))
    with nnx.logical_axis_rules([("width", "fsdp"), ("classes", "tensor")]):
        assert spec_of(model, mesh, "head", "kernel") == P("fsdp", "tensor")
    own = nnx.Param(
        jnp.ones((16, 40)),
        out_sharding=("width", None),
        sharding_rules=(("width", "tensor"),),
        eager_sharding=False,
    )
    assert spec_of(nnx.Dict(kernel=own), mesh, "kernel") == P("tensor", None)


def test_a_mesh_of_the_users_own_names_serves_parameters_that_name_them():
    mesh = abstract_mesh(rows=2, columns=4)
    with nnx.use_eager_sharding(False):
        model = Tagger(nnx.Rngs(0), ("rows", "columns"))
    assert spec_of(model, mesh, "head", "kernel") == P("rows", "columns")
    with pytest.raises(ValueError, match=r"a mesh must have an axis of the table.*rows, columns"):
        shardings(Tagger(nnx.Rngs(0)), mesh)


def test_an_unknown_name_is_refused():
    with nnx.use_eager_sharding(False):
        model = Tagger(nnx.Rngs(0), ("tensr", None))
    rule = r"must be an axis of the mesh, fsdp, tensor, or a line of the table, .*got 'tensr'.*"
    with pytest.raises(ValueError, match=rule + "logical_axis_rules"):
        shard(model, abstract_mesh(fsdp=2, tensor=4))


def test_an_optimizer_lies_as_the_parameters_that_name_no_axis(mesh_like):
    mesh = mesh_like(fsdp=8)
    model = shard(nnx.Linear(16, 40, rngs=nnx.Rngs(0)), mesh)

    def build(model):
        return nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    optimizer = create(build, mesh, model)
    assert optimizer.opt_state[0].mu["kernel"].sharding == model.kernel.sharding
    assert model.kernel.sharding.spec == P(None, "fsdp")


def test_large_parameters_that_stay_whole_are_named(mesh_like):
    mesh = mesh_like(tensor=8)
    rule = (
        r"2 parameters without axis names, .* stay whole on each of the 8 devices: "
        r"embed.embedding \(24, 16\), head.kernel \(16, 40\)\. Name their axes where they are made,"
        r' kernel_init=nnx.with_partitioning\(init, \("embed", "hidden"\), eager_sharding=False\)'
    )
    with pytest.warns(UserWarning, match=rule):
        shard(Tagger(nnx.Rngs(0)), mesh)
    with pytest.warns(UserWarning, match=rule):
        create(lambda: Tagger(nnx.Rngs(0)), mesh)


def test_names_of_the_table_are_taken_in_the_way_that_the_warning_shows(mesh_like):
    mesh = mesh_like(fsdp=2, tensor=4)
    init = nnx.initializers.lecun_normal()
    named = nnx.with_partitioning(init, ("embed", "hidden"), eager_sharding=False)
    with jax.set_mesh(mesh):
        layer = shard(nnx.Linear(16, 40, kernel_init=named, rngs=nnx.Rngs(0)), mesh)
        assert layer.kernel.sharding.spec == P("fsdp", "tensor")
        # What the last argument is for: without it Flax takes these for axes of the mesh.
        eager = nnx.with_partitioning(init, ("embed", "hidden"))
        with pytest.raises(ValueError, match="embed"):
            nnx.Linear(16, 40, kernel_init=eager, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 8}, {"tensor": 1}])
def test_a_mesh_that_splits_no_parameter_or_each_is_quiet(sizes, mesh_like):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(Tagger(nnx.Rngs(0)), mesh_like(**sizes))


def test_the_table_says_how_each_parameter_is_split():
    found = sharding_table(Tagger(nnx.Rngs(0)), abstract_mesh(fsdp=2, tensor=4))
    rows = {one.path: one for one in found.placements}
    assert rows["att.W_query.kernel"].names == ("embed", "heads")
    assert rows["att.W_query.kernel"].spec == P("fsdp", "tensor")
    assert rows["head.kernel"].names is None
    assert rows["head.kernel"].share * 2 == rows["head.kernel"].size == 16 * 40 * 4
    assert found.size == sum(x.size * 4 for x in jax.tree.leaves(nnx.state(Tagger(nnx.Rngs(0)))))
    assert found.share == sum(one.share for one in rows.values())
    text = str(found)
    assert text.startswith("8.3 KiB over 8 devices (fsdp=2, tensor=4): 2.8 KiB on each")
    assert "norm.scale" in text
    assert text.count("whole") == sum(one.whole for one in rows.values())


class Unnamed(nnx.Module):
    """A layer whose product XLA divides in another way than `shard` does, if nothing holds it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(16, 64, kernel_init=nnx.initializers.lecun_normal(), rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("kept", [False, True])
def test_a_step_of_your_own_that_ends_with_shard_keeps_its_places(mesh_like, kept):
    mesh = mesh_like(fsdp=2, tensor=4)
    # Named nowhere but here, so that XLA divides the biases and what follows from them.
    split = jax.NamedSharding(mesh, P("fsdp", "tensor"))

    @nnx.jit
    def step(model, x):
        def loss(model):
            hidden = jax.lax.with_sharding_constraint(model.up(x), split)
            return (model.down(hidden) ** 2).sum()

        gradients = nnx.grad(loss)(model)
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x, g: x - 0.1 * g, state, gradients))
        if kept:
            shard(model, mesh)

    with jax.set_mesh(mesh):
        model = shard(Unnamed(), mesh)
        before = jax.tree.map(lambda x: x.sharding, nnx.state(model))
        step(model, jnp.ones((8, 16)))
        after = nnx.state(model)
    same = jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to, x.ndim), after, before)
    assert all(jax.tree.leaves(same)) == kept
