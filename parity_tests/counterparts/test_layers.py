"""Plain layers of Flax against those of torch.nn, where nothing is ours."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare

B, T, WORDS, D, HIDDEN, CLASSES = 3, 5, 11, 4, 7, 6


class Classifier(nnx.Module):
    """Token ids to scores."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, D, rngs=rngs)
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.fc1 = nnx.Linear(D, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        hidden = self.norm(self.embed(tokens))
        # PyTorch takes the exact one by default, Flax does not.
        active = jax.nn.gelu(self.fc1(hidden), approximate=False)
        return {"scores": self.fc2(active), "hidden": hidden}


class TorchClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, D)
        self.norm = torch.nn.LayerNorm(D)
        self.fc1 = torch.nn.Linear(D, HIDDEN)
        self.fc2 = torch.nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens))
        active = torch.nn.functional.gelu(self.fc1(hidden))
        return {"scores": self.fc2(active), "hidden": hidden}


# Checks that take long, and say of these layers what others say of each.
LONG = ("second", "float32", "bfloat16", "float16", "jit = eager", "long sequence", "training")
OF_FLOATS = {"huge logits", "small activations"}
OF_OTHER_MODULES = {
    "dropout",
    "running statistics",
    "cache = full",
    "padded rows",
    "non-finite padding",
}


@pytest.fixture
def report(checks):
    tokens = np.random.default_rng(0).integers(WORDS, size=(B, T))
    sides = Classifier(nnx.Rngs(0)), TorchClassifier().eval()
    options = {"layout": "torch", "checks": checks.all_but(*LONG), "locate": False}
    return compare(*sides, {"tokens": tokens}, **options)


def test_a_classifier_of_token_ids(report):
    skipped = {check.name: check.skipped for check in report.checks if not check.ran}
    assert skipped.keys() == OF_FLOATS | OF_OTHER_MODULES
    # What was asked for by name and cannot run fails, and nothing else does.
    assert {check.name for check in report.failed} == skipped.keys()
    assert all(skipped[name] == "no input is floating" for name in OF_FLOATS)
