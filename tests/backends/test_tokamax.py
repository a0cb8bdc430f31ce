import re
from dataclasses import replace
from importlib.machinery import ModuleSpec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import KeyedDropout, Mask
from flax_attn.backends import tokamax
from flax_attn.backends.call import Unsupported
from flax_attn.backends.choose import refusal
from flax_attn.backends.reference import BACKEND as REFERENCE

from .calls import both_ways, draw, make_call

B, N, K, T, S, H = 3, 4, 2, 5, 7, 8

STRUCTURE = {
    "none": Mask(),
    "causal": Mask.causal(0),
    "two_sided_window": Mask.window(2, 1, 0),
    "left_window": Mask.causal(0) & Mask.window(1, 3, 0),
    "right_window": Mask.window(None, 1, 0),
    "lengths": Mask.lengths(query=jnp.array([5, 3, 0]), key=jnp.array([7, 0, 4])),
    "causal_lengths": Mask.causal(0) & Mask.lengths(key=jnp.array([7, 0, 2])),
}
ARRAYS = {
    "window_ends_before_the_keys": (
        Mask.sliding_window(2, 0) & Mask.lengths(key=jnp.array([7, 0, 2]))
    ),
    "offset": Mask.causal(-2),
    "segments": Mask.segments(np.array([0, 0, 1, 1, 9]), np.array([0, 0, 0, 1, 1, 2, 3])),
    "dense_of_all_axes": Mask.dense(np.arange(B * N * T * S).reshape(B, N, T, S) % 7 > 2),
}


def build(mask=None, bias=None, t=T, v=None, dtype=jnp.bfloat16, platform="gpu", **options):
    shapes = (B, t, N, H), (B, S, K, H), (B, S, K, v or H)
    return make_call(*shapes, mask=mask, bias=bias, dtype=dtype, platform=platform, **options)


@pytest.fixture
def check(close):
    """Outputs equal the reference when tokamax runs its XLA implementation.

    This checks the arguments of its kernels, not the kernels.
    """
    pytest.importorskip("tokamax", reason="tokamax is an optional package")

    def check(call, name="xla", only=None):
        ours, theirs = (
            both_ways(lambda call: tokamax.attend_with(call, name), call),
            both_ways(REFERENCE.attend, call),
        )
        close(*({key: side[key] for key in only or side} for side in (ours, theirs)))
        return ours

    return check


@pytest.fixture
def installed(monkeypatch):
    """Pretend that tokamax is installed, so that the later refusals are reached."""
    monkeypatch.setattr(tokamax, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.parametrize("name", [*STRUCTURE, *ARRAYS])
def test_arguments_mean_the_same_through_its_xla(name, check):
    check(build((STRUCTURE | ARRAYS)[name], dtype=jnp.float32))


@pytest.mark.parametrize("name", ["left_window", "causal_lengths", "segments"])
def test_arguments_mean_the_same_through_its_chunked_xla(name, check):
    check(build((STRUCTURE | ARRAYS)[name], dtype=jnp.float32), "xla_chunked")


def test_more_queries_than_a_window_reaches_through_its_xla(check):
    check(build(Mask.window(1, 2, 0), t=S + 4, dtype=jnp.float32))


def test_soft_cap_and_bias_through_its_xla(check):
    bias = (
        draw(B, 1, T, S, seed=3)
        .at[:, :, 2]
        .set(-jnp.inf)
        .at[:, :, 3]
        .set(jnp.finfo(jnp.float32).min)
    )
    check(build(STRUCTURE["causal"], bias, soft_cap=1.5, dtype=jnp.float32))


@pytest.mark.parametrize("mask", ["two_sided_window", "causal_lengths", "segments"])
def test_numbers_that_are_not_finite_through_its_xla(mask, check):
    call = build((STRUCTURE | ARRAYS)[mask], dtype=jnp.float32)
    key = call.key.at[0, 2, 1, 2].set(jnp.nan).at[2, 3, 0, 0].set(jnp.inf)
    # The gradients of keys and values sum over the rows that are NaN; what stands by queries is
    # told apart.
    output = check(replace(call, key=key), only=("output", "query"))["output"]
    assert jnp.isnan(output).any()
    assert not jnp.isnan(output).all()


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_makes_no_array(name, monkeypatch):
    monkeypatch.setattr(tokamax, "attend_dense", None)
    monkeypatch.setattr(tokamax, "attend_band", lambda call, kernel: jnp.float32(7))
    monkeypatch.setattr(
        tokamax, "import_module", lambda name: type("Package", (), {"dot_product_attention": None})
    )
    assert tokamax.attend_with(build(STRUCTURE[name]), "xla") == 7


@pytest.mark.parametrize(
    ("name", "t"), [("window_ends_before_the_keys", T), ("left_window", S + 4)]
)
def test_rows_without_a_key_do_not_reach_the_kernels(name, t, monkeypatch):
    def attention(query, key, value, bias, visible, **options):
        assert bool(visible.any(axis=-1).all())
        return query

    monkeypatch.setattr(
        tokamax,
        "import_module",
        lambda name: type("Package", (), {"dot_product_attention": attention}),
    )
    output = tokamax.attend_with(build((STRUCTURE | ARRAYS)[name], t=t), "xla")
    assert not output.all()


def test_a_limit_of_the_kernels_is_a_refusal(monkeypatch):
    def limited(call, name):
        raise NotImplementedError("not on this GPU")

    monkeypatch.setattr(tokamax, "attend_with", limited)
    with pytest.raises(Unsupported, match="tokamax: not on this GPU"):
        tokamax.BACKEND.attend(build())


def test_memory():
    assert tokamax.BACKEND.memory(build(STRUCTURE["two_sided_window"])) == 2 * 2 * H * (T + S)
    copies = 2 * B * H * (2 * T * N + 2 * S * K)
    assert tokamax.BACKEND.memory(build(ARRAYS["segments"])) == copies + T * S
    assert (
        tokamax.BACKEND.memory(build(ARRAYS["segments"], draw(1, N, T, S)))
        == copies + 5 * N * T * S
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v": 16}, "one head width; got h=8, v=16"),
        ({"scale": jnp.float32(0.5)}, r"takes no array scale; got shape \(\)"),
        ({"soft_cap": 5.0}, "gradient of the soft cap .* got soft_cap=5.0"),
        ({"sinks": jnp.zeros(N)}, r"takes no sinks; got shape \(4,\)"),
        (
            {"dropout": KeyedDropout(0.25, jnp.zeros(2, jnp.uint32))},
            "takes no dropout; got rate 0.25",
        ),
        ({"precision": jax.lax.Precision.HIGHEST}, "takes no precision; got .*HIGHEST"),
    ],
)
def test_refuses(options, message, installed):
    assert re.search(message, refusal(tokamax.BACKEND, build(**options)) or "")


def test_takes_what_it_can(installed):
    assert all(
        tokamax.BACKEND.refuse(build(mask)) is None for mask in (STRUCTURE | ARRAYS).values()
    )


@pytest.mark.parametrize(
    ("capability", "name"),
    [("8.0", "triton"), ("9.0", "mosaic_gpu"), ("10.3", "mosaic_gpu"), ("12.0", "triton")],
)
def test_kernels_with_a_gradient(capability, name, monkeypatch, installed):
    device = type("Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert tokamax.implementation() == name
    assert (tokamax.BACKEND.refuse(build(soft_cap=5.0)) is None) == (name == "mosaic_gpu")


def test_refuses_when_absent(monkeypatch):
    monkeypatch.setattr(tokamax, "find_spec", lambda name: None)
    assert "pip install tokamax (Python 3.12 or newer)" in (tokamax.BACKEND.refuse(build()) or "")
