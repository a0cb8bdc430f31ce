"""The cache under transforms of JAX, and tokens that do not fit where nothing can raise."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn import KVCache, Mask, RoPE, native
from flax_attn.functional.cache_slots import write_tokens

B, T, D, CAPACITY = 2, 6, 8, 7
MODULES = {
    "linear": {"rope": RoPE(50.0), "num_kv_heads": 2},
    "ring buffer": {"rope": RoPE(50.0), "window": 3},
}


@pytest.fixture(params=MODULES.values(), ids=MODULES)
def module(request):
    norms = {name: flax_attn.RMSNorm(D // 4) for name in ("q_norm", "k_norm")}
    layer = flax_attn.MultiHeadAttention(
        D, D, 9, 0.0, 4, **norms, **request.param, rngs=nnx.Rngs(0)
    )
    for i, (_, param) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        param.set_value(
            jnp.asarray(np.random.default_rng(i).normal(0, 0.6, param.shape), jnp.float32)
        )
    return layer


@pytest.fixture
def linear():
    return flax_attn.MultiHeadAttention(D, D, 9, 0.0, 4, rope=RoPE(), rngs=nnx.Rngs(0))


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(9).normal(size=(B, T, D)), jnp.float32)


def cached(module, x, cache, **options):
    """Return the output and the new cache."""
    attended = module.attend(x, cache=cache, **options)
    return attended.output, attended.cache


def step(module):
    """Return the step of a loop: the cache and a token of each row in, both out."""

    def body(cache, token):
        output, cache = cached(module, token[:, None], cache)
        return cache, output[:, 0]

    return body


def test_scan(module, x, close):
    cache = module.init_cache(B, CAPACITY)
    cache, outputs = jax.jit(lambda cache, x: jax.lax.scan(step(module), cache, x))(
        cache, x.swapaxes(0, 1)
    )
    close(outputs.swapaxes(0, 1), jax.jit(module)(x))
    assert cache.length.tolist() == [T, T]


def test_while_loop(module, x, close):
    @jax.jit
    def run(cache, x):
        def body(state):
            i, cache, outputs = state
            cache, output = step(module)(
                cache, jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
            )
            return i + 1, cache, jax.lax.dynamic_update_index_in_dim(outputs, output, i, 1)

        return jax.lax.while_loop(lambda state: state[0] < T, body, (0, cache, jnp.zeros_like(x)))[
            2
        ]

    close(run(module.init_cache(B, CAPACITY), x), jax.jit(module)(x))


def test_vmap_over_caches_of_single_sequences(module, x, close):
    single = module.init_cache(None, CAPACITY)
    caches = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (B, *leaf.shape)), single)

    def run(cache, x, lengths):
        first, cache = cached(module, x[..., :4, :], cache, lengths=lengths)
        second, cache = cached(module, x[..., 4:, :], cache)
        return first, second, cache.length

    lengths = jnp.array([4, 2], jnp.int32)
    found = jax.jit(jax.vmap(run))(caches, x, lengths)
    assert found[2].tolist() == [6, 4]
    close(found[:2], jax.jit(run)(module.init_cache(B, CAPACITY), x, lengths)[:2])


def test_a_step_is_compiled_once(module, x):
    @jax.jit
    def one(cache, token):
        return cached(module, token, cache)

    cache = module.init_cache(B, CAPACITY)
    before = jax.tree.structure(cache), jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache)
    for i in range(3):
        _, cache = one(cache, x[:, i : i + 1])
    assert one._cache_size() == 1
    assert (
        jax.tree.structure(cache),
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache),
    ) == before


def test_one_that_is_known_to_be_empty_equals_one_that_is_empty(module, x, close):
    cache, lengths = module.init_cache(B, CAPACITY), jnp.array([5, 2], jnp.int32)
    call = jax.jit(lambda cache, x: cached(module, x, cache, lengths=lengths))
    known, empty = call(replace(cache, length=0), x), call(cache, x)
    close(known[0], empty[0])
    assert known[1].length.tolist() == empty[1].length.tolist() == [5, 2]
    assert known[1].key_positions.tolist() == empty[1].key_positions.tolist()
    call = jax.jit(lambda held: cached(module, x[:, :2], held)[0])
    close(call(known[1]), call(empty[1]))


def test_lengths_that_are_known_stay_known(linear, x, close):
    cache = replace(linear.init_cache(B, CAPACITY), length=0)
    call, outputs = jax.jit(lambda cache, x: cached(linear, x, cache)), []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        output, cache = call(cache, x[:, start:stop])
        outputs.append(output)
        assert cache.length == stop
    close(jnp.concatenate(outputs, axis=1), jax.jit(linear)(x))
    with pytest.raises(ValueError, match=r"capacity of 7 tokens; got 2 new tokens, 6 cached"):
        call(cache, x[:, :2])


def test_slots_behind_a_length_that_is_known_are_not_read():
    cache, new = KVCache.zeros(B, CAPACITY, 2, 4).replace(length=2), jnp.ones((B, 3, 2, 4))
    held = cache.extend(
        new, new, Mask.dense(jnp.ones((CAPACITY, CAPACITY), bool)), lengths=jnp.array([3, 1])
    )
    assert held.key.shape == held.value.shape == (B, 5, 2, 4)
    assert held.key_positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
    assert held.mask.materialise(B, 1, 3, 5).sum(axis=(1, 2, 3)).tolist() == [3 * 5, 1 * 3]
    assert held.cache.capacity == CAPACITY
    padded = KVCache.zeros(B, CAPACITY, 2, 4).replace(length=6).extend(new, new, lengths=1)
    assert padded.key.shape[1] == CAPACITY


def test_gradients_through_prefill_and_steps(module, x, close):
    graph, params = nnx.split(module)
    mark = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, D)), jnp.float32)

    def in_calls(params, x):
        layer = nnx.merge(graph, params)
        cache, outputs = layer.init_cache(B, CAPACITY), []
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            output, cache = cached(layer, x[:, start:stop], cache)
            outputs.append(output)
        return (jnp.concatenate(outputs, axis=1) * mark).sum()

    def full(params, x):
        return (nnx.merge(graph, params)(x) * mark).sum()

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (in_calls, full))
    close(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_tokens_that_do_not_fit_make_their_row_nan_and_no_other(linear, x):
    call = jax.jit(lambda cache, x, lengths: cached(linear, x, cache, lengths=lengths))
    cache = linear.init_cache(B, CAPACITY)
    _, cache = call(cache, x, jnp.array([6, 2], jnp.int32))
    fits, _ = call(cache, x[:, :2], jnp.array([1, 2], jnp.int32))
    spoilt, after = call(cache, x[:, :2], jnp.array([2, 2], jnp.int32))
    assert not np.isnan(fits).any()
    assert np.isnan(spoilt[0]).all()
    assert (spoilt[1] == fits[1]).all()
    assert after.invalid.tolist() == [True, False]
    assert (after.key[0, :, :6] == cache.key[0, :, :6]).all()
    again, after = call(after, x[:, :1], jnp.array([0, 1], jnp.int32))
    assert np.isnan(again[0]).all()
    assert not np.isnan(again[1]).any()
    assert after.invalid.tolist() == [True, False]


def test_a_whole_model_says_so_too():
    config = flax_attn.GPT2Config(6, 2, 2, context_length=4, vocab_size=11, dropout=0.0)
    model = flax_attn.GPT2(config, rngs=nnx.Rngs(0))
    call = jax.jit(lambda tokens, lengths, cache: cached(model, tokens, cache, lengths=lengths))
    tokens, lengths = jnp.ones((B, 3), jnp.int32), jnp.array([3, 1], jnp.int32)
    _, cache = call(tokens, lengths, model.init_cache(B, 4))
    logits, cache = call(tokens, jnp.array([2, 3], jnp.int32), cache)
    assert np.isnan(logits[0]).all()
    assert not np.isnan(logits[1]).any()


@pytest.mark.parametrize("lengths", [[7, 2], [-1, 2]], ids=["more than t", "negative"])
def test_lengths_that_cannot_be_make_their_row_nan_and_no_other(module, x, lengths):
    cache, lengths = module.init_cache(B, CAPACITY), jnp.array(lengths, jnp.int32)
    output, cache = cached(module, x, cache, lengths=lengths)
    assert np.isnan(output).all(axis=(1, 2)).tolist() == cache.invalid.tolist() == [True, False]
    assert not np.isnan(output[1]).any()


def test_an_eager_call_reads_no_values(module, x, monkeypatch):
    """Whatever it read would make it wait for the device."""
    table, ids = (
        flax_attn.Embedding(11, D, rngs=nnx.Rngs(0)),
        jnp.array([[1, 2], [99, 3]], jnp.int32),
    )
    cache, lengths, positions = (
        module.init_cache(B, CAPACITY),
        jnp.array([2, 1], jnp.int32),
        jnp.array([5, 6]),
    )
    read = property(lambda array: pytest.fail("the call reads the values of an array"))
    with monkeypatch.context() as patch:
        patch.setattr(type(x), "_value", read)
        with pytest.raises(pytest.fail.Exception, match="reads the values"):
            int(lengths.max())
        options = {"lengths": lengths, "positions": positions}
        first, cache = cached(module, table(ids), cache, **options)
        second, cache = cached(module, x[:, :1], cache)
    assert np.isnan(first).any(axis=(1, 2)).tolist() == [False, True]
    assert cache.length.tolist() == [3, 2]
    assert second.shape == (B, 1, D)


def test_a_narrow_cache_of_a_module(linear, x):
    cache = linear.init_cache(B, CAPACITY, jnp.bfloat16)
    output, cache = jax.jit(lambda cache, x: cached(linear, x, cache))(cache, x)
    assert (cache.key.dtype, output.dtype) == (jnp.bfloat16, jnp.float32)
    error = np.abs(output - jax.jit(linear)(x)).max() / np.abs(output).max()
    assert 1e-5 < error < 1e-2


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_written_is_read_and_differentiated_in_every_dtype(b, dtype):
    new, cotangent = (
        jax.random.normal(jax.random.key(i), (b, 2, 3, 5)).astype(dtype) for i in range(2)
    )
    cache = KVCache.zeros(b, 7, num_kv_heads=3, head_dim=5, dtype=dtype)

    def written(new):
        return cache.extend(new, new, Mask.causal()).key[:, :2]

    keys, pull = jax.vjp(written, new)
    assert jnp.array_equal(keys, new)
    assert jnp.array_equal(pull(cotangent)[0], cotangent)
    assert jnp.array_equal(jax.jvp(written, (new,), (cotangent,))[1], cotangent)


SLOTS = jnp.array([[2, 0, 7], [7, 6, 3]], jnp.int32)  # 7 is behind the last


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tokens_are_written_to_their_slots_in_every_dtype(dtype):
    cached = jax.random.normal(jax.random.key(0), (2, 3, 7, 5)).astype(dtype)
    new = jax.random.normal(jax.random.key(1), (2, 3, 3, 5)).astype(dtype)
    expected = np.asarray(cached, np.float32).copy()
    for row, token in np.ndindex(SLOTS.shape):
        slot = int(SLOTS[row, token])
        if slot < 7:
            expected[row, :, slot] = np.asarray(new[row, token], np.float32)
    assert np.array_equal(np.asarray(write_tokens(cached, new, SLOTS), np.float32), expected)
    several = jax.vmap(write_tokens, (0, None, 0))(cached[None], new, SLOTS[None])
    assert np.array_equal(np.asarray(several[0], np.float32), expected)
    # The array that was given is read again: it is as it was.
    assert not np.array_equal(np.asarray(cached, np.float32), expected)


@pytest.mark.skipif(native.library() is None, reason="its library was not built")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_copies_no_cache_of_16_bits(dtype):
    cached = jax.ShapeDtypeStruct((2, 3, 4096, 16), dtype)
    new = jax.ShapeDtypeStruct((2, 1, 3, 16), dtype)
    slots = jax.ShapeDtypeStruct((2, 1), "int32")
    program = jax.jit(write_tokens, donate_argnums=0).lower(cached, new, slots).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 2 * 3 * 4096 * 16
    assert memory.temp_size_in_bytes < 4096


def test_a_mesh_is_written_by_xla():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cached, new = jnp.zeros((1, 3, 7, 5), jnp.bfloat16), jnp.ones((1, 1, 3, 5), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.make_jaxpr(write_tokens)(cached, new, SLOTS[:1, :1])
    assert "native_write_tokens" not in str(program)
