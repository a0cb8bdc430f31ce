"""Hand-written Hugging Face folders: what is read, what is refused and why, what is left behind."""

import json
import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from attn_spec.frequencies import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YaRNScaling,
)
from attn_spec.hugging_face.fields import read_fields
from attn_spec.longrope import LongRoPEScaling
from flax_attn import DifferentialAttention, MultiHeadAttention, RMSNorm, convert
from flax_attn.convert import ConversionError
from flax_attn.functional.positions import RoPE
from flax_attn.models import GPT2, GPT2Config, Llama, LlamaConfig, from_pretrained, save_pretrained
from flax_attn.models.diffllama import DiffLlama, DiffLlamaConfig
from flax_attn.models.gemma import Gemma, GemmaConfig
from flax_attn.models.gemma3 import Gemma3, Gemma3Config
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.hugging_face.options import LoadOptions
from flax_attn.models.hugging_face.values import Memory
from flax_attn.models.olmo2 import Olmo2, Olmo2Config
from flax_attn.models.phi3 import Phi3, Phi3Config
from flax_attn.models.qwen2 import Qwen2
from flax_attn.models.registry import FAMILIES, model_class, model_types
from flax_attn.models.smollm3 import SmolLM3Config

GPT2_FIELDS = {
    "model_type": "gpt2",
    "n_embd": 6,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 8,
    "vocab_size": 11,
}
LLAMA_FIELDS = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": 11,
}
QWEN2_FIELDS = {**LLAMA_FIELDS, "model_type": "qwen2"}
PHI3_FIELDS, GEMMA_FIELDS, GEMMA2_FIELDS, GEMMA3_FIELDS, SMOLLM3_FIELDS, DIFFLLAMA_FIELDS = (
    {**LLAMA_FIELDS, "model_type": name}
    for name in ("phi3", "gemma", "gemma2", "gemma3_text", "smollm3", "diffllama")
)
QWEN3_NEXT_FIELDS = {**LLAMA_FIELDS, "model_type": "qwen3_next"}
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA = LlamaConfig(
    8, 10, num_heads=4, num_layers=2, num_kv_heads=2, head_dim=2, context_length=16, vocab_size=11
)


def gpt2_shapes(d=6, layers=2, context=8, vocab=11):
    shapes = {
        "wte.weight": (vocab, d),
        "wpe.weight": (context, d),
        "ln_f.weight": (d,),
        "ln_f.bias": (d,),
    }
    for i in range(layers):
        linear = {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, 4 * d),
            "mlp.c_proj": (4 * d, d),
        }
        for name, shape in {**linear, "ln_1": (d,), "ln_2": (d,)}.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


@pytest.fixture
def weights():
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(0, 0.5, shape).astype("float32") for name, shape in gpt2_shapes().items()
    }


@pytest.fixture
def folder(tmp_path, weights):
    """A folder of GPT-2."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2_FIELDS))
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def read_config(folder, dropout=None):
    cls = model_class(folder)
    return loader.read_config(cls, cls.family, read_fields(folder), dropout)


def write_config(config):
    return loader.write_config(Llama.family, config, "float32")


def write_fields(folder, fields, **changes):
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def test_every_weight_is_in_its_place(folder, weights):
    model = GPT2.from_pretrained(folder)
    block, spec = (
        model.trf_blocks[1],
        {name.removeprefix("transformer."): w for name, w in weights.items()},
    )
    query, key, value = np.split(spec["h.1.attn.c_attn.weight"], 3, axis=1)
    for ours, theirs in [
        (model.tok_emb.embedding, spec["wte.weight"]),
        (model.pos_emb.embedding, spec["wpe.weight"]),
        (model.final_norm.shift, spec["ln_f.bias"]),
        (block.att.W_query.kernel, query),
        (block.att.W_key.kernel, key),
        (block.att.W_value.kernel, value),
        (block.att.out_proj.bias, spec["h.1.attn.c_proj.bias"]),
        (block.ff.layers[0].kernel, spec["h.1.mlp.c_fc.weight"]),
        (block.ff.layers[2].bias, spec["h.1.mlp.c_proj.bias"]),
        (block.norm2.scale, spec["h.1.ln_2.weight"]),
    ]:
        np.testing.assert_array_equal(ours[...], theirs)


def test_what_is_read_is_a_model_like_any_other(folder):
    model = GPT2.from_pretrained(folder, dropout=0.5)
    twin = nnx.eval_shape(lambda: GPT2(model.config, rngs=nnx.Rngs(0)))
    twin.eval()
    assert nnx.graphdef(model) == nnx.graphdef(twin)
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(m, nnx.Param))
        for m in (model, twin)
    ]
    assert shapes[0] == shapes[1]
    assert jnp.isfinite(model(jnp.array([[1, 5, 10, 0]]))).all()


def test_each_dropout_has_a_stream_of_its_own(folder):
    models = [GPT2.from_pretrained(folder, dropout=0.5, rngs=nnx.Rngs(seed)) for seed in (0, 0, 1)]
    keys = [
        [str(jax.random.key_data(k[...])) for k in jax.tree.leaves(m, is_leaf=is_key) if is_key(k)]
        for m in models
    ]
    assert len(set(keys[0])) == len(keys[0]) == 5
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def is_key(leaf):
    return isinstance(leaf, nnx.RngKey)


def test_options_reach_the_model(folder):
    model = GPT2.from_pretrained(
        folder, dtype=jnp.bfloat16, backend="blocked", remat=True, precision="highest"
    )
    assert (model.remat, model.trf_blocks[0].att.backend, model.tok_emb.precision) == (
        True,
        "blocked",
        "highest",
    )
    assert model(jnp.array([[1, 5]])).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("parm_dtype", "The nearest is param_dtype"),
        ("torch_dtype", "The nearest is param_dtype"),
        ("weight", "The nearest is weights"),
        ("scan_layer", "The nearest is scan_layers"),
        ("device_map", "Leave it out"),
    ],
)
@pytest.mark.parametrize("load", [from_pretrained, *(cls.from_pretrained for cls in FAMILIES)])
def test_a_keyword_of_another_name_is_refused_before_anything_is_read(load, name, remedy, tmp_path):
    rule = (
        "^from_pretrained takes the keywords dtype, param_dtype, precision, backend, remat, "
        "scan_layers, dropout, rngs, progress, mesh, weights; got "
    )
    with pytest.raises(TypeError, match=f"{rule}{name}. {remedy}$"):
        load(tmp_path / "nowhere", **{name: None})


def test_the_documentation_has_every_keyword():
    page = Path(__file__).parents[2] / "docs" / "models.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(LoadOptions.__annotations__)


def test_only_one_weight_at_a_time_is_in_memory_twice(tmp_path):
    write_fields(tmp_path, GPT2_FIELDS, n_embd=256, n_layer=4, vocab_size=20)
    arrays = {
        name: np.zeros(shape, "float32") for name, shape in gpt2_shapes(256, 4, vocab=20).items()
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    GPT2.from_pretrained(tmp_path)  # what is traced once and kept
    tracemalloc.start()
    model = GPT2.from_pretrained(tmp_path)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert model.config.num_layers == 4
    assert peak - now < sum(array.nbytes for array in arrays.values()) / 3


def save_aligned(arrays, file):
    """Write a file whose arrays begin at multiples of 64 bytes."""
    for count in range(64):
        safetensors.numpy.save_file(arrays, file, metadata={"format": "p" * count})
        (header,) = np.fromfile(file, "<u8", count=1)
        if (8 + int(header)) % 64 == 0:
            return
    raise AssertionError("no length of the metadata aligns the file")


@pytest.mark.parametrize("param_dtype", [None, jnp.bfloat16])
def test_what_lies_as_it_is_needed_is_mapped(tmp_path, monkeypatch, param_dtype):
    write_fields(tmp_path, GPT2_FIELDS, n_embd=256, n_layer=1, vocab_size=32)
    shapes = gpt2_shapes(256, 1, vocab=32)
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    file = tmp_path / "model.safetensors"
    save_aligned(arrays, file)
    before, copied = file.read_bytes(), []
    take = Memory._take

    def counted(memory, size):
        copied.append(size)
        return take(memory, size)

    monkeypatch.setattr(Memory, "_take", counted)
    model = GPT2.from_pretrained(tmp_path, param_dtype=param_dtype)
    attention = model.trf_blocks[0].att
    kernels = [attention.W_query, attention.W_key, attention.W_value]
    fused = sum(layer.kernel[...].nbytes for layer in kernels)
    largest = 256 * 1024 * (4 if param_dtype is None else 2)
    # The fused kernel of queries, keys and values is cut: its parts do not lie together.
    assert (largest in copied) == (param_dtype is not None)
    assert sum(copied) < 2 * fused or param_dtype is not None
    # A donated weight is written to, and the file is not.
    table = model.tok_emb.embedding[...]
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(table)
    expected = arrays["transformer.wte.weight"].astype(doubled.dtype)
    np.testing.assert_array_equal(doubled, 2 * expected)
    assert file.read_bytes() == before


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_is_shown_where_someone_looks(folder, capsys, progress, shown):
    GPT2.from_pretrained(folder, progress=progress)
    output = capsys.readouterr()
    assert ("weights" in output.err, output.out) == (shown, "")


def change(folder, weights, **arrays):
    """Write the weights with other ones; None leaves one out."""
    kept = {name: array for name, array in {**weights, **arrays}.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


def test_all_that_does_not_fit_is_said_at_once(folder, weights):
    wrong = {
        "transformer.ln_f.bias": np.ones(7, "float32"),
        "transformer.h.2.ln_1.bias": np.ones(6, "float32"),
    }
    change(
        folder,
        weights,
        **wrong,
        **{"transformer.wpe.weight": None, "transformer.h.0.ln_1.bias": np.ones(6, int)},
    )
    with pytest.raises(
        ConversionError, match=r"safetensors does not hold the weights of the GPT2"
    ) as raised:
        GPT2.from_pretrained(folder)
    for line in (
        "missing transformer.wpe.weight (8, 6)",
        "mis-shaped transformer.ln_f.bias: expected (6,), got (7,)",
        "unexpected transformer.h.2.ln_1.bias (6,)",
        "not readable transformer.h.0.ln_1.bias: its dtype is I64",
    ):
        assert f"\n  {line}" in str(raised.value)


def test_an_untied_head_is_missed(folder):
    write_fields(folder, GPT2_FIELDS, tie_word_embeddings=False)
    with pytest.raises(ConversionError, match=r"missing lm_head\.weight \(11, 6\)"):
        GPT2.from_pretrained(folder)


def test_nothing_is_read_before_all_is_checked(folder, weights, monkeypatch):
    change(folder, weights, **{"transformer.wpe.weight": None})
    monkeypatch.setattr(
        "flax_attn.convert.headers._map", lambda path, *entry: pytest.fail(f"read {path}")
    )
    with pytest.raises(ConversionError, match="missing"):
        GPT2.from_pretrained(folder)


def test_a_fused_weight_is_missed(tmp_path):
    model = Phi3(
        Phi3Config(8, 10, 4, 1, 2, head_dim=2, context_length=16, vocab_size=11), rngs=nnx.Rngs(0)
    )
    model.save_pretrained(tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.mlp.gate_up_proj.weight"].shape == (20, 8)
    del stored["model.layers.0.self_attn.qkv_proj.weight"]
    stored["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), "float32")
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        ConversionError,
        match=r"missing model\.layers\.0\.self_attn\.qkv_proj\.weight \(16, 8\)",
    ):
        from_pretrained(tmp_path)


def test_a_shard_of_a_gemma3_is_missed(tmp_path):
    model = Gemma3(Gemma3Config(8, 10, 4, 1, 2, context_length=16, vocab_size=11), rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, max_shard_size=500)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"index\.json names the shard model-00002-of-0000\d\.safetensors, and",
    ):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ConversionError, match=r"model\.safetensors is not a whole safetensors file"
    ):
        GPT2.from_pretrained(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"
PULL = r" is a pointer of Git LFS, 74 bytes without weights\. Run git lfs pull in its folder$"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(ConversionError, match=f"{name}{PULL}"):
        GPT2.from_pretrained(folder)
    with pytest.raises(ConversionError, match=f"{name}{PULL}"):
        convert.read_file(folder / name)


def shard(folder, weights, places):
    """Write the weights as two shards, and an index."""
    names = sorted(weights)
    for i in range(2):
        part = {name: weights[name] for name in names[i::2]}
        safetensors.numpy.save_file(part, folder / f"model-0000{i + 1}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))


SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_a_weight_in_two_shards(folder, weights):
    shard(folder, weights, {"weight_map": dict(zip("ab", SHARDS, strict=True))})
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[0]).read_bytes())
    with pytest.raises(
        ConversionError, match=r"00002\.safetensors holds transformer.*00001-of-.* does too"
    ):
        GPT2.from_pretrained(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights in .*none of model\.safetensors, "):
        GPT2.from_pretrained(folder)


def test_no_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*gpt2\. Nothing is downloaded here: .*hf download"
    ):
        GPT2.from_pretrained(tmp_path / "gpt2")


def test_the_config_of_another_family(folder):
    with pytest.raises(
        ValueError,
        match=r"json is that of a model_type 'gpt2', and Llama reads 'llama', 'mistral'\. Use",
    ):
        Llama.from_pretrained(folder)


def test_the_config_names_the_class(folder):
    model = from_pretrained(folder)
    assert type(model) is GPT2
    save_pretrained(model, folder / "copy")
    assert from_pretrained(folder / "copy").config == model.config


def test_every_family_has_model_types_of_its_own():
    """Or classes of transformers that tell it from the others."""
    own = [(name, cls.family.architecture) for cls in FAMILIES for name in cls.family.read]
    assert len(own) == len(set(own))
    shared = [name for name, _ in own if sum(name == other for other, _ in own) > 1]
    assert all(architecture for name, architecture in own if name in shared)
    assert model_types().keys() == {name for name, _ in own}


def test_float64_needs_the_mode_of_64_bits(folder, weights):
    with pytest.raises(ValueError, match=r"float64 need JAX's 64-bit mode"):
        GPT2.from_pretrained(folder, param_dtype="float64")
    change(folder, {name: array.astype("float64") for name, array in weights.items()})
    with pytest.raises(ValueError, match=r"float64 need JAX's 64-bit mode"):
        GPT2.from_pretrained(folder)
    assert (
        GPT2.from_pretrained(folder, param_dtype="float32").tok_emb.embedding.dtype == jnp.float32
    )


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float4_e2m1fn, "complex64", "float31"]
)
def test_a_dtype_that_no_call_may_have_is_refused_before_anything_is_read(name, dtype, tmp_path):
    dtype_name = jnp.dtype(dtype).name if dtype != "float31" else "'float31'"
    rule = (
        f"^{name} must be float64, float32, bfloat16 or float16; got {dtype_name}. Pass"
        f" {name}=jnp.bfloat16"
    )
    with pytest.raises(ValueError, match=rule):
        GPT2.from_pretrained(tmp_path / "nowhere", **{name: dtype})


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED = [
    (
        GPT2_FIELDS,
        {"model_type": "bart"},
        r"model_type must be one of 'gpt2', 'llama', 'mistral'.*; got 'bart'",
    ),
    (GPT2_FIELDS, {"n_embd": "768"}, r"n_embd must be of the kind int; got \"768\""),
    (GPT2_FIELDS, {"n_layer": True}, r"n_layer must be of the kind int; got true"),
    (GPT2_FIELDS, {"vocab_size": None}, r"vocab_size must be of the kind int; got null"),
    (
        GPT2_FIELDS,
        {"activation_function": "relu6"},
        r"activation_function must be one of 'gelu_new', .*; got 'relu6'",
    ),
    (GPT2_FIELDS, {"scale_attn_weights": False}, r"scale_attn_weights must be true, .*; got false"),
    (
        GPT2_FIELDS,
        {"scale_attn_by_inverse_layer_idx": True},
        r"inverse_layer_idx must be false, .*; got true",
    ),
    (
        GPT2_FIELDS,
        {"add_cross_attention": True},
        r"add_cross_attention must be false, .*; got true",
    ),
    (GPT2_FIELDS, {"is_causal": False}, r"is_causal must be true, .*; got false"),
    (
        GPT2_FIELDS,
        {"quantization_config": {"bits": 4}},
        "quant_method must be one of 'mxfp4', 'fp8'; got ''",
    ),
    (
        GPT2_FIELDS,
        {"embd_pdrop": 0.2},
        r"has one probability of dropout; got attn_pdrop=0\.1, embd_pdrop=0\.2.*dropout=",
    ),
    (QWEN2_FIELDS, {"hidden_act": "relu6"}, r"hidden_act must be one of .*; got 'relu6'"),
    (
        QWEN2_FIELDS,
        {"use_sliding_window": 1},
        r"use_sliding_window must be of the kind bool; got 1",
    ),
    (
        QWEN2_FIELDS,
        {"layer_types": [FULL]},
        r"layer_types must name .* each of num_hidden_layers=2 layers; got \['full",
    ),
    (QWEN3_NEXT_FIELDS, {"hidden_act": "gelu"}, r"hidden_act must be \"silu\", .*; got \"gelu\""),
    (
        QWEN3_NEXT_FIELDS,
        {"full_attention_interval": 0},
        r"full_attention_interval must be from 1 to 2147483647; got 0",
    ),
    (
        QWEN3_NEXT_FIELDS,
        {"layer_types": [FULL, SLIDING]},
        (
            r"must name 'linear_attention' or 'full_attention' for each of num_hidden_layers=2"
            r" layers; got \['full"
        ),
    ),
    (
        QWEN3_NEXT_FIELDS,
        {"layer_types": [FULL]},
        r"must name 'linear_attention' or .*; got \['full_attention'\]",
    ),
    (
        QWEN2_FIELDS,
        {"layer_types": [FULL, "linear"]},
        r"layer_types must name 'sliding_attention' or .*'linear'\]",
    ),
    (
        QWEN2_FIELDS,
        {"layer_types": [FULL, SLIDING]},
        r"needs a window; got use_sliding_window=false, sliding_window=4096",
    ),
    (PHI3_FIELDS, {"resid_pdrop": 0.1}, r"resid_pdrop must be 0\.0, .*; got 0\.1"),
    (
        PHI3_FIELDS,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"'default' or 'longrope', .*; got LinearScaling",
    ),
    (PHI3_FIELDS, {"rope_scaling": {"type": "su"}}, r"rope_scaling lacks the field short_factor"),
    (
        PHI3_FIELDS,
        {"rope_scaling": {"type": "longrope", "short_factor": ["1"]}},
        (
            r"rope_scaling: short_factor must be a list of values of the kind int \| float; got"
            r" \[\"1\"\]"
        ),
    ),
    (
        PHI3_FIELDS,
        {"partial_rotary_factor": 0.5},
        r"partial_rotary_factor must rotate an even .*; got 0\.5 of head_dim=\d+, which is 1",
    ),
    (
        GEMMA_FIELDS,
        {"use_bidirectional_attention": True},
        r"use_bidirectional_attention must be false, .*; got true",
    ),
    (
        GEMMA2_FIELDS,
        {"use_bidirectional_attention": True},
        r"use_bidirectional_attention must be false, .*; got true",
    ),
    (
        GEMMA2_FIELDS,
        {"sliding_window": None},
        r"'sliding_attention', which needs a window; got sliding_window=null",
    ),
    (
        GEMMA2_FIELDS,
        {"layer_types": [FULL] * 3},
        r"layer_types must name .* num_hidden_layers=2 layers; got \['full",
    ),
    (
        GEMMA2_FIELDS,
        {"attn_logit_softcapping": 0.0},
        r"soft_cap must be positive.*got soft_cap=0\.0",
    ),
    (
        GEMMA3_FIELDS,
        {"attn_logit_softcapping": 50.0},
        r"attn_logit_softcapping must be null, .*; got 50\.0",
    ),
    (
        GEMMA3_FIELDS,
        {"rope_parameters": {"rope_type": "default"}},
        r"rope_parameters: rope_type=.*would be ignored",
    ),
    (
        GEMMA3_FIELDS,
        {"rope_parameters": {SLIDING: {"rope_type": "su"}}},
        (
            r"rope_parameters: sliding_attention: rope_parameters: rope_type must be one of"
            r" 'default', .*; got 'su'"
        ),
    ),
    (DIFFLLAMA_FIELDS, {"attention_dropout": 0.1}, r"attention_dropout must be 0\.0, .*; got 0\.1"),
    (
        SMOLLM3_FIELDS,
        {"no_rope_layers": [1]},
        r"no_rope_layers must hold 1 or 0 .*_layers=2 layers, .*; got \[1\]",
    ),
    (
        SMOLLM3_FIELDS,
        {"no_rope_layers": [1, 2]},
        r"no_rope_layers must hold 1 or 0 .*; got \[1, 2\]",
    ),
    (
        SMOLLM3_FIELDS,
        {"layer_types": [FULL, "chunked"]},
        r"layer_types must name 'sliding_attention' or .*'chunked'\]",
    ),
    (LLAMA_FIELDS, {"hidden_act": "relu6"}, r"hidden_act must be one of .*; got 'relu6'"),
    (LLAMA_FIELDS, {"sliding_window": 8}, r"sliding_window must be null, .*; got 8"),
    (
        LLAMA_FIELDS,
        {"partial_rotary_factor": 0.5},
        r"partial_rotary_factor must be 1\.0, .*; got 0\.5",
    ),
    (
        LLAMA_FIELDS,
        {"rope_scaling": {"type": "su"}},
        r"rope_scaling: type must be one of 'default', .*; got 'su'",
    ),
    (
        LLAMA_FIELDS,
        {"rope_parameters": {"rope_type": "axial"}},
        r"rope_parameters: rope_type must be one of",
    ),
    (
        LLAMA_FIELDS,
        {"rope_parameters": {"rope_type": "longrope"}},
        r"rope_parameters lacks the field short_factor",
    ),
    (
        LLAMA_FIELDS,
        {"rope_parameters": {"rope_type": "linear"}},
        r"rope_parameters lacks the field factor",
    ),
    (
        LLAMA_FIELDS,
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
        r"rope_scaling lacks the field low_freq",
    ),
    (
        LLAMA_FIELDS,
        {"rope_parameters": {**YARN, "short_factor": [1]}},
        r"short_factor=\[1\] would be ignored",
    ),
    (
        LLAMA_FIELDS,
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor must be 1\.0",
    ),
    (
        LLAMA_FIELDS,
        {"rope_scaling": {"type": "dynamic", "factor": 0.5}},
        r"factor is how many times .*factor=0\.5",
    ),
]


@pytest.mark.parametrize(("fields", "changes", "match"), REFUSED)
def test_a_config_that_asks_for_another_function(tmp_path, fields, changes, match):
    write_fields(tmp_path, fields, **changes)
    with pytest.raises(ValueError, match=match) as raised:
        read_config(tmp_path)
    of_values = ("factor is how", "soft_cap must", "width must")
    assert "config.json" in str(raised.value) or str(raised.value).startswith(of_values)


@pytest.mark.parametrize("fields", [GPT2_FIELDS, LLAMA_FIELDS], ids=["gpt2", "llama"])
def test_a_config_that_lacks_a_field(tmp_path, fields):
    for name in fields.keys() - {"num_key_value_heads"}:
        write_fields(tmp_path, {n: value for n, value in fields.items() if n != name})
        with pytest.raises(ValueError, match=rf"config\.json lacks the field {name}\."):
            read_config(tmp_path)


def test_three_probabilities_are_one_if_asked(tmp_path):
    write_fields(tmp_path, GPT2_FIELDS, embd_pdrop=0.2)
    assert read_config(tmp_path, dropout=0.3).dropout == 0.3


def test_what_a_mistral_leaves_out(tmp_path):
    fields = {name: value for name, value in LLAMA_FIELDS.items() if name != "num_key_value_heads"}
    write_fields(tmp_path, fields, model_type="mistral", num_attention_heads=8)
    config = read_config(tmp_path)
    assert (config.window, config.num_kv_heads) == (4096, 8)
    write_fields(tmp_path, fields)
    assert (read_config(tmp_path).window, read_config(tmp_path).num_kv_heads) == (None, None)


def test_what_a_qwen3_next_leaves_out(tmp_path):
    write_fields(tmp_path, QWEN3_NEXT_FIELDS, num_hidden_layers=9, rope_scaling=None)
    config = read_config(tmp_path)
    assert (config.full_layers, config.head_width, config.rope.width) == ((3, 7), 256, 64)
    assert (config.num_experts, config.top_k, config.d_expert, config.d_shared) == (
        512,
        10,
        512,
        512,
    )
    assert (
        config.linear_heads,
        config.linear_key_heads,
        config.kernel_size,
        config.renormalize,
    ) == (32, 16, 4, True)
    write_fields(tmp_path, QWEN3_NEXT_FIELDS, num_experts=0)
    assert read_config(tmp_path).dense_layers == (0, 1)


def test_what_a_qwen2_leaves_out(tmp_path):
    write_fields(
        tmp_path,
        {name: LLAMA_FIELDS[name] for name in LLAMA_FIELDS if name != "num_key_value_heads"},
    )
    fields = {
        "model_type": "qwen2",
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_size": 32,
    }
    write_fields(tmp_path, LLAMA_FIELDS, **fields)
    assert (read_config(tmp_path).window, read_config(tmp_path).num_kv_heads) == (None, None)
    del fields["num_key_value_heads"]
    write_fields(
        tmp_path, {**LLAMA_FIELDS, **fields, "num_hidden_layers": 30}, use_sliding_window=True
    )
    assert read_config(tmp_path).full_layers == tuple(range(28))


WINDOWS = [
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, (5, 5)),
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (None, 5)),
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, (None, None)),
    ({"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL]}, (5, None)),
    ({"use_sliding_window": True, "sliding_window": None}, (None, None)),
    ({"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}, (None, None)),
]


@pytest.mark.parametrize(("changes", "windows"), WINDOWS)
def test_the_window_of_each_layer_is_read_and_written(tmp_path, changes, windows):
    write_fields(tmp_path, QWEN2_FIELDS, **changes)
    config = read_config(tmp_path)
    assert config.windows == windows
    (tmp_path / "config.json").write_text(loader.write_config(Qwen2.family, config, "float32"))
    assert read_config(tmp_path).windows == windows


def test_a_layer_that_is_not_there():
    with pytest.raises(
        ValueError, match=r"full_layers must be numbers of layers, 0 to 1; got \(2,\)"
    ):
        replace(LLAMA, window=3, full_layers=(2,))
    with pytest.raises(
        ValueError, match=r"unrotated_layers must be numbers of layers, 0 to 1; got \(0, -1\)"
    ):
        SmolLM3Config(*SIZES, unrotated_layers=(0, -1))


def test_what_a_qwen3_leaves_out(tmp_path):
    fields = {name: value for name, value in LLAMA_FIELDS.items() if name != "num_key_value_heads"}
    write_fields(tmp_path, fields, model_type="qwen3", num_attention_heads=32)
    assert (read_config(tmp_path).head_dim, read_config(tmp_path).num_kv_heads) == (128, 32)


def test_what_the_gemmas_leave_out(tmp_path):
    fields = {name: value for name, value in LLAMA_FIELDS.items() if name != "num_key_value_heads"}
    fields |= {"num_attention_heads": 16, "num_hidden_layers": 7}
    write_fields(tmp_path, fields, model_type="gemma", hidden_act="gelu")
    config = read_config(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.tied, config.activation) == (
        256,
        16,
        True,
        "gelu_tanh",
    )
    write_fields(tmp_path, fields, model_type="gemma2")
    config = read_config(tmp_path)
    assert (config.window, config.full_layers, config.query_pre_attn_scalar) == (
        4096,
        (1, 3, 5),
        256,
    )
    assert (config.score_cap, config.logit_cap, config.num_kv_heads) == (50.0, 30.0, 4)
    write_fields(tmp_path, fields, model_type="gemma3_text")
    config = read_config(tmp_path)
    assert (config.full_layers, config.logit_cap) == ((5,), None)
    assert (config.rope, config.local_rope) == (RoPE(1e6), RoPE())
    write_fields(tmp_path, fields, model_type="gemma3_text", layer_types=None)
    assert read_config(tmp_path) == config


def test_a_gemma3_of_transformers_4(tmp_path):
    linear = {"rope_type": "linear", "factor": 8.0}
    changes = {
        "sliding_window_pattern": 2,
        "rope_theta": 500.0,
        "rope_local_base_freq": 30.0,
        "rope_scaling": linear,
    }
    write_fields(tmp_path, GEMMA3_FIELDS, **changes)
    config = read_config(tmp_path)
    assert config.full_layers == (1,)
    assert (config.rope, config.local_rope) == (RoPE(500.0, scaling=LinearScaling(8.0)), RoPE(30.0))


def test_what_a_smollm3_leaves_out(tmp_path):
    write_fields(
        tmp_path, SMOLLM3_FIELDS, num_hidden_layers=9, use_sliding_window=True, sliding_window=5
    )
    config = read_config(tmp_path)
    assert (config.unrotated_layers, config.rope.base, config.tied) == ((3, 7), 2e6, True)
    assert [layer for layer, window in enumerate(config.windows) if window] == [3, 7]


def test_a_part_of_a_head_is_read_as_it_was_written(tmp_path):
    for head_dim in (6, 66, 96):
        for width in range(2, head_dim + 2, 2):
            config = Phi3Config(12, 10, 2, 1, head_dim=head_dim, rope=RoPE(width=width))
            (tmp_path / "config.json").write_text(
                loader.write_config(Phi3.family, config, "float32")
            )
            assert read_config(tmp_path).rope.width == (width if width < head_dim else None)


def test_dropout_that_a_model_lacks_may_be_replaced(tmp_path):
    write_fields(tmp_path, PHI3_FIELDS, resid_pdrop=0.1, attention_dropout=0.2)
    with pytest.raises(ValueError, match=r"resid_pdrop must be 0\.0"):
        read_config(tmp_path)
    assert read_config(tmp_path, dropout=0.0).dropout == 0


def test_a_rotated_part_that_is_null_beside_the_parameters_is_missing(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    write_fields(tmp_path, PHI3_FIELDS, rope_parameters=rope, partial_rotary_factor=None)
    assert read_config(tmp_path).rope == RoPE(500.0)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_a_phi3_of_any_age_scales_by_longrope(tmp_path, name):
    scaling = {"type": name, "short_factor": [1.0], "long_factor": [2]}
    write_fields(tmp_path, PHI3_FIELDS, rope_scaling=scaling, original_max_position_embeddings=4)
    assert read_config(tmp_path).rope.scaling == LongRoPEScaling(4.0, 4, (1.0,), (2.0,))


def test_a_longrope_without_a_factor_for_each_frequency(tmp_path):
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 2.0]}
    write_fields(tmp_path, PHI3_FIELDS, rope_scaling=scaling)
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]
    arrays = dict.fromkeys(names, np.ones(8, "float32"))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"long_factors must be one for each of the 1 frequencies .*got 2"
    ):
        from_pretrained(tmp_path)


def test_the_original_context_beside_the_rope_counts_first(tmp_path):
    write_fields(
        tmp_path, LLAMA_FIELDS, rope_scaling={**YARN, "original_max_position_embeddings": 8}
    )
    assert read_config(tmp_path).rope.scaling == YaRNScaling(4.0, 8)
    both = {**YARN, "original_max_position_embeddings": 8}
    write_fields(tmp_path, LLAMA_FIELDS, rope_scaling=both, original_max_position_embeddings=5)
    assert read_config(tmp_path).rope.scaling == YaRNScaling(4.0, 5)


SCALINGS = [
    None,
    LinearScaling(2.0),
    DynamicNTKScaling(4.0, 4),
    Llama3Scaling(8.0, 8),
    YaRNScaling(4.0, 4),
    YaRNScaling(4.0, 4, 16.0, 2.0, truncate=False, attention_factor=1.5),
    YaRNScaling(4.0, 4, mscale=0.7, mscale_all_dim=0.4),
    LongRoPEScaling(4.0, 4, (1.0,), (2.5,), attention_factor=1.25),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_rope_is_read_as_it_was_written(tmp_path, scaling):
    config = replace(
        LLAMA, rope=RoPE(500.0, scaling=scaling), activation="gelu_exact", dropout=0.25
    )
    (tmp_path / "config.json").write_text(write_config(config))
    assert read_config(tmp_path) == config


def test_a_scale_that_transformers_would_ignore_becomes_an_amplitude(tmp_path):
    scaling = YaRNScaling(4.0, 4, mscale=0.7)
    (tmp_path / "config.json").write_text(write_config(replace(LLAMA, rope=RoPE(scaling=scaling))))
    assert read_config(tmp_path).rope.scaling == YaRNScaling(
        4.0, 4, attention_factor=scaling.amplitude()
    )


class HalfScaling(Scaling):
    def frequencies(self, base, width):
        return base ** -np.linspace(0, 0.5, width // 2)


UNWRITABLE = [
    (
        {"num_heads": 3, "num_kv_heads": 1},
        r"num_heads must divide d_model.*got d_model=8, num_heads=3",
    ),
    (
        {"window": 4, "full_layers": (1,)},
        r"stored as Mistral, which has it in every layer; got full_layers=\(1,\)",
    ),
    (
        {"window": 4, "ff_bias": True},
        r"stored as Mistral, which has no biases; got attention_bias=False, ff_bias=True",
    ),
    (
        {"rope": RoPE(interleaved=True)},
        r"rotates whole heads here, .*got rope\.interleaved=True, rope\.width=None",
    ),
    (
        {"head_dim": 4, "rope": RoPE(width=2)},
        r"rotates whole heads here, .*got rope\.interleaved=False, rope\.width=2",
    ),
    (
        {"rope": RoPE(scaling=HalfScaling(2.0))},
        r"scales RoPE by LinearScaling, .*; got HalfScaling\(factor=2\.0\)",
    ),
    (
        {"rope": RoPE(scaling=DynamicNTKScaling(2.0, 4))},
        r"original one: 8; got context_length=16.*context_length=8",
    ),
]


@pytest.mark.parametrize(("changes", "match"), UNWRITABLE)
def test_a_config_that_transformers_does_not_compute(changes, match):
    with pytest.raises(ValueError, match=match):
        write_config(replace(LLAMA, **changes))


SIZES = (8, 10, 4, 2, 2)
UNWRITABLE_FAMILIES = [
    (
        Phi3,
        Phi3Config(*SIZES, rope=RoPE(scaling=LinearScaling(2.0))),
        r"by LongRoPEScaling alone, .*scaling=Linear",
    ),
    (
        Phi3,
        Phi3Config(*SIZES, window=4, full_layers=(0,)),
        r"its window in every layer; got .*full_layers=\(0,\)",
    ),
    (
        Phi3,
        Phi3Config(*SIZES, rope=RoPE(interleaved=True)),
        r"rotates whole heads here, .*got rope\.interleaved=True",
    ),
    (
        Gemma,
        GemmaConfig(*SIZES, activation="gelu_exact"),
        r"Gemma takes the tanh .*; got activation='gelu_exact'",
    ),
    (
        Gemma,
        GemmaConfig(*SIZES, window=4),
        r"Gemma has no window; got window=4\. Save with flax_attn\.convert",
    ),
    (
        Gemma3,
        Gemma3Config(*SIZES, score_cap=9.0),
        r"Gemma 3 does not cap scores; got score_cap=9\.0\. Save with",
    ),
    (
        DiffLlama,
        DiffLlamaConfig(*SIZES, dropout=0.1),
        r"DiffLlama has no dropout; got dropout=0\.1\. Save with flax_a",
    ),
    (
        DiffLlama,
        DiffLlamaConfig(*SIZES, window=4),
        r"DiffLlama has no window; got window=4\. Save with flax_attn",
    ),
    (
        Olmo2,
        Olmo2Config(*SIZES, window=4),
        r"OLMo 2 has no window; got window=4\. Save with flax_attn\.convert\.save",
    ),
]


@pytest.mark.parametrize(("cls", "config", "match"), UNWRITABLE_FAMILIES)
def test_a_config_that_transformers_does_not_compute_in_this_family(cls, config, match):
    with pytest.raises(ValueError, match=match):
        loader.write_config(cls.family, config, "float32")


@pytest.mark.parametrize("changes", [{"qkv_bias": False}, {"tied": False, "qkv_bias": False}])
def test_a_model_that_transformers_does_not_compute_is_not_written(tmp_path, changes):
    model = GPT2(GPT2Config(6, 2, 1, context_length=8, vocab_size=11, **changes), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"GPT-2 has biases in the projections .*; got qkv_bias=False\. Save with"
    ):
        model.save_pretrained(tmp_path / "new")
    assert not list(tmp_path.iterdir())


LAYOUTS = ("torch_mha", "hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "flax")
NO_PLACE = [
    (
        lambda: attention_layer(q_norm=RMSNorm(2), k_norm=RMSNorm(2)),
        r"no place for norms of queries and keys; got q_norm=RMSNorm",
        LAYOUTS,
    ),
    (
        lambda: attention_layer(output_gate="heads"),
        r"no place for a gate of the heads; got output_gate='heads'",
        LAYOUTS,
    ),
    (
        lambda: attention_layer(head_dim=5),
        r"share its width; got num_heads=4, head_dim=5, d_out=8",
        ("torch_mha", "hf_gpt2", "hf_bert"),
    ),
    (
        lambda: DifferentialAttention(8, 8, None, 0.0, 4, True, rngs=nnx.Rngs(0)),
        r"no place for lambda; got a DifferentialAttention",
        LAYOUTS,
    ),
]


@pytest.mark.parametrize(("make", "match", "layouts"), NO_PLACE)
def test_attention_that_layouts_have_no_place_for_is_refused(make, match, layouts):
    attention = nnx.eval_shape(make)
    for layout in layouts:
        with pytest.raises(ConversionError, match=match):
            convert.state_dict(attention, layout)


def attention_layer(**options):
    return MultiHeadAttention(8, 8, None, 0.0, 4, True, **options, rngs=nnx.Rngs(0))


def test_what_else_a_folder_holds_stays(folder, weights):
    model = GPT2.from_pretrained(folder)
    (folder / "tokenizer.json").write_text("kept")
    model.save_pretrained(folder, max_shard_size=2000)
    files = {file.name for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < files
    assert "model.safetensors" not in files
    again = GPT2.from_pretrained(folder)
    again.save_pretrained(folder)
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    written = safetensors.numpy.load_file(folder / "model.safetensors")
    assert {name: array.tobytes() for name, array in written.items()} == {
        n: a.tobytes() for n, a in weights.items()
    }


def test_shards_are_as_large_as_allowed(folder):
    GPT2.from_pretrained(folder).save_pretrained(folder / "new", max_shard_size=700)
    index = json.loads((folder / "new" / "model.safetensors.index.json").read_text())
    shards = [
        safetensors.numpy.load_file(file)
        for file in sorted((folder / "new").glob("model-*.safetensors"))
    ]
    sizes = [sum(array.nbytes for array in arrays.values()) for arrays in shards]
    assert all(size <= 700 or len(arrays) == 1 for size, arrays in zip(sizes, shards, strict=True))
    assert all(a + b > 700 for a, b in pairwise(sizes))
    assert index["metadata"]["total_size"] == sum(sizes)
    assert sorted(index["weight_map"]) == sorted(name for arrays in shards for name in arrays)


def test_a_path_that_is_a_file(folder):
    model = GPT2.from_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"stored as a folder; got .*config\.json, which is a file"
    ):
        model.save_pretrained(folder / "config.json")


class Other(Llama):
    """A model that transformers does not know."""

    family = None


def test_a_model_that_transformers_does_not_know(tmp_path):
    model = nnx.eval_shape(lambda: Other(LLAMA, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError,
        match=r"Other has no form in .*sets no `family`\. Use .* flax_attn\.convert\.save",
    ):
        model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"Other has no form in .*Use flax_attn\.models\.from_pretrained to load"
    ):
        Other.from_pretrained(tmp_path)


def test_a_shard_of_no_size(folder):
    with pytest.raises(
        ValueError, match="max_shard_size must be a positive integer; got max_shard_size=0"
    ):
        GPT2.from_pretrained(folder).save_pretrained(folder, max_shard_size=0)
