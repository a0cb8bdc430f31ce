"""Bad arguments of rotary positions, scalings and biases made from positions."""

import numpy as np
import pytest

B, T, S, N, H = 3, 5, 7, 2, 16
PACKED = np.array([[0, 1, 2, 0, 1], [90, 91, 92, 93, 94], [7, 3, 0, 41, 5]])


def roped(side, **keywords):
    return side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2, rope=side.RoPE(), **keywords)


def turn(side, *arguments, shape=(B, T, N, H), positions=None, **keywords):
    return side.RoPE(*arguments, **keywords)(side.array(np.ones(shape)), positions)


ERRORS = {
    # Bases and widths.
    "base": (lambda side: side.RoPE(1.0), r"base must be larger than 1, .*got base=1\.0"),
    "a base that is no number": (
        lambda side: side.RoPE("10000"),
        r"^base must be one real number; got base='10000'\. Pass a float of Python",
    ),
    "odd width": (
        lambda side: side.RoPE(width=3),
        r"width must be a positive even integer.*got width=3",
    ),
    "no width": (
        lambda side: side.RoPE(width=0),
        r"width must be a positive even integer.*got width=0",
    ),
    "float width": (
        lambda side: side.RoPE(width=4.0),
        r"width must be a positive even integer.*got width=4\.0",
    ),
    "wide": (
        lambda side: turn(side, width=18),
        r"must not exceed head_dim.*got width=18, head_dim=16\. For all of them use width=None",
    ),
    "odd head": (
        lambda side: turn(side, shape=(T, N, 7)),
        r"head_dim must be a positive even.*got head_dim=7",
    ),
    "integers in place of queries": (
        lambda side: side.RoPE()(side.array(np.ones((B, T, N, H), int))),
        r"^x must be float64, float32, bfloat16 or float16; got int64\. Cast to one of them",
    ),
    # Scalings.
    "factor": (
        lambda side: side.LinearScaling(0.5),
        r"factor is how many times.*got factor=0\.5.*scaling=None",
    ),
    "dynamic length": (lambda side: side.DynamicNTKScaling(2.0, 0), {"original_context_length": 0}),
    "dynamic factor": (lambda side: side.DynamicNTKScaling(0.0, 40), r"got factor=0\.0"),
    "yarn length": (lambda side: side.YaRNScaling(2.0, -1), r"got original_context_length=-1"),
    "yarn betas": (
        lambda side: side.YaRNScaling(2.0, 40, beta_fast=1.0, beta_slow=32.0),
        r"0 < beta_slow < beta_fast; got beta_slow=32\.0, beta_fast=1\.0\. Usual are 1 and 32",
    ),
    # Factors of each frequency.
    "longrope length": (
        lambda side: side.LongRoPEScaling(2.0, 1, (1.0,), (1.0,)),
        r"longest input of the training, above 1; got original_context_length=1",
    ),
    "longrope factors": (
        lambda side: side.LongRoPEScaling(2.0, 4, (1.0,), (0.0,)),
        r"long_factors divide the frequencies and must be positive; got \(0\.0,\)",
    ),
    "longrope width": (
        lambda side: turn(side, scaling=side.LongRoPEScaling(2.0, 4, (1.0,), (2.0,))),
        (
            r"short_factors must be one for each of the 8 frequencies of 16 rotated features; got"
            r" 1\. Take those"
        ),
    ),
    "llama length": (
        lambda side: side.Llama3Scaling(8.0, 2.5),
        r"got original_context_length=2\.5",
    ),
    "llama factors": (
        lambda side: side.Llama3Scaling(low_freq_factor=4.0),
        (
            r"0 < low_freq_factor < high_freq_factor; got low_freq_factor=4\.0,"
            r" high_freq_factor=4\.0\. Usual are 1 and 4"
        ),
    ),
    # Dtypes of positions.
    "float positions": (
        lambda side: turn(side, positions=np.ones(T)),
        (
            r"positions must be integers of shape \(t,\) or \(b, t\); got shape \(5,\), dtype"
            r" float64\. Cast"
        ),
    ),
    "complex positions": (
        lambda side: turn(side, positions=np.ones(T, complex)),
        r"positions must be integers.*dtype complex128",
    ),
    "boolean positions": (
        lambda side: turn(side, positions=np.ones(T, bool)),
        r"must be integers.*dtype bool",
    ),
    # Shapes of positions.
    "rank of positions": (
        lambda side: turn(side, positions=np.ones((1, B, T), int)),
        r"got shape \(1, 3, 5\)",
    ),
    "shape of positions": (
        lambda side: turn(side, positions=np.ones((2, T), int)),
        (
            r"one for each of the tokens \(3, 5\); got shape \(2, 5\), dtype int64\. Without b they"
            r" serve every row"
        ),
    ),
    "batched positions": (
        lambda side: turn(side, shape=(T, N, H), positions=np.ones((B, T), int)),
        r"one for each of the tokens \(5,\); got shape \(3, 5\)",
    ),
    # Biases of positions.
    "alibi heads": (lambda side: side.alibi(0, [0], [0]), {"num_heads": 0}),
    "alibi ranks": (
        lambda side: side.alibi(N, PACKED, PACKED[0]),
        r"both have the same b, or both none; got shapes \(3, 5\) and \(5,\)\. Repeat",
    ),
    "t5 batches": (
        lambda side: side.t5_buckets(PACKED, PACKED[:2]),
        r"got shapes \(3, 5\) and \(2, 5\)",
    ),
    "t5 floats": (lambda side: side.t5_buckets(np.zeros(1), [0]), r"positions must be integers"),
    "t5 buckets": (
        lambda side: side.t5_buckets([0], [0], num_buckets=3),
        r"got 1 buckets a direction",
    ),
    "t5 distance": (
        lambda side: side.t5_buckets([0], [0], num_buckets=32, max_distance=8),
        (
            r"max_distance beyond the half.*got 16 buckets a direction, max_distance=8\. Usual are"
            r" 32 and 128"
        ),
    ),
    # Absolute positions.
    "sinusoidal width": (
        lambda side: side.sinusoidal([0], 5),
        r"width must be a positive even integer.*width=5",
    ),
    "sinusoidal base": (
        lambda side: side.sinusoidal([0], 4, base=0.5),
        r"base must be larger than 1",
    ),
    # Layers with rotary positions.
    "module width": (
        lambda side: side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2, rope=side.RoPE(width=6)),
        r"got width=6, head_dim=4",
    ),
    "module odd head": (
        lambda side: side.build("MultiHeadAttention", 6, 6, 9, 0.0, 2, rope=side.RoPE()),
        r"got head_dim=3",
    ),
    "module positions": (
        lambda side: roped(side)(side.array(np.ones((B, T, 6))), positions=np.arange(4)),
        r"one for each of the tokens \(3, 5\); got shape \(4,\)",
    ),
    "positions without rope": (
        lambda side: side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2)(
            side.array(np.ones((B, T, 6))), positions=np.arange(T)
        ),
        (
            r"positions are for rope; got positions, rope=None\. Construct the module with"
            r" rope=RoPE\(\)"
        ),
    ),
    "rope across": (
        lambda side: roped(side, causal=False)(
            side.array(np.ones((B, T, 6))), side.array(np.ones((B, S, 6)))
        ),
        (
            r"in self-attention; got a key of shape \(3, 7, 6\)\. Leave it out, or construct the"
            r" module with rope=None"
        ),
    ),
}


@pytest.mark.parametrize(("act", "match"), ERRORS.values(), ids=ERRORS)
def test_the_same_words(assert_same_error, act, match):
    assert_same_error(act, match)


@pytest.mark.usefixtures("no_shape_checks")
def test_unknown_kinds(side):
    with pytest.raises(
        ValueError, match=r"scaling must be .*got str\. Pass scaling=LinearScaling\(8\.0\)"
    ):
        side.RoPE(scaling="linear")
    with pytest.raises(ValueError, match=r"rope must be .*got bool\. Pass rope=RoPE\(\)"):
        side.build("MultiHeadAttention", 6, 8, 9, 0.0, 2, rope=True)
