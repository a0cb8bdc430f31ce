"""The port with two faults in it, which the page `docs/validate.md` mends line by line."""

import importlib
from pathlib import Path

import pytest
from flax import nnx

from flax_attn.parity import compare

EXAMPLES = Path(__file__).parents[2] / "examples"

SIZES = {
    "image_size": 10,
    "patch_size": 5,
    "channels": 2,
    "d_model": 12,
    "num_heads": 2,
    "num_classes": 7,
}


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_both_faults_have_a_name(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    ours = importlib.import_module("vit_port").ViT(**SIZES, rngs=nnx.Rngs(0))
    theirs = importlib.import_module("vit_torch").ViT(**SIZES).eval()
    report = compare(
        ours,
        theirs,
        [(3, 2, 10, 10)],
        checks=["forward"],
        # The port takes channels last.
        flax_call=lambda model, images: model(images.transpose(0, 2, 3, 1)),
    )
    assert not report.passed
    assert report.difference.repaired
    # One cause for all norms and one for all attentions, not one a layer.
    norms, split = report.causes
    places = "blocks.0.norm1 (also blocks.0.norm2, blocks.1.norm1, blocks.1.norm2 and 1 more)"
    assert norms == f"{places}: flax adds 1e-06, torch 1e-05"
    attentions = "blocks.0.attn (also blocks.1.attn)"
    assert split.startswith(f"{attentions}: the same numbers are laid out differently")
    assert "vit_port.py:22, 21" in str(report.difference)
