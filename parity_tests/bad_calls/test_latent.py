"""Bad latent attention: the same error in the same words on both sides."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("no_shape_checks")
WIDTHS = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 2}


def latent(side, **options):
    return side.build("MultiHeadLatentAttention", 6, 6, 9, 0.0, 2, **WIDTHS | options)


def call(side, cache=None, **options):
    return latent(side).attend(side.array(np.zeros((2, 3, 6))), cache=cache, **options)


CASES = {
    # Sizes and names.
    "no latent": (lambda side: latent(side, kv_lora_rank=0), {"kv_lora_rank": 0}),
    "no values": (lambda side: latent(side, v_head_dim=0), {"v_head_dim": 0}),
    "form": (
        lambda side: latent(side, form="wide"),
        r"form must be one of 'auto', 'plain', 'absorbed'; got 'wide'",
    ),
    # Parts that do not fit.
    "odd rotated part": (
        lambda side: latent(side, qk_rope_head_dim=3, rope=side.RoPE()),
        r"head_dim must be .*even.*3",
    ),
    "norm of another width": (
        lambda side: latent(side, kv_norm=side.build("RMSNorm", 4)),
        r"kv_norm is as wide as its latent, 5; got one of d_model=4\. Pass kv_norm=RMSNorm\(5\)",
    ),
    "norm of no latent": (
        lambda side: latent(side, q_norm=side.build("RMSNorm", 4)),
        (
            r"q_norm norms the latent of queries; got q_lora_rank=None\. Leave out q_norm, or pass"
            r" a rank"
        ),
    ),
    "capacity": (lambda side: latent(side).init_cache(2, 10), r"got capacity=10, context_length=9"),
    # A latent cache has one head, and no values.
    "a cache of another width": (
        lambda side: call(side, latent(side, kv_lora_rank=6).init_cache(2, 8)),
        r"key \(2, 1, 8, 9\), value \(2, 1, 8, 0\); got key \(2, 1, 8, 10\), value \(2, 1, 8, 0\)",
    ),
    "a cache with values": (
        lambda side: call(side, side.KVCache.zeros(2, 8, 1, 9)),
        r"got key \(2, 1, 8, 9\), value \(2, 1, 8, 9\)\. Pass what init_cache",
    ),
    "a cache of several heads": (
        lambda side: call(side, side.KVCache.zeros(2, 8, 2, 9, value_dim=0)),
        r"got key \(2, 2, 8, 9\)",
    ),
    "a ring buffer without a window": (
        lambda side: call(side, side.KVCache.zeros(2, 8, 1, 9, value_dim=0, window=4)),
        r"got one of window=4 for a layer of window=None",
    ),
    # Calls.
    "positions without rope": (
        lambda side: call(side, positions=side.array(np.arange(3))),
        r"positions are for rope; got positions, rope=None",
    ),
    "too many tokens": (
        lambda side: latent(side)(side.array(np.zeros((2, 10, 6)))),
        r"query must not be longer than context_length=9 tokens; got 10",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_latent_attention_is_refused(case, assert_same_error):
    assert_same_error(*CASES[case])
