"""A model of stacked layers against PyTorch's list of layers.

Pairing and proof are those of layers one by one.
"""

import numpy as np
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.parity import compare

SIZES = {"context_length": 7, "vocab_size": 11, "dropout": 0.0}


def models(scan_layers):
    ours = flax_attn.GPT2(
        flax_attn.GPT2Config(6, 3, 2, **SIZES), scan_layers=scan_layers, rngs=nnx.Rngs(0)
    )
    return ours, torch_ref.GPT2(torch_ref.GPT2Config(6, 3, 2, **SIZES)).eval()


def test_the_harness_proves_it_gradients_included():
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
    report = compare(*models(scan_layers=True), [tokens], checks=["forward", "gradients"])
    assert report.passed, report
    assert {check.name for check in report.checks if check.passed} >= {"forward", "gradients"}


def test_automatic_pairing_finds_every_layer():
    found, expected = (convert.auto(*models(scan)) for scan in (True, False))
    pairs = [
        {(row.ours, row.theirs, row.pattern) for row in pairing.rows}
        for pairing in (found, expected)
    ]
    assert pairs[0] == pairs[1]
    assert len(pairs[0]) > 20
