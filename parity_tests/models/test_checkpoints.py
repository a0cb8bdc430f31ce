"""Untrusted checkpoints of PyTorch: their code is not run, and what is not a weight is refused."""

import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx

from flax_attn.convert import ConversionError
from flax_attn.models import GPT2, GPT2Config, from_pretrained

NAME = "transformer.ln_f.bias"


@pytest.fixture
def folder(tmp_path):
    """Return a folder of GPT-2 without its weights, and the weights."""
    sizes = GPT2Config(6, 2, 2, context_length=8, vocab_size=11)
    GPT2(sizes, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, weights


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


REFUSED = r"is refused: a pickle could run any code\. Save"


@pytest.mark.parametrize(
    "write", [torch.save, lambda weights, file: file.write_bytes(pickle.dumps(weights))]
)
def test_code_in_a_checkpoint_is_not_run(write, folder):
    path, weights = folder
    write({**weights, NAME: Code(path / "made")}, path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=REFUSED):
        from_pretrained(path)
    assert not (path / "made").exists()


def itself():
    # A pickle may refer to what it is still reading, which has no end as a tree.
    value = {}
    value["inside"] = value
    return value


# What torch.load returns may be anything.
WHOLE = {
    "a list": (lambda: [1], r"must hold weights by name; got list\. Save"),
    "a tensor": (lambda: torch.ones(3), r"must hold weights by name; got Tensor\. Save"),
    "itself": (itself, r"is not a checkpoint of weights: it holds itself\. Save the state_dict"),
    "numbers": (lambda: {"a": [[1], [1, 2]]}, r"a is not an array: "),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_of_something_else(name, folder):
    path, _ = folder
    make, match = WHOLE[name]
    torch.save(make(), path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=match):
        from_pretrained(path)


# Of one weight, whose name the error has to say.
UNREADABLE = {
    "sparse": (
        lambda: torch.ones(6).to_sparse(),
        r"its dtype is float32, torch\.sparse_coo on cpu",
    ),
    "without data": (lambda: torch.ones(6, device="meta"), r"float32, torch\.strided on meta"),
    "complex": (lambda: torch.ones(6, dtype=torch.complex64), "its dtype is complex64"),
    "true": (lambda: torch.ones(6, dtype=torch.bool), "its dtype is bool"),
    "a list": (lambda: [1.0] * 6, "its dtype is list"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_weight_that_is_no_array_of_numbers(name, folder):
    path, weights = folder
    make, match = UNREADABLE[name]
    torch.save({**weights, NAME: make()}, path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=rf"not readable {NAME}: .*{match}"):
        from_pretrained(path)


def test_weights_that_pytorch_negates_where_they_are_read(folder):
    path, weights = folder
    # A view with a flag: the bytes in memory, and in the file, have the other sign.
    negated = torch.view_as_complex(torch.arange(12.0).reshape(6, 2)).conj().imag
    assert negated.is_neg()
    torch.save({**weights, NAME: negated}, path / "pytorch_model.bin")
    found = from_pretrained(path).final_norm.shift[...]
    np.testing.assert_array_equal(np.asarray(found), -np.arange(1.0, 12.0, 2.0))


def test_a_checkpoint_that_ends_early(folder):
    path, weights = folder
    file = path / "pytorch_model.bin"
    torch.save(weights, file)
    # As a download that stopped leaves it.
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin is damaged or is not"):
        from_pretrained(path)
