import re
from dataclasses import replace
from importlib.machinery import ModuleSpec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from flax_attn import KeyedDropout, Mask
from flax_attn.backends import cudnn
from flax_attn.backends.choose import refusal
from flax_attn.backends.reference import BACKEND as REFERENCE

from .calls import both_ways, draw, make_call

B, N, K, T, H = 3, 4, 2, 10, 8

BANDS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "sliding_window": Mask.sliding_window(3),
    "causal_and_window": Mask.causal() & Mask.window(4, 2) & Mask.window(None, 5),
    "lengths": Mask.lengths(query=jnp.array([10, 3, 0]), key=jnp.array([7, 0, 4])),
    "static_lengths": Mask.lengths(query=9) & Mask.lengths(key=6),
    "causal_lengths": Mask.causal() & Mask.lengths(key=jnp.array([10, 0, 4])),
    "window_ends_before_the_keys": Mask.sliding_window(3) & Mask.lengths(key=jnp.array([10, 0, 4])),
    "all_seen": Mask.window(T, T) & Mask.lengths(key=2 * T),
}
ARRAYS = {
    "segments": Mask.segments(np.arange(T) // 3),
    "empty_row_of_one_head": Mask.dense(np.arange(N * T * T).reshape(N, T, T) > T),
}


def build(
    mask=None, bias=None, t=T, s=T, h=H, v=None, dtype=jnp.bfloat16, platform="gpu", **options
):
    shapes = (B, t, N, h), (B, s, K, h), (B, s, K, v or h)
    return make_call(*shapes, mask=mask, bias=bias, dtype=dtype, platform=platform, **options)


@pytest.fixture
def plugin(monkeypatch):
    """Pretend that JAX has its CUDA plugin, so that the later refusals are reached."""
    monkeypatch.setattr(cudnn, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.fixture
def through_xla(monkeypatch):
    """Run cuDNN's calls with XLA instead.

    The arguments are those of one interface, so their meaning is checked.
    """
    attention = jax.nn.dot_product_attention
    monkeypatch.setitem(cudnn._FILLS, "float32", -0.7 * float(jnp.finfo(jnp.float32).max))

    def instead(*arrays, implementation, **options):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # its own lengths do not work with x64 otherwise
            return attention(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)


@pytest.mark.parametrize("name", [*BANDS, "empty_row_of_one_head"])
def test_arguments_mean_the_same_through_xla(name, plugin, through_xla, close):
    call = build((BANDS | ARRAYS)[name], dtype=jnp.float32)
    close(both_ways(cudnn.BACKEND.attend, call), both_ways(REFERENCE.attend, call))


def test_x64_changes_nothing_through_xla(x64, plugin, through_xla, close):
    call = build(BANDS["window_ends_before_the_keys"], dtype=jnp.float32)
    close(cudnn.BACKEND.attend(call), REFERENCE.attend(call))


PADDED = {
    "odd": {"t": 9, "s": 9, "mask": "causal"},
    "odd_lengths": {"t": 1, "s": 9, "mask": "lengths"},
    "odd_array": {"t": 9, "s": 7, "mask": "offset"},
    "odd_bias": {"t": 9, "s": 7, "mask": "none", "bias": (B, N, 9, 7)},
    "bias_of_one_row": {"t": 9, "s": 7, "mask": "none", "bias": (1, N, 1, 7)},
    "half_a_tile": {"s": 64, "mask": "offset"},
    "odd_half_a_tile": {"s": 63, "mask": "offset"},
    "one_number": {"h": 1, "mask": "causal"},
    "widths": {"h": 12, "v": 5, "mask": "causal"},
    "wider_values": {"h": 8, "v": 12, "mask": "none"},
}


@pytest.mark.parametrize("name", PADDED)
def test_what_the_kernels_do_not_take_is_padded(name, plugin, through_xla, close, monkeypatch):
    options = dict(PADDED[name])
    mask, bias = (
        (BANDS | {"offset": Mask.causal(1)})[options.pop("mask")],
        options.pop("bias", None),
    )
    bias = None if bias is None else draw(*bias, seed=3)
    call = build(mask, bias, dtype=jnp.float32, **options)
    assert (
        cudnn.BACKEND.refuse(replace(call, query=call.query.astype(jnp.bfloat16), bias=None))
        is None
    )
    got, attention = [], jax.nn.dot_product_attention

    def taken(query, key, value, *arrays, **options):
        got.append((query.shape, key.shape, value.shape))
        return attention(query, key, value, *arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", taken)
    close(both_ways(cudnn.BACKEND.attend, call), both_ways(REFERENCE.attend, call))
    for (_, t, _, h), (_, s, _, _), (_, _, _, v) in got:
        assert (t % 2, s % 2, h % 8, v) == (0, 0, 0, h)
        assert s % 128 != 64


@pytest.mark.parametrize("shape", [(1, N, T, T), (B, 1, 1, T)])
def test_bias_through_xla(shape, plugin, through_xla, close):
    bias = draw(*shape, seed=3).at[..., 1].set(-jnp.inf)
    call = build(BANDS["causal"], bias, dtype=jnp.float32)
    close(both_ways(cudnn.BACKEND.attend, call), both_ways(REFERENCE.attend, call))


@pytest.mark.parametrize(
    ("name", "mask"),
    [("query", "sliding_window"), ("key", "window_ends_before_the_keys"), ("value", "lengths")],
)
def test_numbers_that_are_not_finite_through_xla(name, mask, plugin, through_xla, close):
    call = build(BANDS[mask], dtype=jnp.float32)
    array = getattr(call, name).at[0, 6, 1, 2].set(jnp.nan).at[2, 4, 0, 0].set(jnp.inf)
    call = replace(call, **{name: array})
    ours = both_ways(cudnn.BACKEND.attend, call)
    assert jnp.isnan(ours["output"]).any()
    assert not jnp.isnan(ours["output"]).all()
    theirs = both_ways(REFERENCE.attend, call)
    close(*({name: side[name] for name in ("output", "query")} for side in (ours, theirs)))


def lowered(call, monkeypatch):
    """Return the custom calls for the whole batch, one per direction.

    JAX would hand them to XLA on a GPU.
    """
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    names = ("query", "key", "value")

    def loss(arrays):
        return cudnn.BACKEND.attend(replace(call, **arrays)).astype(jnp.float32).sum()

    trace = jax.jit(jax.grad(loss)).trace({name: getattr(call, name) for name in names})
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    return [
        line.replace("\\22", "")
        for line in text.splitlines()
        if "__cudnn$fmha" in line and re.search(rf"<{B}x\d", line)
    ]


@pytest.mark.parametrize(
    ("name", "t", "kind", "window", "lengths"),
    [
        ("none", 128, "NO_MASK", 0, 0),
        ("none", 130, "PADDING", 0, 2),
        ("causal", 128, "CAUSAL", 0, 0),
        ("sliding_window", 128, "CAUSAL", 3, 0),
        ("lengths", 128, "PADDING", 0, 2),
        ("window_ends_before_the_keys", 128, "PADDING_CAUSAL", 3, 2),
        ("segments", 128, "NO_MASK", 0, 0),
        ("segments", 130, "PADDING", 0, 2),
    ],
)
def test_lowered_structure(name, t, kind, window, lengths, plugin, monkeypatch):
    mask = Mask.segments(np.arange(t) // 3) if name == "segments" else BANDS[name]
    call = build(mask, t=t, s=t)
    assert cudnn.BACKEND.refuse(call) is None
    calls = lowered(call, monkeypatch)
    assert [re.findall(r"__cudnn\$\w+", line)[0].endswith("Backward") for line in calls] == [
        False,
        True,
    ]
    for line in calls:
        assert f"mask_type: {kind}," in line
        assert f"sliding_window_length: {window}," in line
        assert len(re.findall(rf"tensor<{B}xi32>", line)) == lengths
        assert (f"tensor<1x1x{t}x{t}xbf16>" in line) == (name == "segments")


def test_without_cudnn_lowering_fails_with_the_reason():
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        cudnn.BACKEND.attend(build())


def test_memory():
    assert cudnn.BACKEND.memory(build(BANDS["causal"])) == 2 * H * 4 * T
    copies = 2 * B * H * (2 * T * N + 2 * T * K)
    assert cudnn.BACKEND.memory(build(ARRAYS["segments"])) == copies + 2 * T * T
    assert cudnn.BACKEND.memory(build(ARRAYS["empty_row_of_one_head"])) == copies + 2 * N * T * T
    bias = draw(B, 1, 1, T, dtype=jnp.bfloat16)
    assert cudnn.BACKEND.memory(build(BANDS["causal"], bias)) == copies + 2 * B * T * T
    assert cudnn.BACKEND.memory(build(BANDS["causal"], t=9, s=9, v=3)) == 2 * B * H * (
        2 * T * N + 2 * T * K
    )
    assert cudnn.BACKEND.memory(build(h=12)) == 2 * B * 16 * (2 * T * N + 2 * T * K)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"h": 129}, "head widths up to 128, .* got h=129, v=129"),
        ({"v": 136}, "head widths up to 128, .* got h=8, v=136"),
        ({"scale": jnp.float32(0.5)}, r"takes no array scale; got shape \(\)"),
        ({"soft_cap": 5.0}, "takes no soft_cap; got 5.0"),
        ({"sinks": jnp.zeros(N)}, r"takes no sinks; got shape \(4,\)"),
        (
            {"dropout": KeyedDropout(0.25, jnp.zeros(2, jnp.uint32))},
            "takes no dropout; got rate 0.25",
        ),
        ({"precision": jax.lax.Precision.HIGHEST}, "takes no precision; got .*HIGHEST"),
        (
            {"bias": jnp.zeros((1, 1, T, T))},
            "bias in the dtype of the query, bfloat16; got float32",
        ),
    ],
)
def test_refuses(options, message, plugin):
    assert re.search(message, refusal(cudnn.BACKEND, build(**options)) or "")


def test_refuses_without_the_plugin(monkeypatch):
    monkeypatch.setattr(cudnn, "find_spec", lambda name: None)
    assert 'pip install "jax[cuda]"' in (cudnn.BACKEND.refuse(build()) or "")


@pytest.mark.parametrize(
    ("capability", "widest"), [("8.0", 128), ("9.0", 256), ("10.0", 128), ("12.0", 128)]
)
def test_the_widest_head_is_that_of_the_gpu(capability, widest, plugin, monkeypatch):
    device = type("Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert cudnn.BACKEND.refuse(build(h=widest)) is None
    assert f"and compute capability {capability}" in (
        cudnn.BACKEND.refuse(build(h=widest + 1)) or ""
    )
