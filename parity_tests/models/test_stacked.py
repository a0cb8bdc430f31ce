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
    config = flax_attn.GPT2Config(6, 3, 2, **SIZES)
    ours = flax_attn.GPT2(config, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    return ours, torch_ref.GPT2(torch_ref.GPT2Config(6, 3, 2, **SIZES)).eval()


def test_the_harness_proves_it_gradients_included():
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
    report = compare(*models(scan_layers=True), [tokens], checks=["forward", "gradients"])
    assert report.passed, report
    # A check that could not run is no proof.
    assert {check.name for check in report.checks if check.passed} >= {"forward", "gradients"}


def pairs(scan_layers):
    pairing = convert.auto(*models(scan_layers))
    return {(row.ours, row.theirs, row.pattern) for row in pairing.rows}


def test_automatic_pairing_finds_every_layer():
    found = pairs(scan_layers=True)
    assert found == pairs(scan_layers=False)
    assert len(found) > 20
