"""Positions against Hugging Face's in float64, and against formulas written in another way."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.t5.modeling_t5 import T5Attention

from attn_spec.frequencies import Scaling, plain_frequencies
from flax_attn import convert
from flax_attn.parity import tolerance

B, T, S, N, H, WIDTH, BASE = 3, 5, 7, 2, 16, 12, 500.0
RANDOM = np.random.default_rng(0)
_FLOAT32 = torch.get_default_dtype()
X, COTANGENT = RANDOM.normal(size=(2, B, T, N, H))
PACKED = np.array([[0, 1, 2, 0, 1], [90, 91, 92, 93, 94], [7, 3, 0, 41, 5]])
YARN = {"factor": 4.0, "original_context_length": 40}
SCALINGS = {  # rope_type in Hugging Face, name here, arguments
    "none": ("default", None, {}),
    "linear": ("linear", "LinearScaling", {"factor": 4.0}),
    "dynamic": ("dynamic", "DynamicNTKScaling", {"factor": 4.0, "original_context_length": 40}),
    "yarn": ("yarn", "YaRNScaling", YARN),
    "yarn exact": (
        "yarn",
        "YaRNScaling",
        {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    ),
    "yarn step": ("yarn", "YaRNScaling", {**YARN, "original_context_length": 6}),
    "yarn ramp": (
        "yarn",
        "YaRNScaling",
        {**YARN, "original_context_length": 10**7, "beta_fast": 1e6},
    ),
    "yarn mscale": ("yarn", "YaRNScaling", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "yarn given": ("yarn", "YaRNScaling", {**YARN, "attention_factor": 1.25}),
    "llama3": (
        "llama3",
        "Llama3Scaling",
        {"factor": 8.0, "original_context_length": 160, "high_freq_factor": 5.0},
    ),
}


def assert_equal(ours, truth, rule=tolerance.FORWARD):
    error = tolerance.relative({"": np.asarray(ours)}, {"": np.asarray(truth)})[""]
    assert error <= rule, error


def scaling_of(side, name):
    _, kind, arguments = SCALINGS[name]
    return None if kind is None else getattr(side, kind)(**arguments)


def rope_of(side, name, **keywords):
    return side.RoPE(BASE, scaling=scaling_of(side, name), **keywords)


@contextmanager
def in_float64():
    """Let Hugging Face compute in float64.

    Its formulas ask for float32 by name, and that name means float64 here.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(_FLOAT32)


def llama_config(name, **more):
    """Return the config of a tiny Llama that was trained on 40 tokens."""
    kind, _, arguments = SCALINGS[name]
    arguments = {"low_freq_factor": 1.0, **arguments} if kind == "llama3" else dict(arguments)
    length = arguments.pop("original_context_length", None)
    if kind in ("yarn", "llama3"):
        arguments["original_max_position_embeddings"] = length
    return LlamaConfig(
        hidden_size=N * H,
        num_attention_heads=N,
        head_dim=H,
        max_position_embeddings=40,
        rope_parameters={"rope_type": kind, "rope_theta": BASE, **arguments},
        attn_implementation="eager",
        **more,
    )


def published_cos_sin(name, positions):
    """Return Hugging Face's cos and sin, `(1, t, h)` each.

    The layer is fresh, because one with dynamic scaling keeps state.
    """
    config = llama_config(name)
    return LlamaRotaryEmbedding(config)(
        torch.ones(1, dtype=torch.float64), torch.tensor(positions)[None]
    )


def published_frequencies(name):
    config = llama_config(name)
    if name == "none":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[SCALINGS[name][0]](config, "cpu")


def our_frequencies(side, name):
    scaling = scaling_of(side, name)
    if scaling is None:
        return plain_frequencies(BASE, H), 1.0
    return scaling.frequencies(BASE, H), scaling.amplitude()


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_hugging_face(side, name):
    (ours, amplitude), (theirs, factor) = our_frequencies(side, name), published_frequencies(name)
    assert theirs.dtype == torch.float32
    # Each over its own size: the slow ones are thousands of times smaller than the first.
    each = (
        {str(i): f for i, f in enumerate(np.split(fs, H // 2))} for fs in (ours, theirs.numpy())
    )
    errors = tolerance.reordered(*each)
    assert max(errors.values()) <= 1, errors
    with in_float64():
        truth, factor = published_frequencies(name)
    assert ours.dtype == np.float64
    assert_equal(ours / truth.numpy(), np.ones(H // 2))
    assert_equal(amplitude, factor)


@pytest.mark.parametrize("row", range(B))
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_that_of_hugging_face(side, name, row):
    ours = rope_of(side, name)(side.array(X[row]), side.array(PACKED[row]))
    with in_float64():
        cos, sin = published_cos_sin(name, PACKED[row])
        truth, _ = apply_rotary_pos_emb(torch.tensor(X[row]), torch.tensor(X[row]), cos[0], sin[0])
    assert_equal(side.numpy(ours), truth.numpy())


@pytest.mark.parametrize("width", [None, WIDTH])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_complex_numbers(side, interleaved, width):
    ours = side.numpy(side.RoPE(BASE, width, interleaved)(side.array(X), side.array(PACKED)))
    width = width or H
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + width // 2) for i in range(width // 2)]
    truth = X.copy()
    for i, (a, b) in enumerate(pairs):
        turn = np.exp(1j * PACKED * BASE ** (-2 * i / width))
        turned = (X[..., a] + 1j * X[..., b]) * turn[:, :, None]
        truth[..., a], truth[..., b] = turned.real, turned.imag
    assert_equal(ours, truth)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_row_is_turned_as_it_is_alone(side, name):
    rope = rope_of(side, name, width=WIDTH)
    together = side.numpy(rope(side.array(X), side.array(PACKED)))
    for row, positions in enumerate(PACKED):
        np.testing.assert_array_equal(
            together[row], side.numpy(rope(side.array(X[row]), side.array(positions)))
        )
    shared = side.numpy(rope(side.array(X), side.array(PACKED[1])))
    np.testing.assert_array_equal(shared[1], together[1])


def test_positions_count_from_zero(side):
    default = side.RoPE()(side.array(X))
    np.testing.assert_array_equal(
        side.numpy(default), side.numpy(side.RoPE()(side.array(X), np.arange(T)))
    )
    np.testing.assert_array_equal(side.numpy(default[:, 0]), X[:, 0])
    assert (side.numpy(default)[:, 1:] != X[:, 1:]).all()


def test_amplitude_scales_what_turns_and_nothing_else(side):
    rope = side.RoPE(width=WIDTH, scaling=side.YaRNScaling(4.0, 40, attention_factor=1.5))
    output = side.numpy(rope(side.array(X), np.zeros(T, int)))
    np.testing.assert_array_equal(output[..., :WIDTH], 1.5 * X[..., :WIDTH])
    np.testing.assert_array_equal(output[..., WIDTH:], X[..., WIDTH:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_differences_of_positions_alone(side, interleaved):
    rope = side.RoPE(BASE, WIDTH, interleaved)

    def scores(shift):
        query, key = (
            side.numpy(rope(side.array(x), side.array(PACKED + shift))) for x in (X, COTANGENT)
        )
        return np.einsum("b t n h, b s n h -> b n t s", query, key)

    assert_equal(scores(57), scores(0))
    assert np.abs(scores(0) - np.einsum("b t n h, b s n h -> b n t s", X, COTANGENT)).max() > 1


@pytest.mark.parametrize("name", SCALINGS)
def test_gradients_of_rope(sides, name):
    def gradient(side):
        rope = rope_of(side, name, width=WIDTH, interleaved=name == "linear")
        positions, cotangent = side.array(PACKED), side.array(COTANGENT)
        return side.gradients(lambda x: (rope(x, positions) * cotangent).sum(), side.array(X))[0]

    assert_equal(*map(gradient, sides), rule=tolerance.GRADIENT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_dtypes_turn_in_float32(side, dtype):
    positions = side.array(np.array([257, 1027, 4099, 65537, 0]))  # which bfloat16 does not hold
    low = side.array(X.astype("float32"), dtype)
    turned = side.RoPE(width=WIDTH)(low, positions)
    assert turned.dtype == low.dtype
    wide = side.array(convert.to_numpy(low).astype("float32"))
    assert str(wide.dtype).endswith("float32")
    wide = side.RoPE(width=WIDTH)(wide, positions)
    assert str(wide.dtype).endswith("float32")
    expected = side.array(side.numpy(wide), dtype)
    np.testing.assert_array_equal(convert.to_numpy(turned), convert.to_numpy(expected))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 25])
def test_alibi_is_that_of_bloom(side, num_heads):
    bias = side.numpy(side.alibi(num_heads, np.arange(S), np.arange(S), dtype=side.array(X).dtype))
    # Bloom's differs by a number for each query.
    ours = np.tril(bias - bias[..., :1])
    with in_float64():
        truth = build_alibi_tensor(torch.ones((1, S)), num_heads, torch.float64).numpy()
    assert_equal(ours, np.tril(np.broadcast_to(truth, ours.shape)))


def test_alibi_falls_to_both_sides(side):
    bias = side.numpy(side.alibi(N, np.arange(S), np.arange(S)))
    assert bias.shape == (N, S, S)
    np.testing.assert_array_equal(bias, bias.transpose(0, 2, 1))
    np.testing.assert_array_equal(np.diagonal(bias, axis1=1, axis2=2), 0)
    np.testing.assert_array_equal(bias[:, 0], -np.arange(S) * 2.0 ** np.array([[-4], [-8]]))


@pytest.mark.parametrize("make", ["alibi", "t5_bias"])
def test_a_bias_of_batched_positions_has_a_row_for_each(side, make):
    first = 4 if make == "alibi" else side.array(RANDOM.normal(size=(32, 4)))
    keys = PACKED[:, ::-1].copy()
    bias = side.numpy(getattr(side, make)(first, PACKED, keys))
    assert bias.shape == (B, 4, T, T)
    for row, positions in enumerate(zip(PACKED, keys, strict=True)):
        np.testing.assert_array_equal(bias[row], side.numpy(getattr(side, make)(first, *positions)))


BUCKETS = [(32, 128), (32, 20), (8, 100), (64, 50), (128, 100), (18, 11), (4, 3), (512, 2000)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), BUCKETS)
def test_buckets_are_those_of_t5(side, bidirectional, num_buckets, max_distance):
    options = {
        "bidirectional": bidirectional,
        "num_buckets": num_buckets,
        "max_distance": max_distance,
    }
    offsets = np.arange(-max_distance - 9, max_distance + 10)
    ours = side.numpy(side.t5_buckets([70], offsets + 70, **options))
    truth = T5Attention._relative_position_bucket(torch.tensor(offsets), *options.values())
    np.testing.assert_array_equal(ours[0], truth.numpy())


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bias_is_that_of_t5(side, is_decoder):
    attention = t5_attention(is_decoder)
    truth = attention.compute_bias(T, S, past_seen_tokens=S - T)[0].detach().numpy()
    table = side.array(attention.relative_attention_bias.weight.detach().numpy())
    options = {"bidirectional": not is_decoder, "max_distance": 6}
    ours = side.t5_bias(table, np.arange(S - T, S), np.arange(S), **options)
    np.testing.assert_array_equal(side.numpy(ours), truth)


def test_gradients_of_the_t5_table(sides):
    table, cotangent = RANDOM.normal(size=(8, N)), RANDOM.normal(size=(B, N, T, T))

    def gradient(side):
        cotangents = side.array(cotangent)
        bias = lambda table: side.t5_bias(table, PACKED, PACKED, max_distance=6)  # noqa: E731
        return side.gradients(lambda table: (bias(table) * cotangents).sum(), side.array(table))[0]

    ours, theirs = map(gradient, sides)
    assert_equal(ours, theirs, tolerance.GRADIENT)
    assert np.abs(ours).max() > 1


def test_sinusoidal_is_the_formula_of_the_paper(side):
    ours = side.sinusoidal(PACKED, WIDTH, dtype=side.array(X).dtype)
    truth = np.empty((B, T, WIDTH))
    for b, t in np.ndindex(B, T):
        for i in range(WIDTH // 2):
            angle = PACKED[b, t] / 10000 ** (2 * i / WIDTH)
            truth[b, t, 2 * i : 2 * i + 2] = math.sin(angle), math.cos(angle)
    assert_equal(side.numpy(ours), truth)
    np.testing.assert_array_equal(
        side.numpy(side.sinusoidal(PACKED[1], WIDTH, dtype=ours.dtype)), side.numpy(ours)[1]
    )


def test_dtypes_of_what_is_made_from_positions_alone(side):
    low = side.array(X.astype("float32"), "bfloat16").dtype
    for make in (
        side.sinusoidal,
        lambda positions, width, **kw: side.alibi(width, positions, positions, **kw),
    ):
        assert make([0, 4099], 6, dtype=low).dtype == low
    assert str(side.sinusoidal([0], 6).dtype) == str(side.alibi(6, [0], [0]).dtype)
    sharp = side.sinusoidal([4099], 6, dtype=side.array(X.astype("float32")).dtype)
    expected = side.array(side.numpy(sharp), "bfloat16")
    np.testing.assert_array_equal(
        convert.to_numpy(side.sinusoidal([4099], 6, dtype=low)), convert.to_numpy(expected)
    )


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.tensor(RANDOM.normal(size=parameter.shape) / parameter.shape[-1] ** 0.5)
            )
    return module.eval()


def t5_attention(is_decoder=False):
    sizes = {"d_model": N * H, "d_kv": H, "num_heads": N}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
    config = T5Config(**sizes, **buckets, is_decoder=is_decoder, dropout_rate=0.0)
    return randomised(T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double())


def multi_head(side, state, **keywords):
    """Return a layer that holds the state of the four projections of a published one."""
    layer = side.build("MultiHeadAttention", N * H, N * H, None, 0.0, N, out_bias=False, **keywords)
    names = ("W_query", "W_key", "W_value", "out_proj")
    state = {f"{name}.weight": weight.detach() for name, weight in zip(names, state, strict=True)}
    if side.is_flax:
        convert.load_state_dict(layer, state)
    else:
        layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("name", ["none", "yarn", "llama3"])
def test_attention_with_rope_is_that_of_llama(side, name):
    x = RANDOM.normal(size=(1, T, N * H))
    positions = PACKED[1]
    with in_float64():
        llama = randomised(LlamaAttention(llama_config(name, num_key_value_heads=1), 0).double())
        hidden = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
        truth, _ = llama(torch.tensor(x), published_cos_sin(name, positions), hidden[None, None])
    state = [
        projection.weight for projection in (llama.q_proj, llama.k_proj, llama.v_proj, llama.o_proj)
    ]
    layer = multi_head(side, state, num_kv_heads=1, rope=rope_of(side, name))
    assert_equal(run(side, layer, x, positions=positions), truth.detach().numpy())


def test_attention_with_relative_bias_and_scale_is_that_of_t5(side):
    x = RANDOM.normal(size=(1, T, N * H))
    t5 = t5_attention()
    with in_float64():
        truth = t5(torch.tensor(x))[0]
    layer = multi_head(
        side,
        [part.weight for part in (t5.q, t5.k, t5.v, t5.o)],
        causal=False,
        scores=side.Scores(scale=1.0),
    )
    table = side.array(t5.relative_attention_bias.weight.detach().numpy())
    bias = side.t5_bias(table, np.arange(T), np.arange(T), max_distance=6)
    assert_equal(run(side, layer, x, bias=bias), truth.detach().numpy())


def run(side, layer, x, **options):
    return side.numpy(side.jit(lambda x, options: layer(x, **options))(side.array(x), options))


def roped(side, **keywords):
    return side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2, rope=side.RoPE(), **keywords)


def test_a_module_counts_positions_from_zero_and_feels_them(side):
    layer, x = roped(side), RANDOM.normal(size=(B, T, 6))
    given = side.jit(lambda x, positions: layer(x, positions=positions))
    default, shifted, spread = (
        side.numpy(given(side.array(x), positions))
        for positions in (np.arange(T), np.arange(T) + 70, 2 * np.arange(T))
    )
    assert_equal(run(side, layer, x), default)
    assert_equal(shifted, default)
    assert not np.allclose(spread, default)


def test_packed_sequences_are_as_they_are_alone(side):
    layer, x = roped(side), RANDOM.normal(size=(T, 6))
    mask = side.Mask.segments(np.array([[8, 8, 8, 2, 2]]))
    together = run(side, layer, x, positions=np.array([0, 1, 2, 0, 1]), mask=mask)
    assert_equal(together, np.concatenate([run(side, layer, part) for part in (x[:3], x[3:])]))


def test_a_scaling_of_ones_own(side):
    class Fixed(Scaling):
        def frequencies(self, base, width):
            return np.arange(1, width // 2 + 1) / self.factor

    turned = side.numpy(side.RoPE(scaling=Fixed(4.0))(side.array(X), side.array(PACKED)))
    angles = PACKED[..., None, None] * np.arange(1, H // 2 + 1) / 4
    assert_equal(
        turned[..., : H // 2], X[..., : H // 2] * np.cos(angles) - X[..., H // 2 :] * np.sin(angles)
    )
