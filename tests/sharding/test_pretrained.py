"""Folders of weights, read part by part onto a mesh and written from there."""

import filecmp
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig, from_pretrained
from flax_attn.models.hugging_face import values

GPT = GPT2Config(16, 4, 2, context_length=8, vocab_size=12, dropout=0.1)
LLAMA = LlamaConfig(
    16, 24, num_heads=4, num_layers=2, num_kv_heads=2, context_length=8, vocab_size=10
)
MODELS = pytest.mark.parametrize(("cls", "config"), [(GPT2, GPT), (Llama, LLAMA)])
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def states(model):
    state = nnx.state(model)
    return {path: x.get_value() for path, x in nnx.to_flat_state(state)}


def same_files(one, other):
    return filecmp.cmpfiles(one, other, sorted(file.name for file in one.iterdir()), shallow=False)[
        1:
    ] == ([], [])


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@MODELS
def test_a_model_goes_onto_a_mesh_and_back_into_the_same_files(
    cls, config, kind, scan_layers, tmp_path, mesh_like
):
    model = cls(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "one")
    mesh = mesh_like(kind, **MESH)
    options = {"scan_layers": scan_layers, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(5)}
    plain = states(from_pretrained(tmp_path / "one", **options | {"rngs": nnx.Rngs(5)}))
    loaded = from_pretrained(tmp_path / "one", mesh=mesh, **options)
    assert states(loaded).keys() == plain.keys()
    for path, array in states(loaded).items():
        assert array.sharding.mesh == mesh, path
        assert (array == jax.device_put(plain[path], array.sharding)).all(), path
    parts = {
        array.sharding.shard_shape(array.shape)
        for path, array in states(loaded).items()
        if path[-2] == "W_query"
    }
    assert parts == ({(2, 8, 8), (2, 8)} if scan_layers else {(8, 8), (8,)}) - (
        {(2, 8), (8,)} if cls is Llama else set()
    )
    from_pretrained(tmp_path / "one", mesh=mesh, scan_layers=scan_layers).save_pretrained(
        tmp_path / "back"
    )
    assert same_files(tmp_path / "one", tmp_path / "back")


def one_device(shape, sharding, fetch):
    """Read as a process does that has the first device alone."""
    index = next(iter(sharding.devices_indices_map(shape).values()))
    part = fetch(index)
    assert part.shape == sharding.shard_shape(shape)
    return jnp.zeros(shape, part.dtype)


@pytest.mark.parametrize("scan_layers", [False, True])
@MODELS
def test_a_process_reads_the_parts_of_its_devices_alone(
    cls, config, scan_layers, tmp_path, mesh_like, monkeypatch
):
    model = cls(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    mesh, read = mesh_like(fsdp=2, tensor=2), []
    whole = from_pretrained(tmp_path, mesh=mesh, scan_layers=scan_layers)
    params = nnx.to_flat_state(nnx.state(whole, nnx.Param))
    share = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * 4 for _, x in params)
    total = sum(x.size * 4 for _, x in params)
    part = values._part
    monkeypatch.setattr(values, "_part", lambda *call: read.append(part(*call)) or read[-1])
    monkeypatch.setattr(jax, "make_array_from_callback", one_device)
    from_pretrained(tmp_path, mesh=mesh, scan_layers=scan_layers)
    assert sum(x.nbytes for x in read) == share < 0.35 * total


def test_memory_holds_the_parts_and_one_tensor_at_most(tmp_path, mesh_like, monkeypatch):
    config = GPT2Config(64, 4, 1, context_length=8, vocab_size=8192, dropout=0.0)
    GPT2(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    mesh = mesh_like(tensor=4)
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *call: kept.append(one_device(*call)) or kept[-1]
    )
    kept = []
    from_pretrained(tmp_path, mesh=mesh)  # what is imported or compiled once is not counted
    tracemalloc.start()
    from_pretrained(tmp_path, mesh=mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = 8192 * 64 * 4  # the table of the tokens
    assert peak < largest / 4 + 700_000 < largest  # beside the arrays, the model itself


def test_the_same_part_is_read_once_for_all_devices_that_have_it(tmp_path, mesh_like, monkeypatch):
    GPT2(GPT, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    read, part = [], values._part
    monkeypatch.setattr(values, "_part", lambda *call: read.append(part(*call)) or read[-1])
    model = from_pretrained(tmp_path, mesh=mesh_like(data=8))
    assert len(read) == len(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def test_a_mesh_that_the_table_does_not_know_is_refused_before_anything_is_read(
    tmp_path, mesh_like
):
    GPT2(GPT, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        ValueError, match=r"must have an axis of the table, .*; got the axes rows\."
    ):
        from_pretrained(tmp_path, mesh=mesh_like(rows=2))


def test_of_several_processes_the_first_writes(tmp_path, monkeypatch):
    gathered = []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(
        "flax_attn.convert.files._to_host", lambda x: gathered.append(x) or np.asarray(x)
    )
    model = GPT2(GPT, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert len(gathered) == len(nnx.to_flat_state(nnx.state(model, nnx.Param)))
