"""Flax and PyTorch models of one configuration, with weights copied by transformers."""

import os
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers


def twins(name, settings):
    """Return `FlaxNAME` and `NAME` of a configuration, both with the weights of the second."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    twin = kind(kind.config_class(**settings)).eval()
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return getattr(transformers, f"Flax{name}").from_pretrained(folder, from_pt=True), twin


def difference(ours, theirs):
    """Return the largest difference over the largest value, with both values where it is."""
    ours, theirs = np.asarray(ours), theirs.detach().numpy()
    at = np.unravel_index(np.abs(ours - theirs).argmax(), ours.shape)
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    return (
        f"{error:.1e}, at {tuple(map(int, at))} Flax has {ours[at]:.6f}, PyTorch {theirs[at]:.6f}"
    )
