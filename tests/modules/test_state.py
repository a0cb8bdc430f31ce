import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

HEAD = [
    "W_query.kernel",
    "W_query.bias",
    "W_key.kernel",
    "W_key.bias",
    "W_value.kernel",
    "W_value.bias",
]
FEED_FORWARD = ["layers.0.kernel", "layers.0.bias", "layers.2.kernel", "layers.2.bias"]
GATED = ["W_gate.kernel", "W_up.kernel", "W_down.kernel"]


def under(prefix, names):
    return [prefix + name for name in names]


NAMES = {
    "simplified": [],
    "self_attention_d_key": HEAD,
    "causal_d_key": HEAD,
    "multi_head_wrapper": under("heads.0.", HEAD) + under("heads.1.", HEAD),
    "multi_head_gqa": [*HEAD, "out_proj.kernel", "out_proj.bias"],
    "multi_head_cross": [*HEAD, "out_proj.kernel", "out_proj.bias"],
    "block_gpt2": under("att.", [*HEAD, "out_proj.kernel", "out_proj.bias"])
    + under("ff.", FEED_FORWARD)
    + ["norm1.scale", "norm1.shift", "norm2.scale", "norm2.shift"],
    "block_llama": under("att.", [*HEAD[::2], "out_proj.kernel"])
    + under("ff.", GATED)
    + ["norm1.scale", "norm2.scale"],
    "layer_norm": ["scale", "shift"],
    "rms_norm": ["scale"],
    "feed_forward_exact": FEED_FORWARD,
}


def dotted(state):
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def equal(a, b):
    return bool((a == b).all())


@nnx.jit
def call(module, *inputs, **options):
    return module(*inputs, **options)


def test_parameters_have_the_documented_names(variant):
    assert sorted(dotted(nnx.state(variant.build(), nnx.Param))) == sorted(NAMES[variant.name])


def test_beside_parameters_there_are_only_streams(variant):
    module = variant.build(dropout=0.5)
    rest = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    assert dotted(rest) == []
    assert bool(dotted(nnx.state(module, nnx.RngState))) is variant.drops


def test_without_dropout_there_is_no_stream(variant):
    assert dotted(nnx.state(variant.build(), nnx.RngState)) == []


def test_train_mode_draws_a_new_key_each_call(dropping):
    module, inputs = dropping.build(dropout=0.5), dropping.inputs()
    outputs = [call(module, *inputs) for _ in range(3)]
    assert not equal(outputs[0], outputs[1])
    assert not equal(outputs[1], outputs[2])


def test_jit_draws_the_keys_that_eager_draws(typical, close):
    jitted, eager = typical.build(dropout=0.5), typical.build(dropout=0.5)
    for _ in range(2):
        close(call(jitted, *typical.inputs()), eager(*typical.inputs()))


def test_eval_mode_is_that_of_a_module_without_dropout(dropping):
    module, inputs = dropping.build(dropout=0.5), dropping.inputs()
    expected = call(dropping.build(dropout=0.0), *inputs)
    module.eval()
    assert equal(call(module, *inputs), expected)
    assert equal(call(module, *inputs, dropout_key=jax.random.key(0)), expected)
    module.train()
    assert not equal(call(module, *inputs), expected)


def test_eval_mode_draws_nothing(dropping):
    module = dropping.build(dropout=0.5)
    before = nnx.to_pure_dict(nnx.state(module, nnx.RngCount))
    module.eval()
    call(module, *dropping.inputs())
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module, nnx.RngCount)), before
    )


def test_a_key_decides_and_leaves_the_stream_alone(dropping):
    module, fresh = dropping.build(dropout=0.5), dropping.build(dropout=0.5)
    inputs, keys = dropping.inputs(), [jax.random.key(i) for i in (1, 1, 2)]
    first, same, other = (call(module, *inputs, dropout_key=key) for key in keys)
    assert equal(first, same)
    assert not equal(first, other)
    assert equal(call(module, *inputs), call(fresh, *inputs))


@pytest.mark.parametrize("name", ["multi_head_wrapper", "multi_head_gqa"])
def test_heads_drop_other_weights_by_the_same_key(variants, name):
    module, inputs = variants[name].build(dropout=0.5), variants[name].inputs()
    attended = module.attend(*inputs, return_weights=True, dropout_key=jax.random.key(1))
    dropped = attended.weights == 0
    assert not equal(dropped[:, 0], dropped[:, 1])


def test_raw_words_are_a_key_too(typical):
    module, inputs, key = typical.build(dropout=0.5), typical.inputs(), jax.random.key(3)
    typed, raw = (call(module, *inputs, dropout_key=k) for k in (key, jax.random.key_data(key)))
    assert equal(typed, raw)


def test_split_and_merge_round_trip(variant):
    module, inputs = variant.build(dropout=0.5), variant.inputs()
    # Cloned, because a split shares its variables with the module.
    merged = nnx.merge(*nnx.split(nnx.clone(module)))
    jax.tree.map(np.testing.assert_array_equal, _numbers(merged), _numbers(module))
    for _ in range(2):
        assert equal(call(merged, *inputs), call(module, *inputs))


def _numbers(module):
    raw = nnx.to_pure_dict(nnx.state(module))
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, raw
    )


def test_clone_is_equal_and_independent(learning):
    module, inputs = learning.build(dropout=0.5), learning.inputs()
    clone, expected = nnx.clone(module), call(nnx.clone(module), *inputs)
    for _, param in nnx.to_flat_state(nnx.state(clone, nnx.Param)):
        param[...] = jnp.zeros_like(param[...])
    call(clone, *inputs)
    assert equal(call(module, *inputs), expected)
    assert not equal(call(clone, *inputs), expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mode_survives_split_and_clone(dropping, mode):
    module = dropping.build(dropout=0.5)
    getattr(module, mode)()
    for copy in (nnx.merge(*nnx.split(module)), nnx.clone(module)):
        modes = [m.deterministic for _, m in nnx.iter_modules(copy) if hasattr(m, "deterministic")]
        assert modes
        assert set(modes) == {mode == "eval"}


def test_state_of_one_module_runs_another(learning):
    module, other = learning.build(1), learning.build(2)
    inputs = learning.inputs()
    assert not equal(call(other, *inputs), call(module, *inputs))
    nnx.update(other, nnx.state(module, nnx.Param))
    assert equal(call(other, *inputs), call(module, *inputs))
