"""Positions against Hugging Face's in float64, and against formulas written in another way."""

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
# Documents in one row, a row that goes on, and positions in no order.
PACKED = np.array([[0, 1, 2, 0, 1], [90, 91, 92, 93, 94], [7, 3, 0, 41, 5]])
YARN = {"factor": 4.0, "original_context_length": 40}
# rope_type in Hugging Face, name here, arguments.
SCALINGS = {
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


def turn(side, rope, x=X, positions=PACKED):
    """Return what a RoPE makes of an array."""
    return side.numpy(rope(side.array(x), side.array(positions)))


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
    ours, amplitude = our_frequencies(side, name)
    with in_float64():
        truth, factor = published_frequencies(name)
    assert ours.dtype == np.float64
    assert_equal(ours / truth.numpy(), np.ones(H // 2))
    assert_equal(amplitude, factor)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_of_hugging_face_are_ours_in_float32(side, name):
    ours, _ = our_frequencies(side, name)
    theirs, _ = published_frequencies(name)
    assert theirs.dtype == torch.float32
    errors = tolerance.reordered(one_by_one(ours), one_by_one(theirs.numpy()))
    assert max(errors.values()) <= 1, errors


def one_by_one(frequencies):
    """Return each by itself: the slow ones are thousands of times smaller than the first."""
    return {str(i): one for i, one in enumerate(np.split(frequencies, H // 2))}


@pytest.mark.parametrize("row", range(B))
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_that_of_hugging_face(side, name, row):
    ours = turn(side, rope_of(side, name), X[row], PACKED[row])
    with in_float64():
        cos, sin = published_cos_sin(name, PACKED[row])
        truth, _ = apply_rotary_pos_emb(torch.tensor(X[row]), torch.tensor(X[row]), cos[0], sin[0])
    assert_equal(ours, truth.numpy())


@pytest.mark.parametrize("width", [None, WIDTH])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_complex_numbers(side, interleaved, width):
    half = (width or H) // 2
    real, imaginary = parts(half, interleaved)
    turned = (X[..., real] + 1j * X[..., imaginary]) * turns(half)
    truth = X.copy()
    truth[..., real], truth[..., imaginary] = turned.real, turned.imag
    assert_equal(turn(side, side.RoPE(BASE, width, interleaved)), truth)


def parts(half, interleaved):
    """Return where the real and the imaginary parts are."""
    if interleaved:
        return np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    return np.arange(half), np.arange(half, 2 * half)


def turns(half):
    """Return the complex number that each pair of each token is multiplied by, `(b, t, 1, i)`."""
    frequencies = BASE ** (-np.arange(half) / half)
    return np.exp(1j * PACKED[:, :, None, None] * frequencies)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_row_is_turned_as_it_is_alone(side, name):
    rope = rope_of(side, name, width=WIDTH)
    together = turn(side, rope)
    alone = [turn(side, rope, X[row], PACKED[row]) for row in range(B)]
    np.testing.assert_array_equal(together, alone)
    # Positions without a row are those of all.
    shared = turn(side, rope, X, PACKED[1])
    np.testing.assert_array_equal(shared[1], together[1])


def test_positions_count_from_zero(side):
    default = side.numpy(side.RoPE()(side.array(X)))
    np.testing.assert_array_equal(default, turn(side, side.RoPE(), X, np.arange(T)))
    np.testing.assert_array_equal(default[:, 0], X[:, 0])
    assert (default[:, 1:] != X[:, 1:]).all()


def test_amplitude_scales_what_turns_and_nothing_else(side):
    rope = side.RoPE(width=WIDTH, scaling=side.YaRNScaling(4.0, 40, attention_factor=1.5))
    output = side.numpy(rope(side.array(X), np.zeros(T, int)))
    np.testing.assert_array_equal(output[..., :WIDTH], 1.5 * X[..., :WIDTH])
    np.testing.assert_array_equal(output[..., WIDTH:], X[..., WIDTH:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_differences_of_positions_alone(side, interleaved):
    rope = side.RoPE(BASE, WIDTH, interleaved)
    near, far = (
        scores(*(turn(side, rope, x, PACKED + shift) for x in (X, COTANGENT))) for shift in (0, 57)
    )
    assert_equal(far, near)
    assert np.abs(near - scores(X, COTANGENT)).max() > 1


def scores(query, key):
    return np.einsum("b t n h, b s n h -> b n t s", query, key)


@pytest.mark.parametrize("name", SCALINGS)
def test_gradients_of_rope(sides, name):
    def gradient(side):
        rope = rope_of(side, name, width=WIDTH, interleaved=name == "linear")
        positions, cotangent = side.array(PACKED), side.array(COTANGENT)
        return side.gradients(lambda x: (rope(x, positions) * cotangent).sum(), side.array(X))[0]

    assert_equal(*map(gradient, sides), rule=tolerance.GRADIENT)


# Positions that bfloat16 does not hold.
LARGE = np.array([257, 1027, 4099, 65537, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_dtypes_turn_in_float32(side, dtype):
    low = side.array(X.astype("float32"), dtype)
    wide = side.array(side.numpy(low).astype("float32"))
    turned, expected = (side.RoPE(width=WIDTH)(x, side.array(LARGE)) for x in (low, wide))
    assert turned.dtype == low.dtype
    assert str(expected.dtype).endswith("float32")
    assert_rounded(side, turned, expected, dtype)


def assert_rounded(side, low, wide, dtype):
    """Assert that numbers in a low dtype are those of a wide one, rounded once."""
    rounded = side.array(side.numpy(wide), dtype)
    np.testing.assert_array_equal(side.numpy(low), side.numpy(rounded))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 25])
def test_alibi_is_that_of_bloom(side, num_heads):
    bias = side.numpy(side.alibi(num_heads, np.arange(S), np.arange(S), dtype=side.array(X).dtype))
    # Bloom's differs by a number for each query.
    # And it is only read where a causal mask shows it.
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


# Numbers of buckets, and the distance from which on all share one.
BUCKETS = [(32, 128), (32, 20), (8, 100), (64, 50), (128, 100), (18, 11), (4, 3), (512, 2000)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", BUCKETS)
def test_buckets_are_those_of_t5(side, bidirectional, sizes):
    options = {"bidirectional": bidirectional}
    options |= dict(zip(("num_buckets", "max_distance"), sizes, strict=True))
    # Also further away than that.
    offsets = np.arange(-sizes[1] - 9, sizes[1] + 10)
    ours = side.numpy(side.t5_buckets([70], offsets + 70, **options))
    truth = T5Attention._relative_position_bucket(torch.tensor(offsets), **options)
    np.testing.assert_array_equal(ours[0], truth.numpy())


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bias_is_that_of_t5(side, is_decoder):
    attention = t5_attention(is_decoder)
    # The queries are the last ones of the keys.
    truth = attention.compute_bias(T, S, past_seen_tokens=S - T)[0].detach().numpy()
    table = side.array(attention.relative_attention_bias.weight.detach().numpy())
    options = {"bidirectional": not is_decoder, "max_distance": 6}
    ours = side.t5_bias(table, np.arange(S - T, S), np.arange(S), **options)
    np.testing.assert_array_equal(side.numpy(ours), truth)


def test_gradients_of_the_t5_table(sides):
    table, cotangent = RANDOM.normal(size=(8, N)), RANDOM.normal(size=(B, N, T, T))
    ours, theirs = (gradient_of_the_table(side, table, cotangent) for side in sides)
    assert_equal(ours, theirs, tolerance.GRADIENT)
    assert np.abs(ours).max() > 1


def gradient_of_the_table(side, table, cotangent):
    def total(table):
        bias = side.t5_bias(table, PACKED, PACKED, max_distance=6)
        return (bias * side.array(cotangent)).sum()

    return side.gradients(total, side.array(table))[0]


def test_sinusoidal_is_the_formula_of_the_paper(side):
    ours = side.numpy(side.sinusoidal(PACKED, WIDTH, dtype=side.array(X).dtype))
    angles = PACKED[..., None] / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    assert_equal(ours[..., 0::2], np.sin(angles))
    assert_equal(ours[..., 1::2], np.cos(angles))
    alone = side.sinusoidal(PACKED[1], WIDTH, dtype=side.array(X).dtype)
    np.testing.assert_array_equal(side.numpy(alone), ours[1])


def test_dtypes_of_what_is_made_from_positions_alone(side):
    low = dtype_of(side, "bfloat16")
    assert side.sinusoidal([0, 4099], 6, dtype=low).dtype == low
    assert side.alibi(6, [0, 4099], [0, 4099], dtype=low).dtype == low
    assert str(side.sinusoidal([0], 6).dtype) == str(side.alibi(6, [0], [0]).dtype)


def test_sinusoidal_in_bfloat16_is_rounded_once(side):
    low, wide = (
        side.sinusoidal([4099], 6, dtype=dtype_of(side, name)) for name in ("bfloat16", "float32")
    )
    assert_rounded(side, low, wide, "bfloat16")


def dtype_of(side, name):
    """Return a dtype of this side."""
    return side.array(np.zeros(1, "float32"), name).dtype


def randomised(module):
    """Return a module of Hugging Face whose parameters are all drawn."""
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = RANDOM.normal(size=parameter.shape) / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.tensor(drawn))
    return module.eval()


def t5_attention(is_decoder=False):
    sizes = {"d_model": N * H, "d_kv": H, "num_heads": N}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
    config = T5Config(**sizes, **buckets, is_decoder=is_decoder, dropout_rate=0.0)
    return randomised(T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double())


def multi_head(side, projections, **keywords):
    """Return a layer that holds the weights of the four projections of a published one."""
    layer = side.build("MultiHeadAttention", N * H, N * H, None, 0.0, N, out_bias=False, **keywords)
    names = ("W_query.weight", "W_key.weight", "W_value.weight", "out_proj.weight")
    weights = [projection.weight.detach() for projection in projections]
    load = convert.load_state_dict if side.is_flax else torch.nn.Module.load_state_dict
    load(layer, dict(zip(names, weights, strict=True)))
    return layer


@pytest.mark.parametrize("name", ["none", "yarn", "llama3"])
def test_attention_with_rope_is_that_of_llama(side, name):
    x = RANDOM.normal(size=(1, T, N * H))
    llama = randomised(LlamaAttention(llama_config(name, num_key_value_heads=1), 0).double())
    projections = (llama.q_proj, llama.k_proj, llama.v_proj, llama.o_proj)
    layer = multi_head(side, projections, num_kv_heads=1, rope=rope_of(side, name))
    ours = run(side, layer, x, positions=PACKED[1])
    assert_equal(ours, output_of_llama(llama, x, name, PACKED[1]))


def output_of_llama(llama, x, name, positions):
    hidden = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    with in_float64():
        cos_sin = published_cos_sin(name, positions)
        output, _ = llama(torch.tensor(x), cos_sin, hidden[None, None])
    return output.detach().numpy()


def test_attention_with_relative_bias_and_scale_is_that_of_t5(side):
    x, t5 = RANDOM.normal(size=(1, T, N * H)), t5_attention()
    with in_float64():
        truth, *_ = t5(torch.tensor(x))
    layer = multi_head(side, (t5.q, t5.k, t5.v, t5.o), causal=False, scores=side.Scores(scale=1.0))
    ours = run(side, layer, x, bias=bias_of_t5(side, t5))
    assert_equal(ours, truth.detach().numpy())


def bias_of_t5(side, t5):
    table = side.array(t5.relative_attention_bias.weight.detach().numpy())
    return side.t5_bias(table, np.arange(T), np.arange(T), max_distance=6)


def run(side, layer, x, **options):
    return side.numpy(side.jit(lambda x, options: layer(x, **options))(side.array(x), options))


def roped(side, **keywords):
    return side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2, rope=side.RoPE(), **keywords)


def test_a_module_counts_positions_from_zero_and_feels_them(side):
    layer, x = roped(side), RANDOM.normal(size=(B, T, 6))
    default = run(side, layer, x)
    assert_equal(run(side, layer, x, positions=np.arange(T)), default)
    # Only differences count.
    assert_equal(run(side, layer, x, positions=np.arange(T) + 70), default)
    assert not np.allclose(run(side, layer, x, positions=2 * np.arange(T)), default)


def test_packed_sequences_are_as_they_are_alone(side):
    layer, x = roped(side), RANDOM.normal(size=(T, 6))
    mask = side.Mask.segments(np.array([[8, 8, 8, 2, 2]]))
    together = run(side, layer, x, positions=np.array([0, 1, 2, 0, 1]), mask=mask)
    assert_equal(together, np.concatenate([run(side, layer, part) for part in (x[:3], x[3:])]))


class Fixed(Scaling):
    """Frequencies that are no powers of a base."""

    def frequencies(self, base, width):
        return np.arange(1, width // 2 + 1) / self.factor


def test_a_scaling_of_ones_own(side):
    turned = turn(side, side.RoPE(scaling=Fixed(4.0)))
    angles = PACKED[..., None, None] * np.arange(1, H // 2 + 1) / 4
    real, imaginary = np.split(X, 2, axis=-1)
    assert_equal(turned[..., : H // 2], real * np.cos(angles) - imaginary * np.sin(angles))
