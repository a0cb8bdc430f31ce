"""Bad shapes of the delta rule and the short convolution, and calls that a state cannot answer."""

import numpy as np
import pytest

B, T, K, N, H, V = 2, 5, 2, 4, 3, 6
SHAPES = {
    "query": (B, T, K, H),
    "key": (B, T, K, H),
    "value": (B, T, N, V),
    # Numbers beside each token.
    "decay": (B, T, N),
    "beta": (B, T, N),
}


def rule(side, **shapes):
    """Call the delta rule with arrays of other shapes, or of another dtype."""
    arrays = {
        name: np.zeros(shape) if isinstance(shape, tuple) else shape
        for name, shape in (SHAPES | shapes).items()
    }
    return side.gated_delta_rule(**{name: side.array(array) for name, array in arrays.items()})


def convolution(side, x=(B, T, 3), kernel=(4, 3), **shapes):
    arrays = {name: side.array(np.zeros(shape)) for name, shape in shapes.items()}
    convolve = side.file("functional.short_convolution").short_convolution
    return convolve(side.array(np.zeros(x)), side.array(np.zeros(kernel)), **arrays)


def layer(side, x=(B, T, 6), call=lambda side: {}, **options):
    options = {"num_heads": 4, "head_dim": 3} | options
    module = side.build("GatedDeltaNet", 6, 6, **options)
    return module.attend(side.array(np.zeros(x)), **call(side))


def cached(side, lengths):
    module = side.build("GatedDeltaNet", 6, 6, num_heads=4, head_dim=3)
    x, cache = side.array(np.zeros((B, T, 6))), module.init_cache(B, 8)
    return module.attend(x, cache=cache, lengths=lengths)


def kernel_of(side, size):
    return side.build("GatedDeltaNet", 6, 6, 4, 3, kernel_size=size)


MASKS = (
    r"takes causal masks, segments and lengths, as its state holds all tokens before; got Mask\.{}"
)
BAD = {
    # Shapes.
    "another key": (
        lambda side: rule(side, key=(B, T, K, 4)),
        (
            r"query and key must have shape \(b, t, k, h\) both.*got query \(2, 5, 2, 3\), key \(2,"
            r" 5, 2, 4\)"
        ),
    ),
    "a rank of two": (
        lambda side: rule(side, query=(T, H), key=(T, H)),
        r"or all three without b; got query \(5, 3\)",
    ),
    "no tokens": (
        lambda side: rule(side, query=(B, 0, K, H), key=(B, 0, K, H), value=(B, 0, N, V)),
        r"the same rows b and tokens t, at least one",
    ),
    "heads that do not divide": (
        lambda side: rule(side, value=(B, T, 3, V)),
        (
            r"heads k of the query must divide the heads n of the value; got query \(2, 5, 2, 3\),"
            r" value \(2, 5, 3, 6\)"
        ),
    ),
    "decay": (
        lambda side: rule(side, decay=(B, T, N, V)),
        (
            r"one number a head, \(2, 5, 4\), or one a feature of its key, \(2, 5, 4, 3\); got \(2,"
            r" 5, 4, 6\)"
        ),
    ),
    "beta": (
        lambda side: rule(side, beta=(B, T, K)),
        r"beta must have shape \(2, 5, 4\) beside query",
    ),
    "state": (
        lambda side: rule(side, state=(B, N, H, V)),
        r"state must have shape \(2, 4, 6, 3\) .*\(2, 4, 3, 6\)",
    ),
    "starts": (
        lambda side: rule(side, starts=np.zeros((B, 4), bool)),
        r"starts must have shape \(2, 5\)",
    ),
    # Dtypes.
    "integers": (
        lambda side: rule(side, value=np.zeros((B, T, N, V), "int32")),
        r"all but starts must be float64, .* or float16; got int32\. Cast to one of them before",
    ),
    # The short convolution.
    "convolution of a rank": (
        lambda side: convolution(side, (3,)),
        r"x must have shape \(t, d\) or \(b, t, d\)",
    ),
    "kernel": (
        lambda side: convolution(side, kernel=(4, 2)),
        r"w numbers for each of the d=3 features.*got \(4, 2\)",
    ),
    "inputs before": (
        lambda side: convolution(side, state=(B, 4, 3)),
        r"state must have shape \(2, 3, 3\)",
    ),
    # Sizes of the layer.
    "heads of keys": (
        lambda side: layer(side, num_key_heads=3),
        r"num_key_heads must divide num_heads.*got num_heads=4, num_key_heads=3",
    ),
    "no heads": (lambda side: layer(side, num_heads=0), {"num_heads": 0}),
    "no width": (lambda side: layer(side, head_dim=0), {"head_dim": 0}),
    "no kernel": (lambda side: kernel_of(side, 0), {"kernel_size": 0}),
    "width": (
        lambda side: layer(side, (B, T, 5)),
        r"the last axis of query must be d_in=6; got shape \(2, 5, 5\)",
    ),
    # What a state cannot answer.
    "weights": (
        lambda side: layer(side, call=lambda side: {"return_weights": True}),
        (
            r"has a state, and no scores, weights or positions; got return_weights=\. Leave it out,"
            r" or use MultiHead"
        ),
    ),
    "positions": (
        lambda side: layer(side, call=lambda side: {"positions": side.array(np.arange(T))}),
        r"got positions=\. Leave it out",
    ),
    # Masks of which it holds no keys.
    "window": (
        lambda side: layer(side, call=lambda side: {"mask": side.Mask.sliding_window(3)}),
        MASKS.format(r"window\(2, 0\)\. Use MultiHeadAttention for other masks"),
    ),
    "dense": (
        lambda side: layer(side, call=lambda side: {"mask": side.array(np.ones((T, T), bool))}),
        MASKS.format("dense"),
    ),
    "offset": (
        lambda side: layer(side, call=lambda side: {"mask": side.Mask.causal(offset=2)}),
        MASKS.format(r"causal\("),
    ),
    # Lengths.
    "too many": (
        lambda side: cached(side, T + 1),
        r"real tokens of a call of t=5 tokens; got lengths=6\. Use 0 to 5",
    ),
    "too many without a cache": (
        lambda side: layer(side, call=lambda side: {"lengths": [T, T + 1]}),
        r"real tokens of a call of t=5 tokens; got lengths=6\. Use 0 to 5",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_one_message_on_both_sides(name, assert_same_error):
    assert_same_error(*BAD[name])


def test_an_unknown_option_is_an_error_of_python(side):
    with pytest.raises(TypeError, match=r"a recurrent attention takes no window=; got int"):
        layer(side, call=lambda side: {"window": 3})
