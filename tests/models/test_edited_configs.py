"""Each edited field of each `config.json` loads, or one of our errors says why not."""

import json
import shutil
import traceback
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import attn_spec
import flax_attn
from attn_spec.hugging_face.fields import read_fields
from flax_attn.models import from_pretrained
from flax_attn.models.bert import Bert, BertConfig, BertMaskedLM
from flax_attn.models.deepseekv3 import DeepseekV3, DeepseekV3Config
from flax_attn.models.diffllama import DiffLlama, DiffLlamaConfig
from flax_attn.models.dinov2 import DINOv2, DINOv2Classifier, DINOv2Config
from flax_attn.models.gemma import Gemma, GemmaConfig
from flax_attn.models.gemma2 import Gemma2, Gemma2Config
from flax_attn.models.gemma3 import Gemma3, Gemma3Config
from flax_attn.models.gpt2 import GPT2, GPT2Config
from flax_attn.models.gptoss import GptOss, GptOssConfig
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.modernbert import ModernBert, ModernBertConfig, ModernBertMaskedLM
from flax_attn.models.olmo2 import Olmo2, Olmo2Config
from flax_attn.models.phi3 import Phi3, Phi3Config
from flax_attn.models.qwen2 import Qwen2, Qwen2Config
from flax_attn.models.qwen3 import Qwen3, Qwen3Config
from flax_attn.models.qwen3moe import Qwen3Moe, Qwen3MoeConfig
from flax_attn.models.qwen3next import Qwen3Next, Qwen3NextConfig
from flax_attn.models.registry import FAMILIES, model_class
from flax_attn.models.smollm3 import SmolLM3, SmolLM3Config
from flax_attn.models.t5 import T5, T5Config
from flax_attn.models.vit import ViT, ViTClassifier, ViTConfig
from flax_attn.models.whisper import Whisper, WhisperConfig

SIZES = {"num_heads": 4, "num_layers": 2, "context_length": 16, "vocab_size": 11}
HALVES = {"window": 5, "full_layers": (1,)}
MOE = {"num_experts": 4, "top_k": 2, "d_expert": 6}
LINEAR = {"linear_heads": 4, "linear_key_heads": 2, "linear_head_dim": 3, "linear_value_dim": 5}
LATENT = {"kv_lora_rank": 5, "q_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2}
IMAGES = {"image_size": (8, 8), "patch_size": (4, 4), "channels": 2}
SOUND = {"num_mel": 5, "num_positions": 7, "context_length": 9, "vocab_size": 11}
BERT = BertConfig(6, 2, 2, context_length=8, vocab_size=11)
VIT, DINO = ViTConfig(6, 2, 2, **IMAGES), DINOv2Config(6, 2, 2, **IMAGES)
MODERN = ModernBertConfig(8, 12, 2, 2, context_length=16, vocab_size=11, window=4)


def decoder(config, **more):
    return config(8, 12, **SIZES, num_kv_heads=2, **more)


MODELS = {
    "gpt2": (GPT2, GPT2Config(6, 2, 2, context_length=8, vocab_size=11)),
    "llama": (Llama, decoder(LlamaConfig)),
    "mistral": (Llama, decoder(LlamaConfig, window=5)),
    "qwen2": (Qwen2, decoder(Qwen2Config, window=5, full_layers=(0,))),
    "qwen3": (Qwen3, decoder(Qwen3Config)),
    "phi3": (Phi3, decoder(Phi3Config)),
    "gemma": (Gemma, decoder(GemmaConfig)),
    "gemma2": (Gemma2, decoder(Gemma2Config, **HALVES)),
    "gemma3": (Gemma3, decoder(Gemma3Config, **HALVES)),
    "olmo2": (Olmo2, decoder(Olmo2Config)),
    "smollm3": (SmolLM3, decoder(SmolLM3Config, unrotated_layers=(1,))),
    "diffllama": (DiffLlama, decoder(DiffLlamaConfig)),
    "mixtral": (Mixtral, decoder(MixtralConfig, num_experts=4)),
    "qwen3moe": (Qwen3Moe, decoder(Qwen3MoeConfig, **MOE)),
    "qwen3next": (
        Qwen3Next,
        decoder(Qwen3NextConfig, **MOE, **LINEAR, full_layers=(1,), d_shared=6),
    ),
    "gptoss": (GptOss, decoder(GptOssConfig, **HALVES, num_experts=4, top_k=2)),
    "deepseekv3": (
        DeepseekV3,
        DeepseekV3Config(
            8,
            12,
            **SIZES,
            **MOE,
            **LATENT,
            v_head_dim=3,
            num_dense_layers=1,
            groups=2,
            top_groups=1,
        ),
    ),
    "bert": (Bert, BERT),
    "bert, masked": (BertMaskedLM, BERT),
    "vit": (ViT, VIT),
    "vit, classifier": (ViTClassifier, replace(VIT, labels=("a", "b", "c"))),
    "dinov2": (DINOv2, DINO),
    "dinov2, classifier": (DINOv2Classifier, replace(DINO, labels=("a", "b", "c"))),
    "modernbert": (ModernBert, MODERN),
    "modernbert, masked": (ModernBertMaskedLM, MODERN),
    "t5": (T5, T5Config(6, 8, 2, 4, 2, 1, vocab_size=11)),
    "whisper": (Whisper, WhisperConfig(6, 2, 2, 3, 1, 8, 10, **SOUND)),
}
GONE = object()
VALUES = (
    *(GONE, None, True, False, "x", "gelu", [], [1], [[{}]], {}, {"a": [None]}, 0, -1, 1, 3, 1.5),
    *(-0.5, 2**22, 2**31 - 1, 2**31, 10**9, 10**12, 10**30, 1e300, float("inf"), float("nan")),
)
LOADED_EACH = 61  # one of so many edits is also loaded in whole
OURS = tuple(str(Path(package.__file__).parent) for package in (attn_spec, flax_attn))


def test_every_family_is_edited():
    assert {cls for cls, _ in MODELS.values()} == set(FAMILIES)


def edits(fields):
    """Yield fields with one edited, also within objects."""
    for name, old in fields.items():
        for value in VALUES:
            rest = {key: kept for key, kept in fields.items() if key != name}
            yield rest if value is GONE else {**rest, name: value}
        if isinstance(old, dict):
            for inner in edits(old):
                yield {**fields, name: inner}


def read(folder):
    cls = model_class(folder)
    loader.read_config(cls, cls.family, read_fields(folder))


def outcome(load, folder):
    """Return None if a folder loads or fails with one of our errors, else what happened."""
    try:
        load(folder)
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error)
        if (last.filename.startswith(OURS) and "got" in text) or "lacks the field" in text:
            return None
        if "does not hold the weights" in text or "would be ignored" in text:
            return None
        return f"{last.filename}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", MODELS)
def test_an_edited_config_loads_or_is_refused_by_name(name, tmp_path):
    cls, config = MODELS[name]
    cls(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "right")
    fields = json.loads((tmp_path / "right" / "config.json").read_text())
    shutil.copytree(tmp_path / "right", tmp_path / "edited")
    found = {}
    for i, edited in enumerate(edits(fields)):
        text = json.dumps(edited)
        (tmp_path / "edited" / "config.json").write_text(text)
        load = read if i % LOADED_EACH else from_pretrained
        if wrong := outcome(load, tmp_path / "edited"):
            found[text] = wrong
    assert not found


def read_names(folder):
    """Return the fields that are read of a folder, and the names of those that are there."""
    cls = model_class(folder)
    fields = read_fields(folder)
    loader.read_config(cls, cls.family, fields)
    there = {name for name, value in fields.values.items() if value is not None}
    return fields.values, fields.used & there


@pytest.mark.parametrize("name", MODELS)
def test_a_misspelt_field_is_refused(name, tmp_path):
    cls, config = MODELS[name]
    cls(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    fields, names = read_names(tmp_path)
    assert len(names) > 5
    for field in names:
        # The last letter twice.
        wrong = field + field[-1]
        edited = {wrong if key == field else key: value for key, value in fields.items()}
        (tmp_path / "config.json").write_text(json.dumps(edited))
        # Another check may find first that it is not there.
        with pytest.raises(ValueError, match=field):
            read(tmp_path)


@pytest.fixture
def llama(tmp_path):
    """Return a folder with a Llama, and the fields of its config."""
    cls, config = MODELS["llama"]
    cls(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    fields, _ = read_names(tmp_path)
    return tmp_path, fields


def test_a_misspelt_field_is_named_with_the_right_one(llama):
    folder, fields = llama
    fields["rms_norm_epss"] = fields.pop("rms_norm_eps")
    (folder / "config.json").write_text(json.dumps(fields))
    rule = (
        r"config\.json: rms_norm_epss=1e-0\d would be ignored, and the field rms_norm_eps is"
        r" missing\. Correct the name, or remove the field$"
    )
    with pytest.raises(ValueError, match=rule):
        from_pretrained(folder)


def test_what_transformers_ignores_is_ignored(llama):
    folder, fields = llama
    right = from_pretrained(folder).config
    more = {"is_llama_config": True, "rope_interleaved": False, "_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(fields | more))
    assert from_pretrained(folder).config == right
