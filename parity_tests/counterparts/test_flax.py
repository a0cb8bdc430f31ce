"""The attention of Flax NNX and Linen against torch.nn.MultiheadAttention and our PyTorch twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import flax_attn
import torch_ref
from flax_attn.convert import Rule
from flax_attn.parity import assert_parity, compare

B, T, S, D, HEADS, KV = 3, 5, 7, 8, 2, 6
SELF, CROSS = [(B, T, D)], [(B, T, D), (B, S, KV), (B, S, KV)]

PROJECTIONS = ("query", "key", "value")
KERNELS = [
    Rule((f"{name}.kernel",), f"W_{name}.weight", "i n h -> (n h) i") for name in PROJECTIONS
]
BIASES = [Rule((f"{name}.bias",), f"W_{name}.bias", "n h -> (n h)") for name in PROJECTIONS]
# Flax's attention keeps the heads apart; these are the rows between it and torch_ref.
TORCH_REF = [
    *KERNELS,
    *BIASES,
    Rule(("out.kernel",), "out_proj.weight", "n h o -> o (n h)"),
    Rule(("out.bias",), "out_proj.bias"),
]


def nnx_attention(**options):
    return nnx.MultiHeadAttention(HEADS, D, rngs=nnx.Rngs(0), **{"decode": False, **options})


def torch_attention(**options):
    return torch.nn.MultiheadAttention(D, HEADS, batch_first=True, **options).eval()


def twin(**options):
    """Return our attention in PyTorch."""
    return torch_ref.MultiHeadAttention(D, D, None, 0.0, HEADS, qkv_bias=True, **options).eval()


def seen(x, lengths):
    if lengths is None:
        return None
    real = jnp.arange(x.shape[1]) < lengths[:, None]
    return real[:, None, None, :]


def sowing(layer, query, key=None, value=None, lengths=None):
    """Return output and weights.

    Unless it is asked for weights, `jax.nn` takes the softmax in float32.
    """
    capturing = nnx.capture(layer, nnx.Intermediate)
    output, caught = capturing(query, key, value, mask=seen(query, lengths), sow_weights=True)
    return output, *caught["attention_weights"]


def torch_call(layer, query, key=None, value=None, lengths=None):
    key, value = (query if x is None else x for x in (key, value))
    hidden = None if lengths is None else torch.arange(key.shape[1]) >= lengths[:, None]
    return layer(query, key, value, key_padding_mask=hidden, average_attn_weights=False)


def three(layer, x, lengths=None):
    return layer(x, x, x, mask=seen(x, lengths))


def output_of_torch(layer, x):
    return layer(x, x, x, need_weights=False)[0]


# With their weights.
WEIGHED = {"layout": "nnx_mha", "flax_call": sowing, "torch_call": torch_call}


def test_nnx(checks):
    sides = nnx_attention(), torch_attention()
    assert_parity(*sides, SELF, checks=checks.core, **WEIGHED)


def test_nnx_cross(checks):
    sides = nnx_attention(in_kv_features=KV), torch_attention(kdim=KV, vdim=KV)
    assert_parity(*sides, CROSS, checks=checks.core, **WEIGHED)


def test_nnx_by_itself_takes_the_softmax_in_float32(checks):
    sides = nnx_attention(), torch_attention()
    options = {"layout": "nnx_mha", "torch_call": output_of_torch, "locate": False}
    report = assert_parity(*sides, SELF, checks=checks.core, **options)
    assert "in float64, JAX's attention takes its softmax in float64" in report.notes


def attend(query, key, value, mask=None, is_causal=False, **options):
    """Take the place of Flax's own attention inside of its module."""
    if is_causal:
        mask = flax_attn.Mask.causal()
    # While decoding it is in float32.
    if isinstance(mask, jax.Array):
        mask = mask.astype(bool)
    return flax_attn.dot_product_attention(query, key, value, mask=mask)


def test_nnx_with_our_attention_inside(checks):
    sides = nnx_attention(attention_fn=attend), torch_attention()
    options = {"layout": "nnx_mha", "torch_call": output_of_torch}
    assert_parity(*sides, SELF, checks=checks.core, **options)


def test_the_cache_of_nnx_against_our_twin(checks):
    def in_steps(layer, x):
        layer.init_cache(x.shape, dtype=x.dtype)
        # One token a call.
        steps = [layer(x[:, [i]], decode=True) for i in range(x.shape[1])]
        return jnp.concatenate(steps, axis=1)

    assert_parity(
        nnx_attention(attention_fn=attend),
        twin(),
        SELF,
        layout=TORCH_REF,
        checks=(*checks.core, "cache = full"),
        flax_call=lambda layer, x: layer(x, is_causal=True),
        flax_cached=in_steps,
    )


@pytest.fixture(scope="module")
def bound():
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    x = jnp.ones((B, T, D))
    variables = jax.jit(layer.init)(jax.random.key(0), x, x, x)
    return layer.bind(variables)


def test_linen_bound(bound, checks):
    sides = bound, twin(causal=False)
    options = {"layout": TORCH_REF, "flax_call": three}
    report = assert_parity(*sides, SELF, checks=checks.core, **options)
    # It moves all scores of a query alike.
    assert report.check("gradients").note == "no effect on the outputs: W_key.bias"


def test_linen_gives_the_mean_of_the_values_where_nothing_is_seen(bound):
    def padded(layer, x, lengths=None):
        mask = None if lengths is None else torch_ref.Mask.lengths(key=lengths)
        return layer(x, mask=mask)

    report = compare(
        *(bound, twin(causal=False), SELF),
        layout=TORCH_REF,
        checks=["padded rows"],
        flax_call=three,
        torch_call=padded,
        locate=False,
    )
    assert not report.passed
    # The row of the batch that is all padding.
    assert report.check("padded rows").where["index"][0] == 0


def batch_norm_of_torch():
    """Return a norm with statistics that are not those of a new one."""
    layer = torch.nn.BatchNorm1d(D).eval()
    layer.running_mean.copy_(torch.linspace(-1, 1, D))
    layer.running_var.copy_(torch.linspace(0.5, 2, D))
    return layer


@pytest.fixture
def norms():
    """Return a norm of Linen and one of PyTorch."""
    layer = linen.BatchNorm(use_running_average=True, epsilon=1e-5)
    variables = layer.init(jax.random.key(0), jnp.ones((B, D)))
    return layer.bind(variables), batch_norm_of_torch()


@pytest.fixture
def copied(norms):
    """Return the pair after a comparison that gives Linen the weights of PyTorch."""
    checks = ["weights", "forward", "gradients"]
    return assert_parity(*norms, [(B, D)], checks=checks, redraw=False).pair


def arrays_of(norm):
    """Return parameters and statistics; JAX has no count of batches."""
    state = norm.state_dict()
    del state["num_batches_tracked"]
    return {name: value.numpy() for name, value in state.items()}


def test_running_statistics_of_linen_are_copied(norms, copied):
    found = copied.flax.weights()
    for name, value in arrays_of(norms[1]).items():
        np.testing.assert_array_equal(found[name], value)
    fixed = {entry.theirs for entry in copied.entries if not entry.trainable}
    assert fixed == {"running_mean", "running_var"}


def test_running_statistics_of_linen_are_drawn(norms):
    drawn = assert_parity(*norms, [(B, D)], checks=["forward"]).pair.flax.weights()
    assert (drawn["running_var"] != norms[1].running_var.numpy()).all()


def test_linen_through_the_bridge(checks):
    x = jnp.ones((B, T, D))
    layer = nnx.bridge.ToNNX(linen.MultiHeadDotProductAttention(num_heads=HEADS), rngs=nnx.Rngs(0))
    layer.lazy_init(x, x, x)
    options = {"flax_call": three, "torch_call": output_of_torch}
    assert_parity(layer, torch_attention(), SELF, layout="nnx_mha", checks=checks.core, **options)
