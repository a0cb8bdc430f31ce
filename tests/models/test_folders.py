"""Hugging Face folders from any source: each fault is one clear error, raised cheaply."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from attn_spec.json_files import read_object
from flax_attn.convert import ConversionError
from flax_attn.models import GPT2, GPT2Config, Llama, LlamaConfig, from_pretrained, save_pretrained
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.whisper import Whisper, WhisperConfig

FIELDS = {
    "model_type": "gpt2",
    "n_embd": 6,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 8,
    "vocab_size": 11,
}
LLAMA = LlamaConfig(8, 10, num_heads=4, num_layers=2, num_kv_heads=2, vocab_size=11)


@pytest.fixture
def folder(tmp_path):
    """A folder of GPT-2."""
    GPT2(GPT2Config(6, 2, 2, context_length=8, vocab_size=11), rngs=nnx.Rngs(0)).save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.fixture
def nothing_is_made(monkeypatch):
    """Fail where a model is made, be it without values."""
    monkeypatch.setattr(loader, "_abstract", lambda *arguments: pytest.fail("a model was made"))


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


TEXTS = {
    "empty": (b"", r"config\.json is not JSON: Expecting value.*Copy it once more"),
    "half of one": (b"{", r"config\.json is not JSON: "),
    "not UTF-8": (b'{"a": "\xe9"}', r"config\.json is not JSON: 'utf-8' codec"),
    "nested": (b"[" * 200_000, r"config\.json is not JSON: it is nested too deeply"),
    "twice": (b'{"n_head": 2, "n_head": 3}', r"is not JSON: the name 'n_head' is there twice"),
    "twice inside": (b'{"rope": {"a": 1, "a": 1}}', r"is not JSON: the name 'a' is there twice"),
    "digits": (b'{"n_head": ' + b"9" * 5000 + b"}", r"is not JSON: Exceeds the limit"),
    "a list": (b"[1]", r"config\.json must hold an object.*got list"),
    "null": (b"null", r"config\.json must hold an object, fields by name; got NoneType"),
    "no text": (b'{"model_type": NaN}', r"model_type must be of the kind str; got NaN"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_config_that_is_no_object_in_json(name, folder):
    data, match = TEXTS[name]
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        from_pretrained(folder)


def test_a_config_without_end(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(ValueError, match=r"must have up to 100000000 bytes; it has 10000000000"):
        from_pretrained(folder)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_config_that_is_no_file(folder, is_folder):
    (folder / "config.json").unlink()
    if is_folder:
        (folder / "config.json").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json in "):
        from_pretrained(folder)


def test_an_object_is_read_up_to_its_size(tmp_path):
    file = tmp_path / "some.json"
    file.write_text('{"a": 1}')
    assert read_object(file, limit=8) == {"a": 1}
    with pytest.raises(ValueError, match=r"some\.json must have up to 7 bytes; it has 8\. Copy"):
        read_object(file, limit=7)


BOUNDS = [
    (
        {"n_layer": 10**9},
        r"n_layer must be from 0 to 10000; got 1000000000\. Take the config\.json",
    ),
    ({"n_embd": 10**12}, r"n_embd must be from 1 to 4194304; got 1000000000000"),
    ({"n_head": 0}, r"n_head must be from 1 to 10000; got 0"),
    ({"vocab_size": -1}, r"vocab_size must be from 1 to 4194304; got -1"),
    ({"layer_norm_epsilon": 10**12}, r"layer_norm_epsilon must be from 0 to 1; got 1000000000000"),
    ({"layer_norm_epsilon": float("inf")}, r"layer_norm_epsilon must be from 0 to 1; got Infinity"),
    ({"layer_norm_epsilon": float("nan")}, r"layer_norm_epsilon must be from 0 to 1; got NaN"),
    ({"layer_norm_epsilon": -1e-5}, r"layer_norm_epsilon must be from 0 to 1; got -1e-05"),
    ({"attn_pdrop": 1}, r"attn_pdrop must be from 0 to 0\.9999999999999999; got 1"),
    ({"n_embd": "6" * 10**6}, r"n_embd must be of the kind int; got \"666.* \.\.\. .*666\"\. Take"),
    ({"architectures": [{}], "model_type": "bert"}, r"architectures must be a list of values of"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, r"from 1 to"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a", 1]}}, r"kind int"),
]


@pytest.mark.parametrize(("changes", "match"), BOUNDS, ids=[str(c)[:40] for c, _ in BOUNDS])
def test_a_field_out_of_bounds(changes, match, folder, nothing_is_made):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=match) as raised:
        from_pretrained(folder)
    assert len(str(raised.value)) < 600


LLAMA_BOUNDS = [
    (
        {"rope_parameters": None, "rope_theta": 1e16},
        r"rope_theta must be from 1\.0000000000000002 to",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e7}},
        r"factor must be from 0 to 1000000",
    ),
    (
        {
            "max_position_embeddings": 10**6,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1e6},
        },
        r"scaling times max_position_embeddings must be from 1 to 2147483647; got ",
    ),
    ({"head_dim": 0}, r"head_dim must be from 1 to 4194304; got 0"),
    ({"layer_types": [{}, []]}, r"kind"),
]


@pytest.mark.parametrize(("changes", "match"), LLAMA_BOUNDS, ids=str)
def test_a_field_of_a_llama_out_of_bounds(changes, match, tmp_path, nothing_is_made):
    Llama(LLAMA, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    edit(tmp_path, model_type="qwen2" if "layer_types" in changes else "llama", rope_scaling=None)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=match):
        from_pretrained(tmp_path)


def test_layers_that_files_do_not_hold(folder, nothing_is_made):
    edit(folder, n_layer=9000)
    match = (
        r"safetensors must hold the 9000 parts .* by num_layers, .* numbers 2, 3, 4 and more\. Take"
    )
    with pytest.raises(ConversionError, match=match):
        from_pretrained(folder)


def test_experts_that_files_do_not_hold(tmp_path, nothing_is_made):
    config = MixtralConfig(8, 10, 4, 1, 2, vocab_size=11, num_experts=3)
    Mixtral(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    edit(tmp_path, num_local_experts=10_000)
    with pytest.raises(
        ConversionError, match=r"the 10000 parts .* num_experts, .* 3, 4, 5 and more"
    ):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["n_embd", "n_inner", "n_positions", "vocab_size"])
def test_widths_that_files_do_not_hold(name, folder):
    edit(folder, **{name: 2**22})
    with pytest.raises(ConversionError, match=r"mis-shaped transformer\..*4194304"):
        from_pretrained(folder)


def test_a_hundred_problems_are_listed_and_the_others_counted(folder):
    arrays = {f"h.{i}.x": np.zeros(0, "float32") for i in range(150)}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"unexpected: 50 more$") as raised:
        from_pretrained(folder)
    assert str(raised.value).count("\n  unexpected") == 101


def header(entries, data=b"", size=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(**changes):
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)
HEADERS = {
    "larger than the file": header({}, size=2**40),
    "as large as can be": header({}, size=2**64 - 1),
    "not JSON": header(b"xx"),
    "a list": header([]),
    "nested": header(b'{"a":' + b"[" * 10**5),
    "two entries in one place": header({"a": entry(), "b": entry()}, b"1234"),
    "one entry twice": header(TWICE, b"1234"),
    "an entry outside": header({"a": entry(data_offsets=[0, 8])}, b"1234"),
    "another shape": header({"a": entry(shape=[2])}, b"1234"),
    "a negative shape": header({"a": entry(shape=[-1])}, b"1234"),
    "a shape that overflows": header({"a": entry(shape=[2**62, 2**62])}, b"1234"),
    "an unknown dtype": header({"a": entry(dtype="X")}, b"1234"),
    "more data": header({"a": entry()}, b"12345"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(name, folder):
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(ConversionError, match=r"model\.safetensors is not a whole safe"):
        from_pretrained(folder)


def test_an_entry_that_says_more_of_itself(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    entries["transformer.wte.weight"]["note"] = "of another library"
    file.write_bytes(header(entries, data[8 + size :]))
    assert from_pretrained(folder).config.vocab_size == 11


def sharded(folder, name):
    """Let the weights be a shard of this name in an index."""
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors"


OUTSIDE = [
    *("../x.safetensors", "a/../../x.safetensors", "/x.safetensors", "C:\\x.safetensors"),
    *("..\\x.safetensors", "\\\\host\\x.safetensors", "", ".", "config.json", "x.bin"),
    *("a\0.safetensors", "\ud800.safetensors", "a" * 5000 + ".safetensors", None, 3, ["x"]),
]


@pytest.mark.parametrize("name", OUTSIDE, ids=[ascii(name)[:20] for name in OUTSIDE])
def test_an_index_that_names_what_is_no_shard(name, folder):
    inside = folder / "inside"
    inside.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).rename(inside / file)
    weights = sharded(inside, name)
    weights.rename(folder / "x.safetensors")
    match = (
        r"weight_map must name files within its folder .* got .*\. Put the shards beside the index"
    )
    with pytest.raises(ConversionError, match=match):
        from_pretrained(inside)


def test_an_absolute_path_in_an_index(folder):
    weights = sharded(folder, str(folder / "x.safetensors"))
    weights.rename(folder / "x.safetensors")
    with pytest.raises(ConversionError, match=r"must name files within its folder"):
        from_pretrained(folder)


INDICES = {
    "no map": "{}",
    "an empty map": '{"weight_map": {}}',
    "a list": '{"weight_map": ["model.safetensors"]}',
    "a list of nothing": "[]",
    "a name alone": '{"weight_map": "model"}',
    "a number for a name": '{"weight_map": {"a": 3}}',
    "a name twice": '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "half of one": '{"weight_map": ',
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_none(name, folder):
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(INDICES[name])
    with pytest.raises(ConversionError, match=r"index\.json is not an index"):
        from_pretrained(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_files_may_be_links_to_blobs(name, folder):
    """Hubs store all file versions in one folder, and each version as a folder of links."""
    blobs, version = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    version.mkdir(parents=True)
    for number, file in enumerate(("config.json", "model.safetensors")):
        (folder / file).rename(blobs / f"{number}")
    (version / "config.json").symlink_to("../../blobs/0")
    (version / name).symlink_to("../../blobs/1")
    if name != "model.safetensors":
        sharded(version, name)
    assert from_pretrained(version).config.num_layers == 2


def test_a_head_that_is_tied_and_stored_otherwise(folder):
    file = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    head = arrays["transformer.wte.weight"].copy()
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head}, file)
    assert from_pretrained(folder).out_head is None
    head[-1, -1] += 1
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head}, file)
    match = (
        r"holds lm_head\.weight beside transformer\.wte\.weight, .* their values differ\. Set tie"
    )
    with pytest.raises(ConversionError, match=match):
        from_pretrained(folder)
    safetensors.numpy.save_file({**arrays, "lm_head.weight": head[1:]}, file)
    with pytest.raises(ConversionError, match=match):
        from_pretrained(folder)


@pytest.mark.parametrize("name", ["is_causal", "scale_attn_weights"])
def test_null_is_false_where_true_is_wanted(name, folder):
    edit(folder, **{name: None})
    with pytest.raises(ValueError, match=rf"{name} must be true, no other value .*; got null"):
        from_pretrained(folder)


def test_a_field_by_its_second_name(folder):
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    heads = fields.pop("n_head")
    file.write_text(json.dumps({**fields, "num_attention_heads": heads}))
    assert from_pretrained(folder).config.num_heads == 2
    edit(folder, n_head=3)
    match = r"n_head and num_attention_heads name one field .* got 3 and 2\. Remove the wrong one"
    with pytest.raises(ValueError, match=match):
        from_pretrained(folder)


def test_positions_that_would_be_computed_before_they_are_compared(tmp_path, nothing_is_made):
    sizes = {"num_mel": 5, "num_positions": 7, "context_length": 9, "vocab_size": 11}
    Whisper(WhisperConfig(6, 2, 1, 3, 1, 8, 10, **sizes), rngs=nnx.Rngs(0)).save_pretrained(
        tmp_path
    )
    edit(tmp_path, max_source_positions=2**31 - 1)
    match = (
        r"embed_positions\.weight must have the shape .* got \[\(7, 6\)\] for \(2147483647, 6\)\. T"
    )
    with pytest.raises(ConversionError, match=match):
        from_pretrained(tmp_path)


@pytest.mark.usefixtures("no_shape_checks")
def test_models_alone_are_saved(tmp_path):
    rule = r"^model must be Pretrained; got Linear\. Pass a model of flax_attn\.models, such"
    with pytest.raises(ValueError, match=rule):
        save_pretrained(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), tmp_path)
