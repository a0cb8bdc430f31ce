"""Arrays that are the causal mask whatever the inputs are, and those that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn import everywhere
from flax_attn.everywhere import mask_programs
from flax_attn.everywhere.known_masks import with_known
from flax_attn.functional.mask_parts import Causal, Dense
from flax_attn.functional.masks import Mask

T = 5
CAUSAL = np.tril(np.ones((T, T), bool))
PADDING = np.array([1, 1, 1, 1, 0], bool)


def kinds(mask, t=T, s=T):
    """Return the kinds of the parts that a mask becomes."""
    return [type(part) for part in with_known(Mask.dense(mask), t, s).parts]


def placed(mask):
    """Say where a mask lies, if there is a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not isinstance(mask, jax.core.Tracer):
        return mask
    nowhere = jax.sharding.PartitionSpec()
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        return jax.reshard(mask, nowhere)
    return jax.lax.with_sharding_constraint(mask, nowhere)


MAKERS = {
    "nnx": lambda x: nnx.make_causal_mask(x) != 0,
    "linen": lambda x: linen.make_causal_mask(x).astype(bool),
    "tril": lambda x: jnp.tril(jnp.ones((T, T), bool)),
    "index": lambda x: jnp.arange(T)[:, None] >= jnp.arange(T),
    "constant": lambda x: jnp.asarray(CAUSAL)[None],
    "scores": lambda x: jnp.where(jnp.asarray(CAUSAL), 0.0, -1e9) == 0,
    "placed": lambda x: placed(jnp.tril(jnp.ones((T, T), bool))),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_a_causal_array_is_known(make, transform):
    found = []

    def run(x):
        found.append(kinds(make(x)))
        return x

    x = jnp.ones((3, 2, T) if transform is jax.vmap else (2, T))
    transform(run)(x)
    assert found == [[Causal]]


def test_it_is_known_inside_a_scan_that_closes_over_it():
    found = []

    def body(x, _):
        found.append(kinds(mask))
        return x, None

    @jax.jit
    def run(x):
        nonlocal mask
        mask = jnp.tril(jnp.ones((T, T), bool))
        return jax.lax.scan(body, x, None, 2)[0]

    mask = None
    run(jnp.ones(()))
    assert set(map(tuple, found)) == {(Causal,)}


@pytest.mark.parametrize(
    "other",
    [
        np.triu(np.ones((T, T), bool)),
        np.ones((T, T), bool),
        np.tril(np.ones((T, T), bool), -1),
        np.where(np.arange(T * T).reshape(T, T) == 5, False, CAUSAL),
    ],
)
def test_another_constant_stays_an_array(other):
    assert kinds(other) == [Dense]
    found = []
    jax.jit(lambda x: found.append(kinds(jnp.asarray(other))) or x)(1.0)
    assert found == [[Dense]]


def test_an_array_that_depends_on_inputs_stays_one():
    found = []
    jax.jit(lambda mask: found.append(kinds(mask)) or mask)(CAUSAL)
    jax.jit(lambda x: found.append(kinds(jnp.tril(jnp.ones((T, T)) * x) != 0)) or x)(1.0)
    assert found == [[Dense], [Dense]]


def test_rows_that_count_from_elsewhere_are_not_causal():
    assert kinds(CAUSAL[-1:], t=1) == [Dense]
    assert kinds(CAUSAL[:3], t=3) == [Causal]


def test_a_causal_half_is_taken_out_of_a_conjunction():
    found = []

    @jax.jit
    def run(padding):
        mask = jnp.logical_and(padding[:, None, None, :], jnp.asarray(CAUSAL))
        known = with_known(Mask.dense(mask), T, T)
        found.append([type(part) for part in known.parts])
        return known.materialise(1, 1, T, T)

    np.testing.assert_array_equal(run(PADDING[None])[0, 0], CAUSAL & PADDING)
    assert found == [[Dense, Causal]]


def test_a_causal_array_costs_what_a_causal_mask_costs():
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 64, 8))

    @jax.jit
    def run(x):
        return layer(x, mask=nnx.make_causal_mask(x[..., 0]))

    expected = run(x)
    with everywhere() as report:
        np.testing.assert_allclose(run(x), expected, atol=1e-6)
        layer(x, is_causal=True)
    by_array, by_flag = report.taken
    assert (by_array.backend, by_array.after) == (by_flag.backend, by_flag.after)


MESHES = {
    "devices": lambda mesh: jax.set_mesh(mesh),
    "description": lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
}


@pytest.mark.parametrize("enter", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_causal_array_is_known_on_a_mesh(make, kind, enter):
    found = []
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    def run(x):
        found.append(kinds(make(x)))
        return x

    mask_programs._answer.cache_clear()
    with enter(mesh):
        jax.jit(run).trace(jax.ShapeDtypeStruct((2, T), jnp.float32))
    assert found == [[Causal]]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_causal_array_on_several_devices_is_known(kind):
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((5,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        mask = jax.device_put(CAUSAL, jax.sharding.PartitionSpec("data"))
        assert kinds(mask) == [Causal]
        found = []
        jax.jit(lambda x: found.append(kinds(mask)) or x)(jnp.ones(()))
    assert found == [[Causal]]


@pytest.fixture
def compiled():
    """The programs that are compiled."""
    found = []

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_masks_of_many_layers_compile_one_program(make, compiled):
    found = []

    def run(x):
        found.extend(kinds(make(x)) for _ in range(8))
        return x

    jax.jit(run).trace(jax.ShapeDtypeStruct((2, T), jnp.float32))
    assert found == [[Causal]] * 8
    assert len(compiled) <= 1


def test_masks_of_other_operations_are_other_programs():
    found = []

    def run(x):
        rows, columns = jnp.arange(T)[:, None], jnp.arange(T)
        masks = rows >= columns, rows >= columns + 1, rows > columns - 1, rows + 1 > columns * 1
        found.extend(kinds(mask) for mask in masks)
        return x

    jax.jit(run)(1.0)
    assert found == [[Causal], [Dense], [Causal], [Causal]]


def test_it_is_known_where_ranks_are_not_promoted():
    with jax.numpy_rank_promotion("raise"):
        assert kinds(CAUSAL[None, None]) == [Causal]
