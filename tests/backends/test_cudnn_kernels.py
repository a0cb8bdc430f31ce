"""What `cudnn` accepts and refuses, against the kernels that cuDNN builds for an H200.

`make test-gpu` runs it.

Nothing is run and no GPU is needed. Elsewhere than in the environment of `make gpu` all of it is
skipped.
"""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct
from jax._src.cudnn import fused_attention_stablehlo

from flax_attn import KeyedDropout, Mask
from flax_attn.bench.calls import ModelCall, with_gradients
from flax_attn.device.kernels import kernel
from tools.aot.compiled import compiled

pytestmark = pytest.mark.usefixtures("no_shape_checks")

B, T, N, H = 2, 512, 4, 64


def integers(make, *shape):
    return jax.eval_shape(make, ShapeDtypeStruct(shape, jnp.int32))


def dense(*shape):
    return jax.eval_shape(Mask.dense, ShapeDtypeStruct(shape, bool))


CAUSAL, WINDOW = Mask.causal(), Mask.sliding_window(128)
LENGTHS = integers(lambda rows: Mask.lengths(query=rows, key=rows), B)
SEGMENTS = integers(Mask.segments, B, T)

TAKES = {
    "float16": {"dtype": "float16", "mask": CAUSAL},
    # head widths
    **{
        f"h={h}": {"h": h, "mask": CAUSAL}
        for h in (1, 4, 8, 24, 72, 96, 100, 128, 136, 192, 200, 256)
    },
    **{
        f"h={h}, v={v}": {"h": h, "v": v, "mask": CAUSAL}
        for h, v in ((192, 128), (64, 128), (40, 5), (8, 250))
    },
    # numbers of tokens, which are odd or fill no tile
    **{
        f"t={t}, s={s}": {"t": t, "s": s}
        for t, s in (
            (1, 512),
            (2, 512),
            (512, 1),
            (3, 5),
            (192, 192),
            (197, 197),
            (448, 1500),
            (513, 512),
            (512, 513),
        )
    },
    "5000 causal": {"t": 5000, "mask": CAUSAL},
    "odd causal": {"t": 513, "mask": CAUSAL},
    "odd window": {"t": 513, "mask": WINDOW},
    # heads and batch
    **{
        f"n={n}, k={k}, b={b}": {"n": n, "k": k, "b": b, "mask": CAUSAL}
        for n, k, b in ((8, 2, 1), (5, 1, 3), (1, 1, 1))
    },
    "many heads": {"n": 64, "k": 8, "b": 1, "h": 128, "mask": CAUSAL},
    # structure
    "window": {"mask": WINDOW},
    "window of one": {"mask": Mask.sliding_window(1)},
    "lengths": {"mask": LENGTHS},
    "causal and lengths": {"mask": CAUSAL & LENGTHS},
    "window and lengths": {"mask": WINDOW & LENGTHS},
    "wide window and lengths": {"h": 256, "mask": WINDOW & LENGTHS},
    # arrays
    "causal, t < s": {"t": 256, "s": 512, "mask": Mask.causal(256)},
    "causal, t > s": {"t": 512, "s": 256, "mask": Mask.causal(0)},
    "window, t > s": {"t": 512, "s": 256, "mask": Mask.sliding_window(128, 0)},
    "two-sided window": {"mask": Mask.window(64, 64)},
    "segments": {"mask": CAUSAL & SEGMENTS},
    "prefix": {"mask": Mask.prefix(100)},
    "wide segments": {"h": 256, "mask": SEGMENTS},
    "half a tile": {"t": 192, "mask": Mask.window(64, 64)},
    "odd array": {"t": 197, "mask": Mask.window(64, 64)},
    "one query, array": {"t": 1, "s": 512, "mask": Mask.causal(511) & LENGTHS},
    **{
        f"dense {shape}": {"mask": dense(*shape)}
        for shape in ((1, 1, T, T), (B, 1, 1, T), (1, N, T, T), (B, N, T, T))
    },
    # bias, with its gradient
    **{
        f"bias {shape}": {"bias": shape}
        for shape in (
            (1, 1, T, T),
            (B, 1, T, T),
            (1, N, T, T),
            (B, N, T, T),
            (B, 1, 1, T),
            (1, N, T, 1),
            (1, N, 1, 1),
        )
    },
    "bias, causal": {"bias": (1, N, T, T), "mask": CAUSAL},
    "bias, lengths": {"bias": (1, N, T, T), "mask": LENGTHS},
    "bias, dense": {"bias": (1, N, T, T), "mask": dense(B, 1, T, T)},
    "bias, grouped": {"bias": (1, 8, T, T), "n": 8, "k": 2},
    "bias, wide": {"bias": (1, N, T, T), "h": 256},
    "bias, odd": {"bias": (1, N, 197, 197), "t": 197},
    "bias, half a tile": {"bias": (1, N, 192, 192), "t": 192},
    "bias, float16": {"bias": (1, N, T, T), "dtype": "float16"},
}

REFUSES = {
    "float32": ({"dtype": "float32"}, "cudnn takes bfloat16, float16; got dtype float32"),
    "too wide": ({"h": 257}, "on Hopper .* up to 256; got h=257"),
    "values too wide": ({"v": 264}, "on Hopper .* up to 256; got h=64, v=264"),
    "soft cap": ({"soft_cap": 30.0}, "takes no soft_cap"),
    "sinks": ({"sinks": ShapeDtypeStruct((N,), jnp.float32)}, "takes no sinks"),
    "dropout": (
        {"dropout": KeyedDropout(0.1, ShapeDtypeStruct((2,), jnp.uint32))},
        "takes no dropout",
    ),
    "precision": ({"precision": "highest"}, "takes no precision"),
    "another bias": (
        {"bias": (1, 1, T, T), "bias_dtype": "float32"},
        "bias in the dtype of the query",
    ),
}

KERNELS_REFUSE = {
    "float32": ({"dtype": "float32"}, "Q must be fp16/bf16"),
    "no multiple of 8": ({"h": 12}, "multiple of 8"),
    "too wide": ({"h": 264}, "less than or equal to 256"),
}


def build(
    b=B,
    t=T,
    s=None,
    n=N,
    k=None,
    h=H,
    v=None,
    dtype="bfloat16",
    bias=None,
    bias_dtype=None,
    **options,
):
    s, k, v = s or t, k or n, v or h
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, v)} | (
        {"bias": bias} if bias else {}
    )
    arrays = {name: ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    if bias_dtype:
        arrays["bias"] = ShapeDtypeStruct(bias, bias_dtype)
    arrays |= {name: options.pop(name) for name in ("mask", "sinks", "dropout") if name in options}
    return ModelCall("", arrays, options, tuple(shapes))


def kernels(gpu_target, call, attend):
    """The names of the calls of cuDNN that a call and its gradients compile to."""
    function = with_gradients(call, lambda arrays: attend(**arrays, **call.options))
    program = compiled(
        gpu_target, function, (call.arrays, call.cotangent), call.arrays["query"].shape[0]
    )
    return re.findall(r'custom_call_target="__cudnn\$(\w+)"', program.as_text() or "")


@pytest.mark.parametrize("name", TAKES)
def test_what_is_taken_has_kernels(name, gpu_target):
    backward = [
        found.endswith("Backward")
        for found in kernels(gpu_target, build(**TAKES[name]), kernel("cudnn").ours)
    ]
    assert set(backward) == {True, False}


@pytest.mark.parametrize("name", REFUSES)
def test_what_is_refused_says_why(name, gpu_target):
    options, message = REFUSES[name]
    with pytest.raises(ValueError, match=message):
        kernels(gpu_target, build(**options), kernel("cudnn").ours)


@pytest.mark.parametrize("name", KERNELS_REFUSE)
def test_what_is_refused_has_no_kernel(name, gpu_target):
    """Kernels are really built: else a call of any width compiles, and only the GPU refuses it."""
    options, message = KERNELS_REFUSE[name]
    with (
        mock.patch.object(fused_attention_stablehlo, "check_is_flash_attention", return_value=None),
        pytest.raises(Exception, match=message),
    ):
        kernels(gpu_target, build(**options), kernel("cudnn").plain)


@pytest.mark.parametrize("name", ["t=197, s=197", "odd causal"])
def test_odd_lengths_are_refused_by_jax_and_padded_by_us(name, gpu_target):
    call = build(**TAKES[name])
    with pytest.raises(NotImplementedError, match="Unsupported sequence length"):
        kernels(gpu_target, call, kernel("cudnn").plain)
