"""What models of other libraries compile to under `everywhere`, for an H200 and a TPU not at hand.

`make test-gpu` and `make test-tpu` run it; elsewhere all of it is skipped.
"""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from flax_attn import everywhere
from tools.aot.compiled import compiled
from tools.stacks.models import HEADS, MODELS, WIDTH

os.environ.setdefault("KERAS_BACKEND", "jax")

pytestmark = [
    pytest.mark.usefixtures("no_shape_checks"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

T = 640  # no width of the models
ALL_SCORES = re.compile(rf"\[(?:1,)?{HEADS},{T},{T}\]")
CALLS = {
    "cudnn": re.compile(r'custom_call_target="__cudnn\$fmha\w*"'),
    "fused": re.compile(r'custom_call_target="(?:tpu_custom_call|[^"]*triton[^"]*)"'),
    "splash": re.compile(r'custom_call_target="tpu_custom_call"'),
}
# What runs a layer on each chip, by the dtype that it computes in.
EXPECTED = {
    ("H200", "bfloat16"): "fused",
    ("H200", "float32"): "fused",
    ("v5e", "bfloat16"): "splash",
    ("v5e", "float32"): "splash",
}


def model(library, dtype):
    """Return a block of a library in a dtype, as a function, with the shapes of its arguments."""
    if library in ("keras", "equinox"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    if library == "keras":
        import keras

        # Its layers cast what they are given.
        keras.config.set_dtype_policy("mixed_bfloat16" if dtype == "bfloat16" else "float32")
    x = jax.ShapeDtypeStruct((1, T, WIDTH), dtype)
    forward, weights = MODELS[library](1, jnp.zeros(x.shape, dtype))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), weights)
    return forward, shapes, x


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("library", MODELS)
def test_attention_lands_on_a_kernel(library, dtype, target):
    forward, weights, x = model(library, dtype)
    expected = EXPECTED[target.name, dtype]

    def loss(weights, x):
        return jnp.mean(forward(weights, x).astype(jnp.float32) ** 2)

    runs = {"inference": (forward, 1), "gradients": (jax.grad(loss), 2)}
    for name, (run, least) in runs.items():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            without = compiled(target, run, (weights, x), 1).as_text() or ""
            with everywhere(strict=True) as report:
                program = compiled(target, run, (weights, x), 1).as_text() or ""
        (entry,) = report.taken
        assert entry.backend == expected, name
        assert len(CALLS[expected].findall(program)) >= least, name
        assert not ALL_SCORES.search(program), name
        # As it is, it has all scores in memory; Keras asks for cuDNN itself in bfloat16.
        assert ALL_SCORES.search(without) or CALLS["cudnn"].search(without), name
