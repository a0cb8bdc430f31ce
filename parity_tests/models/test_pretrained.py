"""Models of transformers through a folder into ours, and back: the same function, and the same bits."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from flax_attn import convert
from flax_attn.models import GPT2, Llama, from_pretrained
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.hugging_face.fields import read_fields
from flax_attn.parity import tolerance

B, T, CONTEXT = 3, 11, 16
GPT2_SIZES = {"n_embd": 6, "n_head": 2, "n_layer": 2, "n_positions": CONTEXT, "vocab_size": 13}
LLAMA_SIZES = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 13,
}
MODULES = (modeling_rope_utils, modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3)
NO_IDS = {"bos_token_id": None, "eos_token_id": None}


class Float64Torch:
    """Stands for torch in modules of transformers that name float32: in rotary angles, RMS norms and softmax."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def in_float64(monkeypatch):
    """Let transformers compute all in float64."""
    for module in MODULES:
        monkeypatch.setattr(module, "torch", Float64Torch())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def config_of(kind, **fields):
    sizes = GPT2_SIZES if kind == "GPT2" else LLAMA_SIZES
    return getattr(transformers, f"{kind}Config")(**sizes | NO_IDS | {"dtype": "float64"} | fields)


def build(kind, dtype=torch.float64, **fields):
    """Return a model of transformers, every parameter random."""
    model = AutoModelForCausalLM.from_config(config_of(kind, **fields), attn_implementation="sdpa").to(dtype).eval()
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.5, parameter.shape)).to(dtype)
    return model


def read_config(folder):
    return loader.read_config(Llama, Llama.family, read_fields(folder))


def stored(kind, folder, **fields):
    """Return a model of transformers, and ours read from its folder."""
    theirs = build(kind, **fields)
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder)


def their_gradients(model, tokens, cotangent):
    logits = model(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(cotangent)).sum().backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def our_gradients(model, tokens, cotangent):
    def weighed(model, tokens, cotangent):
        logits = model(tokens)
        return (logits * cotangent).sum(), logits

    gradients, logits = nnx.jit(nnx.grad(weighed, has_aux=True))(model, jnp.asarray(tokens), jnp.asarray(cotangent))
    flat = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}
    return np.asarray(logits), convert.to_layout(flat, model.family.layout)


def assert_same_function(theirs, ours):
    random = np.random.default_rng(1)
    tokens, cotangent = random.integers(0, 13, (B, T)), random.normal(size=(B, T, 13))
    their_logits, their = their_gradients(theirs, tokens, cotangent)
    our_logits, our = our_gradients(ours, tokens, cotangent)
    assert_equal_logits(our_logits, their_logits)
    errors = tolerance.gradient_errors(our, their)
    assert our.keys() == their.keys()
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def assert_same_logits(theirs, ours, t):
    tokens = np.random.default_rng(1).integers(0, 13, (B, t))
    logits = nnx.jit(lambda model, tokens: model(tokens))(ours, jnp.asarray(tokens))
    assert_equal_logits(np.asarray(logits), theirs(torch.from_numpy(tokens)).logits.detach().numpy())


def assert_equal_logits(ours, theirs):
    errors = tolerance.relative({"logits": ours}, {"logits": theirs})
    assert errors["logits"] <= tolerance.FORWARD, errors


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
FUNCTIONS = [
    ("GPT2", {"activation_function": "gelu", "reorder_and_upcast_attn": True}),
    ("GPT2", {"tie_word_embeddings": False, "n_inner": 10, "layer_norm_epsilon": 0.1, "n_layer": 1}),
    ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "hidden_act": "gelu"}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None, "num_hidden_layers": 1}),
    ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    ("Qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1, "head_dim": 6}),
    ("Qwen3", {"attention_bias": True, "rms_norm_eps": 0.1, **WINDOW, "layer_types": [SLIDING, FULL]}),
]


@pytest.mark.parametrize(("kind", "fields"), FUNCTIONS, ids=str)
def test_a_model_is_the_same_function(kind, fields, tmp_path, in_float64):
    assert_same_function(*stored(kind, tmp_path, **fields))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "silu"])
def test_activations_are_the_same_function(name, tmp_path):
    assert_same_logits(*stored("GPT2", tmp_path, activation_function=name, n_layer=1), T)


@pytest.mark.parametrize("window", [4, None])
def test_mistral_is_a_llama_with_a_window(window, tmp_path, in_float64):
    theirs, ours = stored("Mistral", tmp_path, sliding_window=window)
    assert ours.config.window == window
    assert_same_logits(theirs, ours, T)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
TURNS = {"beta_fast": 0.2, "beta_slow": 0.05}  # at indices 1 and 3 of the 4 frequencies
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 50.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {**LLAMA3, "rope_theta": 50.0, "original_max_position_embeddings": 8},
    "yarn": YARN,
    "yarn as long as the model": {"rope_type": "yarn", "factor": 2.0},
    "yarn without a factor": {**YARN, "factor": None},
    "yarn of DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "rope_theta": 50.0, **TURNS},
    "yarn with one scale": {**YARN, "mscale": 0.7},
    "yarn not rounded": {**YARN, "truncate": False, "attention_factor": 1.25, "rope_theta": 50.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_are_the_same_function(name, tmp_path, in_float64):
    theirs, ours = stored("Llama", tmp_path, rope_parameters=dict(ROPES[name]), num_hidden_layers=1)
    assert_same_logits(theirs, ours, CONTEXT)


@pytest.mark.parametrize("t", [CONTEXT, CONTEXT + 1, 2 * CONTEXT])
def test_a_dynamic_rope_reaches_beyond_its_original_context(t, tmp_path, in_float64):
    theirs, ours = stored("Llama", tmp_path, rope_parameters=dict(ROPES["dynamic"]), num_hidden_layers=1)
    assert ours.config.context_length == 2.5 * CONTEXT
    assert_same_logits(theirs, ours, t)


def as_version_4(config):
    """Return a config as transformers 4 wrote it."""
    rope = dict(config.pop("rope_parameters"))
    theta, name = rope.pop("rope_theta"), rope.pop("rope_type")
    old = {"rope_theta": theta, "rope_scaling": {"type": name, **rope} if name != "default" else None}
    return config | old | {"torch_dtype": config.pop("dtype")}


@pytest.mark.parametrize("name", ROPES)
def test_a_config_of_transformers_4_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    config, file = read_config(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(as_version_4(json.loads(file.read_text()))))
    assert read_config(tmp_path) == config
    assert config.rope.base == ROPES[name].get("rope_theta", 10000.0)


@pytest.mark.parametrize("name", ROPES)
def test_what_we_write_transformers_reads_alike(name, tmp_path):
    config_of("Llama", rope_parameters=dict(ROPES[name])).save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_config(tmp_path)
    (tmp_path / "config.json").write_text(loader.write_config(Llama.family, ours, "float64"))
    assert read_config(tmp_path) == ours
    after = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_configs_equal(after, before, left_out={"rope_parameters"})
    frequencies = [their_frequencies(config) for config in (after, before)]
    np.testing.assert_array_equal(*frequencies)


def their_frequencies(config):
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    return np.append(rotary.inv_freq.numpy(), rotary.attention_scaling)


def assert_configs_equal(after, before, left_out=frozenset()):
    left_out = left_out | {"transformers_version", "_name_or_path", "architectures"}
    left, right = ({k: v for k, v in c.to_dict().items() if k not in left_out} for c in (after, before))
    assert left == right


KINDS = {  # with no field at its default
    "GPT2": {
        "tie_word_embeddings": False,
        "n_inner": 10,
        "resid_pdrop": 0.2,
        "attn_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "activation_function": "gelu",
        "layer_norm_epsilon": 0.01,
    },
    "Llama": {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.3, "rms_norm_eps": 0.01},
    "Mistral": {"sliding_window": 5, "tie_word_embeddings": True, "hidden_act": "gelu"},
    "Qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "attention_dropout": 0.3,
        "tie_word_embeddings": True,
    },
    "Qwen3": {**WINDOW, "layer_types": [SLIDING, FULL], "max_window_layers": 0, "attention_bias": True},
}


def bits(model):
    return {
        name: (value.dtype, value.contiguous().view(torch.uint8).numpy().tobytes()) for name, value in model.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit(kind, dtype, tmp_path):
    theirs = build(kind, dtype, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours", max_shard_size=1000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert bits(again.state_dict()) == bits(theirs.state_dict())
    assert_configs_equal(again.config, AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").config)


def test_a_head_that_is_tied_stays_so(tmp_path):
    _, ours = stored("GPT2", tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.transformer.wte.weight


def parameters(model):
    return {name: np.asarray(param[...]).tobytes() for name, param in convert.parameters(model).items()}


def old_gpt2(weights):
    """As the first uploads were: without the head, its prefix, and with what was not a parameter."""
    weights = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
    return weights | {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4), "h.1.attn.bias": mask.clone()}


def old_llama(weights):
    """Without the prefix, and with the frequencies."""
    return {name.removeprefix("model."): value for name, value in weights.items()} | {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)
    }


def inside(weights):
    """As a larger module, or one that was compiled, stores them."""
    return {f"_orig_mod.{name}": value for name, value in weights.items()}


def with_head(weights):
    """With the head, though it is tied."""
    return weights | {"lm_head.weight": next(v for k, v in weights.items() if k.endswith("wte.weight")).clone()}


@pytest.mark.parametrize(
    ("kind", "change"), [("GPT2", old_gpt2), ("GPT2", with_head), ("Llama", old_llama), ("Llama", inside)]
)
def test_other_names_for_the_same_weights(kind, change, tmp_path):
    _, ours = stored(kind, tmp_path, **({"tie_word_embeddings": True} if change is old_llama else {}))
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    assert parameters(from_pretrained(tmp_path)) == parameters(ours)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_of_pytorch_is_read(shards, tmp_path):
    theirs, ours = stored("GPT2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(theirs.state_dict())
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i + 1}.bin" for i in range(shards)]
    for i, file in enumerate(files):
        torch.save({name: theirs.state_dict()[name] for name in names[i :: len(files)]}, tmp_path / file)
    if shards > 1:
        index = {"weight_map": {name: files[i % len(files)] for i, name in enumerate(names)}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert parameters(GPT2.from_pretrained(tmp_path)) == parameters(ours)


def test_a_checkpoint_of_more_than_weights(tmp_path):
    theirs, _ = stored("GPT2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**theirs.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(convert.ConversionError, match=r"unexpected epoch \(\)"):
        GPT2.from_pretrained(tmp_path)


def test_shards_of_transformers_are_read(tmp_path):
    theirs, ours = stored("Llama", tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="2KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert parameters(Llama.from_pretrained(tmp_path / "many")) == parameters(ours)


def test_a_parameter_is_cast_as_asked(tmp_path):
    theirs, _ = stored("Llama", tmp_path)
    ours = Llama.from_pretrained(tmp_path, param_dtype=jnp.bfloat16)
    expected = {name: value.to(torch.bfloat16) for name, value in theirs.state_dict().items()}
    cast = convert.state_dict(ours, ours.family.layout)
    assert {array.dtype.name for array in cast.values()} == {"bfloat16"}
    assert {n: a.tobytes() for n, a in cast.items()} == {n: b for n, (_, b) in bits(expected).items()}


def test_dropout_is_drawn_as_in_the_config(tmp_path):
    _, ours = stored("GPT2", tmp_path, resid_pdrop=0.25, attn_pdrop=0.25, embd_pdrop=0.25)
    assert ours.config.dropout == 0.25
    other = GPT2.from_pretrained(tmp_path, dropout=0.5)
    assert other.config == replace(ours.config, dropout=0.5)
    assert jax.tree.leaves(nnx.state(other, nnx.RngState))
