"""Folders of transformers: their fields, their weights, and what is said about them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flax_attn.convert import ConversionError
from flax_attn.models import from_pretrained

WEIGHTS = "model.safetensors"


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, **fields):
    """Give fields of a config other values."""
    (folder / "config.json").write_text(json.dumps(fields_of(folder) | fields))


def load_weights(folder):
    return load_file(folder / WEIGHTS)


def save_weights(weights, folder):
    save_file(weights, folder / WEIGHTS)


def in_files(model, folder):
    """Return the parameters of a model by the names that they have in files."""
    model.save_pretrained(folder)
    return {name: weight.numpy() for name, weight in load_weights(folder).items()}


def read_by_transformers(cls, folder):
    """Return a model of transformers, which finds all its weights in a folder, and no other."""
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model


def assert_same_tensors(model, other):
    tensors = model.state_dict()
    for name, value in other.state_dict().items():
        assert torch.equal(tensors[name], value), name


def shorten(folder, name):
    """Leave out the last column of a tensor."""
    weights = load_weights(folder)
    weights[name] = weights[name][:, :-1].contiguous()
    save_weights(weights, folder)


def problems(folder):
    """Return what reading a folder says of its weights, a line each."""
    with pytest.raises(ConversionError) as raised:
        from_pretrained(folder)
    # The first line says how many there are.
    return [line.strip() for line in str(raised.value).splitlines()[1:]]
