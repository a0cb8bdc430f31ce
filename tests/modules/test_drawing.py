"""Parameters are the numbers of `jax.random`, however they are built; few programs are compiled."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

import flax_attn
from flax_attn import DifferentialAttention, Embedding, KimiDeltaAttention, Linear, convert
from flax_attn.models import GPT2, T5, GPT2Config, T5Config
from flax_attn.modules import initialisation, random_numbers
from flax_attn.modules.initialisation import filled, fork, next_key, normal, uniform
from flax_attn.sharding.parameters import create

DTYPES = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)
# Those that are short, those that end within a short block, and those of long blocks.
SHAPES = ((), (0, 3), (7,), (5, 4001), (3, 100_003))
CONFIG = GPT2Config(6, 2, num_layers=3, context_length=8, vocab_size=11, dropout=0.1)


def same(one, other):
    """Assert that two modules have equal parameters and equal streams."""
    one, other = (nnx.to_flat_state(nnx.state(module)) for module in (one, other))
    assert [path for path, _ in one] == [path for path, _ in other]
    for (path, left), (_, right) in zip(one, other, strict=True):
        left, right = (_plain(variable[...]) for variable in (left, right))
        assert left.dtype == right.dtype, path
        np.testing.assert_array_equal(left, right, str(path))


def _plain(array):
    typed = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if typed else array)


def constructors():
    """Return modules that draw in every way that there is."""
    tables = {"vocab_size": 13, "num_buckets": 8, "max_distance": 16, "dropout": 0.1}
    t5 = T5Config(6, 10, 2, 4, 2, 1, **tables)
    return {
        "linear": lambda rngs: Linear(300, 301, rngs=rngs),
        "embedding": lambda rngs: Embedding(300, 301, rngs=rngs),
        "differential": lambda rngs: DifferentialAttention(4, 4, None, 0.2, 2, rngs=rngs),
        "kimi": lambda rngs: KimiDeltaAttention(6, 8, 2, 4, rngs=rngs),
        "experts": lambda rngs: flax_attn.Experts(3, 4, 5, bias=True, rngs=rngs),
        "gpt2": lambda rngs: GPT2(CONFIG, rngs=rngs),
        "stacked": lambda rngs: GPT2(CONFIG, scan_layers=True, rngs=rngs),
        "t5": lambda rngs: T5(t5, rngs=rngs),
    }


@contextmanager
def counted():
    """Count what is compiled, from an empty cache of programs on."""
    programs = []

    def add(event, seconds, **names):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(names.get("fun_name"))

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(add)
    yield programs
    jax.monitoring.unregister_event_duration_listener(add)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_numbers_are_those_of_jax_random(x64, dtype, shape):
    key = jax.random.key(9)
    for init, drawn in (
        (uniform(1), jax.random.uniform(key, shape, dtype, -1, 1)),
        (normal(), jax.random.normal(key, shape, dtype)),
    ):
        assert random_numbers.can_draw(key, drawn.size, dtype)
        found = init(key, shape, dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, drawn)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_scaled_numbers_do_not_depend_on_jit(x64, dtype):
    key, shape = jax.random.key(9), (5, 4001)
    for init in (uniform(3), normal(0.02)):
        jitted = jax.jit(init, static_argnums=(1, 2))
        np.testing.assert_array_equal(init(key, shape, dtype), jitted(key, shape, dtype))


@pytest.mark.parametrize("name", constructors())
def test_eager_jitted_and_abstract_modules_are_one(name):
    build = constructors()[name]
    eager = build(nnx.Rngs(3, dropout=4))
    same(eager, nnx.jit(lambda: build(nnx.Rngs(3, dropout=4)))())
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(3, dropout=4)))
    for (path, value), (_, shape) in zip(
        nnx.to_flat_state(nnx.state(eager)), nnx.to_flat_state(nnx.state(abstract)), strict=True
    ):
        assert (value.shape, value.dtype) == (shape.shape, shape.dtype), path


def test_layers_made_by_vmap_are_those_of_their_keys():
    keys = jax.random.split(jax.random.key(5), 3)
    layers = nnx.vmap(lambda key: Linear(4, 5, rngs=nnx.Rngs(params=key)))(keys)
    alone = [Linear(4, 5, rngs=nnx.Rngs(params=key)) for key in keys]
    for name in ("kernel", "bias"):
        expected = np.stack([getattr(layer, name)[...] for layer in alone])
        np.testing.assert_array_equal(getattr(layers, name)[...], expected)


def test_a_model_that_is_made_on_a_mesh_has_the_numbers_of_one_that_is_not():
    mesh = jax.make_mesh((2,), ("tensor",))
    same(create(lambda: GPT2(CONFIG, rngs=nnx.Rngs(3)), mesh), GPT2(CONFIG, rngs=nnx.Rngs(3)))


def test_parameters_lie_on_a_mesh_that_is_set_as_other_arrays_do():
    mesh, rngs = jax.make_mesh((2,), ("tensor",)), nnx.Rngs(0)
    with jax.set_mesh(mesh):
        layer, norm = Linear(4, 6, rngs=rngs), flax_attn.LayerNorm(6)
        drawn = jax.random.uniform(jax.random.key(0), (4, 6))
        assert layer.kernel[...].sharding == drawn.sharding
        assert norm.scale[...].sharding == jnp.ones(6).sharding
    assert layer.kernel[...].sharding.mesh.axis_names == ("tensor",)
    same(layer, Linear(4, 6, rngs=nnx.Rngs(0)))


def test_streams_advance_as_flax_has_it():
    ours, flaxs = (nnx.Rngs(5, params=jax.random.key(2)) for _ in range(2))
    for _ in range(3):
        assert next_key(ours.params) == flaxs.params()
        assert fork(ours.dropout).key[...] == flaxs.dropout.fork().key[...]
    same(ours, flaxs)


def test_a_layer_takes_a_key_for_each_parameter():
    rngs = nnx.Rngs(params=1, dropout=2)
    DifferentialAttention(4, 4, None, 0.2, 2, qkv_bias=True, rngs=rngs)
    assert (int(rngs.params.count[...]), int(rngs.dropout.count[...])) == (12, 1)
    GPT2(CONFIG, rngs=(rngs := nnx.Rngs(params=1, dropout=2)))
    layers, drawn = 12 * 3 + 2, 6 * 3 + 2  # what the layers would draw, then what the model does
    assert (int(rngs.params.count[...]), int(rngs.dropout.count[...])) == (
        layers + drawn,
        2 * 3 + 1,
    )


def test_streams_of_another_trace_are_refused_as_by_flax():
    rngs = nnx.Rngs(0)
    with pytest.raises(TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda: Linear(3, 4, rngs=rngs).kernel[...])()


def test_keys_of_other_generators_draw_too():
    rngs = nnx.Rngs(params=jax.random.key(0, impl="rbg"))
    values = np.asarray(Linear(300, 400, rngs=rngs).kernel[...]) * 300**0.5
    assert 0.99 < np.abs(values).max() <= 1
    assert abs(values.var() - 1 / 3) < 0.01


def test_keys_that_are_not_partitionable_draw_as_jax_does():
    with jax.threefry_partitionable(False):
        key, shape = jax.random.key(0), (6,)
        found = normal()(key, shape, jnp.float32)
        np.testing.assert_array_equal(found, jax.random.normal(key, shape))


def test_parameters_lie_where_their_key_does():
    device = jax.devices()[3]
    rngs = nnx.Rngs(params=jax.device_put(jax.random.key(0), device))
    layer = Linear(3, 4, rngs=rngs)
    assert {layer.kernel[...].device, layer.bias[...].device, rngs.params().device} == {device}
    with jax.default_device(device):
        assert filled(3, 1, jnp.float32).device == device


def test_blocks_of_a_large_array_continue_its_counter(monkeypatch):
    monkeypatch.setattr(random_numbers, "_FEW", 0)
    key, shape = jax.random.key(9), (5, 100_003)
    for init, drawn in (
        (uniform(1), jax.random.uniform(key, shape, minval=-1)),
        (normal(), jax.random.normal(key, shape)),
    ):
        np.testing.assert_array_equal(init(key, shape, jnp.float32), drawn)
    high = np.array([1, 0], np.uint32)  # number 2**32
    found = random_numbers._block(np.array([1, 2], np.uint32), high, np.float32(1), 4, False)
    first, second = random_numbers.threefry_2x32(
        (np.array([1], np.uint32), np.array([2], np.uint32)),
        (np.array([1], np.uint32), np.arange(4, dtype=np.uint32)),
    )
    bits = (first ^ second) >> np.uint32(9)
    np.testing.assert_array_equal(found, bits * np.float32(2**-22) - np.float32(1))


def test_a_model_draws_each_parameter_once(monkeypatch):
    sizes = []

    def draw(key, shape, *options):
        sizes.append(shape)
        return random_numbers.draw(key, shape, *options)

    monkeypatch.setattr(initialisation, "draw", draw)
    model = GPT2(CONFIG, rngs=nnx.Rngs(0))
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    tables = [param.shape for path, param in params if path[-1] in ("kernel", "embedding")]
    assert sorted(sizes) == sorted(tables)


def test_what_a_model_does_not_draw_is_drawn_by_its_layers():
    class Untouched(T5):
        def initialise(self, rngs):
            pass

    config = T5Config(6, 10, 2, 4, 1, 1, vocab_size=13, num_buckets=8, max_distance=16)
    model = Untouched(config, rngs=nnx.Rngs(0))
    assert all(isinstance(param, jax.Array) for param in jax.tree.leaves(nnx.state(model)))
    embedding = Embedding(13, 6, rngs=nnx.Rngs(0)).embedding[...]
    np.testing.assert_array_equal(model.tok_emb.embedding[...], embedding)


def test_a_layer_compiles_nothing_for_small_uniform_parameters():
    rngs = nnx.Rngs(0)
    with counted() as programs:
        flax_attn.MultiHeadAttention(12, 8, None, 0.0, 4, True, out_bias=True, rngs=rngs)
        flax_attn.LayerNorm(7)
        flax_attn.RMSNorm(7)
    assert programs == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_weights_are_loaded_without_a_program(dtype):
    layer = Linear(7, 11, rngs=nnx.Rngs(0))
    weights = convert.state_dict(layer)
    random = np.random.default_rng(0)
    given = {name: random.normal(size=a.shape).astype(dtype) for name, a in weights.items()}
    with counted() as programs:
        convert.load_state_dict(layer, given)
    assert programs == []
    found = convert.state_dict(layer)
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array.astype(np.float32))


@pytest.mark.parametrize(("stacked", "most"), [(False, 3), (True, 4)])
def test_a_model_compiles_one_program_whatever_its_shapes(stacked, most):
    rngs = nnx.Rngs(0)
    with counted() as programs:
        GPT2(CONFIG, scan_layers=stacked, rngs=rngs)
    assert len(programs) <= most, programs
