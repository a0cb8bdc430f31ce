"""The vision transformer of the guide of migration, in PyTorch and ported."""

import importlib
from pathlib import Path

import pytest
from flax import nnx

from flax_attn import convert
from flax_attn.parity import assert_parity

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {
    "image_size": 10,
    "patch_size": 5,
    "channels": 2,
    "d_model": 12,
    "num_heads": 3,
    "num_classes": 7,
}


@pytest.fixture
def example(monkeypatch):
    """Import an example as Python does when it runs a file in that folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_the_port_is_the_same_function(example):
    vit_nnx = example("vit_nnx")
    ours = vit_nnx.ViT(**SIZES, rngs=nnx.Rngs(0))
    theirs = example("vit_torch").ViT(**SIZES).eval()
    # The rules name what no shape tells: a convolution as a matrix, and a fused projection.
    layout = convert.auto(ours, theirs, rules=vit_nnx.RULES)
    checks = ["weights", "forward", "gradients"]
    assert_parity(ours, theirs, [(3, 2, 10, 10)], layout=layout, checks=checks)
