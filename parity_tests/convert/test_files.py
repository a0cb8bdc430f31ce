"""Weights in files: safetensors both ways, checkpoints in, and nothing that could run code."""

import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.convert import ConversionError

SIZES = {
    "d_in": 8,
    "d_out": 8,
    "context_length": 9,
    "dropout": 0.0,
    "num_heads": 4,
    "qkv_bias": True,
}


def module(seed=0, **changes):
    return flax_attn.MultiHeadAttention(**SIZES | changes, rngs=nnx.Rngs(seed))


def assert_bits_equal(left, right):
    assert set(left) == set(right)
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        assert array.tobytes() == right[name].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_safetensors_round_trip_is_bit_identical(tmp_path, layout, dtype):
    ours, other, path = (
        module(param_dtype=dtype),
        module(1, param_dtype=dtype),
        tmp_path / "w.safetensors",
    )
    convert.save(ours, path, layout, prefix="h.0.")
    convert.load(other, path, layout, prefix="h.0.")
    assert_bits_equal(convert.state_dict(other), convert.state_dict(ours))


def test_torch_reads_what_was_saved(tmp_path):
    ours = module()
    convert.save(ours, str(tmp_path / "w.safetensors"))
    theirs = torch_ref.MultiHeadAttention(**SIZES)
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "w.safetensors"), strict=True)
    assert_bits_equal(
        {name: value.numpy() for name, value in theirs.state_dict().items()},
        convert.state_dict(ours),
    )


def test_what_torch_saved_as_safetensors_is_read(tmp_path):
    theirs, ours = torch_ref.MultiHeadAttention(**SIZES), module()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    convert.load(ours, tmp_path / "w.safetensors")
    assert_bits_equal(
        {name: value.numpy() for name, value in theirs.state_dict().items()},
        convert.state_dict(ours),
    )


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_checkpoint_of_weights_is_read(tmp_path, suffix):
    theirs, ours, path = (
        torch_ref.MultiHeadAttention(**SIZES),
        module(),
        tmp_path / f"weights{suffix}",
    )
    torch.save(theirs.state_dict(), path)
    convert.load(ours, path)
    assert_bits_equal(
        {name: value.numpy() for name, value in theirs.state_dict().items()},
        convert.state_dict(ours),
    )


RAN = []


class Hostile:
    def __reduce__(self):
        return RAN.append, ("run",)


@pytest.mark.parametrize(
    "save", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))]
)
def test_a_pickle_that_would_run_code_is_refused(tmp_path, save):
    path = tmp_path / "weights.pt"
    save({"weight": torch.ones(2), "more": Hostile()}, path)
    with pytest.raises(
        ConversionError,
        match=r"not a checkpoint of weights only, and is refused.*run any code",
    ):
        convert.load(module(), path)
    assert not RAN


def test_a_whole_module_is_refused(tmp_path):
    torch.save(torch.nn.Linear(3, 2), tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"Save the state_dict\(\) alone"):
        convert.read_file(tmp_path / "model.pt")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file(tmp_path, keep):
    path = tmp_path / "w.safetensors"
    convert.save(module(), path)
    path.write_bytes(path.read_bytes()[:keep])
    ours = module(1)
    before = convert.state_dict(ours)
    with pytest.raises(ConversionError, match=r"w\.safetensors is not a whole safetensors file"):
        convert.load(ours, path)
    assert_bits_equal(convert.state_dict(ours), before)


def test_a_truncated_checkpoint(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(torch_ref.MultiHeadAttention(**SIZES).state_dict(), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConversionError, match="refused"):
        convert.load(module(), path)


@pytest.mark.parametrize("name", ["none.safetensors", "none.pt", "none.onnx"])
def test_a_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        convert.load(module(), tmp_path / name)


def test_an_unknown_suffix(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, weight=np.ones(3))
    with pytest.raises(
        ConversionError, match=r"read from \.safetensors, \.pt, \.pth or \.bin files; got"
    ):
        convert.load(module(), path)
    with pytest.raises(ConversionError, match=r"written as safetensors; got .*npz\. Name the file"):
        convert.save(module(), path)


def test_a_refused_layout_leaves_no_file(tmp_path):
    with pytest.raises(ConversionError, match="grouped queries"):
        convert.save(module(num_kv_heads=2), tmp_path / "w.safetensors", "torch_mha")
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_fit(tmp_path):
    convert.save(module(qkv_bias=False), tmp_path / "w.safetensors")
    with pytest.raises(ConversionError, match=r"missing W_query\.bias \(8,\)"):
        convert.load(module(), tmp_path / "w.safetensors")
