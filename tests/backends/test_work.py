"""The model of a call's time, against what was published of attention on an H100."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from flax_attn import Mask
from flax_attn.backends.call import prepare
from flax_attn.backends.chips import CHIPS
from flax_attn.backends.platform import asked_about
from flax_attn.backends.registry import load
from flax_attn.backends.work import KernelWork, products
from flax_attn.functional.dropout import KeyedDropout

H100 = CHIPS["h100"]


def call(t, n, h, s=None, k=None, b=1, mask=None, platform="gpu", dtype=jnp.bfloat16, dropout=None):
    found = []
    query = jax.ShapeDtypeStruct((b, t, n, h), dtype)
    key = jax.ShapeDtypeStruct((b, s or t, k or n, h), dtype)
    jax.eval_shape(
        lambda q, k: found.append(prepare(q, k, k, mask=mask, dropout=dropout, platform=platform)),
        query,
        key,
    )
    return found[0]


@pytest.mark.parametrize(("h", "published"), [(64, 73e12), (128, 139e12)])
@pytest.mark.usefixtures("no_shape_checks")
def test_separate_kernels_take_about_what_standard_attention_was_published_to_take(h, published):
    # FlashAttention-3, figure 5: 8192 tokens, 16,384 in all, heads of a width of 2048 together.
    one = call(8192, 2048 // h, h, b=2)
    flops = products(one, 8192**2)
    scores = flops // (4 * h) * 2
    # Half precision: the products write scores and read weights, the softmax does the reverse.
    work = KernelWork(3, flops, moved=2 * scores, apart=2 * scores)
    assert 0.75 < work.seconds(H100) / (flops / published) < 1.25


@pytest.mark.parametrize(
    ("name", "h", "known"), [("cudnn", 128, 595e12), ("fused", 128, 0.39 * 989.5e12)]
)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_fused_kernel_reaches_its_published_or_measured_rate(name, h, known):
    with asked_about("h100"):
        one = call(16_384, 2048 // h, h)
        work = load(name).work(one)
    rate = products(one, 16_384**2) / work.seconds(H100)
    assert rate == pytest.approx(known, rel=0.1)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_mask_that_is_an_array_slows_cudnn():
    causal, odd = Mask.causal(), Mask.window(64, 64)
    with asked_about("h100"):
        structure, array = (load("cudnn").work(call(4096, 16, 128, mask=x)) for x in (causal, odd))
    assert array.share / structure.share == pytest.approx(15.8 / 40.6)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_program_computes_whole_tiles_of_queries_and_shares_one_among_heads():
    def flops(t, k):
        with asked_about("h100"):
            return load("fused").work(call(t, 32, 128, s=8192, k=k, mask=Mask.causal(0))).flops

    one = call(64, 32, 128, s=8192)
    assert flops(1, 32) * 8192 == products(one, 64 * 8192)
    assert flops(1, 8) * 4 == flops(1, 32)


@pytest.mark.parametrize("width", [257, 300])
@pytest.mark.usefixtures("no_shape_checks")
def test_a_call_that_is_refused_has_a_predicted_time(width):
    for platform in ("gpu", "tpu"):
        work = load("fused").work(call(64, 2, width, platform=platform, dtype=jnp.float32))
        assert work.seconds(H100) > 0


def test_bytes_that_other_kernels_move_are_not_hidden_behind_products():
    work = KernelWork(0, 10**12, moved=10**9)
    assert work.seconds(H100) == replace(work, moved=0).seconds(H100)
    apart = replace(work, apart=10**9).seconds(H100) - work.seconds(H100)
    assert apart == pytest.approx(10**9 / 3.35e12 * 1.5)


# Pairs of 1024 queries and keys of a head, with a causal mask: those that a backend computes.
ROWS = 1024
PAIRS = {"reference": ROWS**2, "decode": ROWS**2, "fused": ROWS * (ROWS + 1) // 2}


@pytest.mark.parametrize("name", [*PAIRS, "blocked"])
@pytest.mark.usefixtures("no_shape_checks")
def test_dropout_adds_the_time_of_a_number_for_each_pair(name):
    dropout = KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))
    options = {"b": 3, "mask": Mask.causal()}
    with asked_about("h100"):
        without = load(name).work(call(ROWS, 5, 64, **options))
        work = load(name).work(call(ROWS, 5, 64, dropout=dropout, **options))
    assert without.drawn == 0
    if name in PAIRS:
        assert work.drawn == 3 * 5 * PAIRS[name]
    else:  # its tiles follow the triangle
        assert PAIRS["fused"] < work.drawn / 15 < PAIRS["reference"]
    more = work.seconds(H100) - without.seconds(H100)
    assert more == pytest.approx(work.drawn / H100.draws)


def test_a_chip_without_a_figure_that_times_need_is_refused():
    for name in ("flops", "bandwidth", "integers"):
        with pytest.raises(ValueError, match="predicted times need the published rates of a chip"):
            KernelWork(1, 10**9, 10**9).seconds(replace(H100, **{name: None}))
