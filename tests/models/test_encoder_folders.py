"""Folders of encoders and encoder-decoders: what is read, refused, and cannot be written."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from attn_spec.frequencies import LinearScaling
from attn_spec.hugging_face.fields import read_fields
from flax_attn.functional.positions import RoPE
from flax_attn.models import from_pretrained
from flax_attn.models.bert import Bert, BertConfig, BertMaskedLM
from flax_attn.models.dinov2 import DINOv2, DINOv2Config
from flax_attn.models.hugging_face import folder as loader
from flax_attn.models.modernbert import ModernBert, ModernBertConfig
from flax_attn.models.registry import model_class
from flax_attn.models.t5 import T5, T5Config
from flax_attn.models.vit import ViT, ViTConfig
from flax_attn.models.whisper import Whisper, WhisperConfig

CONFIGS = {
    Bert: BertConfig(6, 2, 1, context_length=8, vocab_size=11),
    ModernBert: ModernBertConfig(6, 8, 3, 2, vocab_size=11),
    ViT: ViTConfig(6, 2, 1, image_size=(8, 8), patch_size=(4, 4)),
    DINOv2: DINOv2Config(6, 2, 1, image_size=(8, 8), patch_size=(4, 4)),
    T5: T5Config(6, 8, 2, 4, 1, 1, vocab_size=11),
    Whisper: WhisperConfig(
        6, 2, 1, 3, 1, 8, 10, num_mel=5, num_positions=7, context_length=9, vocab_size=11
    ),
}
EVERY = pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)


def write(folder, cls, **changes):
    fields = json.loads(loader.write_config(cls.family, CONFIGS[cls], "float32"))
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def read(folder, dropout=None):
    cls = model_class(folder)
    return loader.read_config(cls, cls.family, read_fields(folder), dropout)


@EVERY
def test_what_is_written_is_read(cls, tmp_path):
    write(tmp_path, cls)
    assert model_class(tmp_path) is cls
    assert read(tmp_path) == CONFIGS[cls] or read(tmp_path) == replace(CONFIGS[cls], **filled(cls))
    assert read(tmp_path, dropout=0.5).dropout == 0.5


def filled(cls):
    """Return what a file says that the config left open."""
    own = CONFIGS[cls]
    return {"full_layers": own.full} if cls is ModernBert else {"d_hidden": 4 * own.d_model}


REFUSED = [
    (
        Bert,
        {"architectures": ["BertForTokenClassification"]},
        r"architectures must name one of 'BertModel', 'BertForM",
    ),
    (
        Bert,
        {"architectures": ["BertForMaskedML"]},
        r"got \['BertForMaskedML'\] \(nearest: BertForMaskedLM\)\. For a head of your own begin",
    ),
    (
        T5,
        {"architectures": ["T5EncoderModel"]},
        r"one of 'T5ForConditionalGeneration'; got \['T5EncoderModel'\]",
    ),
    (
        Bert,
        {"position_embedding_type": "relative_key"},
        r'position_embedding_type must be "absolute".*"relative_key"',
    ),
    (
        Bert,
        {"is_decoder": True},
        r"is_decoder must be false, no other value is supported; got true",
    ),
    (
        ViT,
        {"pooler_act": "relu"},
        r'pooler_act must be "tanh", no other value is supported; got "relu"',
    ),
    (ViT, {"patch_size": [4, 4, 4]}, r"patch_size must be one integer or two; got \[4, 4, 4\]"),
    (ViT, {"patch_size": []}, r"patch_size must be one integer or two; got \[\]"),
    (ViT, {"image_size": 10}, r"patches must fill an image; got image_size=\(10, 10\)"),
    (
        DINOv2,
        {"drop_path_rate": 0.1},
        r"drop_path_rate must be 0\.0, no other value is supported; got 0\.1",
    ),
    (
        ModernBert,
        {"mlp_dropout": 0.1},
        r"mlp_dropout must be 0\.0, no other value is supported; got 0\.1",
    ),
    (
        ModernBert,
        {"layer_types": ["full_attention"]},
        r"layer_types must name .* each of num_hidden_layers=2 layers",
    ),
    (
        ModernBert,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        r"rope_parameters: full_attention: rope_type must be \"default\", no other value",
    ),
    (
        ModernBert,
        {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
        r"rope_parameters: sliding_attention: factor=2\.0 would be ignored",
    ),
    (
        ModernBert,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"rope_scaling must be null, no other value.*linear",
    ),
    (ModernBert, {"head_dim": 4}, r"head_dim must be \d, no other value is supported; got 4"),
    (
        T5,
        {"num_attention_heads": 1},
        r"num_heads and num_attention_heads name one field .* and 1\. Rem",
    ),
    (
        ModernBert,
        {"sliding_window": 3},
        r"sliding_window must be 64, no other value is supported; got 3",
    ),
    (
        T5,
        {"dense_act_fn": "gelu"},
        r'dense_act_fn must be "relu", no other value is supported; got "gelu"',
    ),
    (
        T5,
        {"is_gated_act": True},
        r"is_gated_act must be false, no other value is supported; got true",
    ),
    (
        Whisper,
        {"num_hidden_layers": 3},
        r"encoder_layers and num_hidden_layers name one field and must be equal; got 1 and 3",
    ),
    (
        T5,
        {"feed_forward_proj": "gated-tanh"},
        r"feed_forward_proj must be one of .*; got 'gated-tanh'",
    ),
    (T5, {"is_encoder_decoder": False}, r"is_encoder_decoder must be true"),
    (Whisper, {"encoder_layerdrop": 0.1}, r"encoder_layerdrop must be 0\.0, no other value"),
    (Whisper, {"scale_embedding": True}, r"scale_embedding must be false"),
]


def test_a_misspelt_field_of_the_class_is_refused(tmp_path):
    fields = {"model_type": "bert", "architecture": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rule = r"architecture=.* would be ignored, and the field architectures is missing\. Correct"
    with pytest.raises(ValueError, match=rule):
        model_class(tmp_path)


@pytest.mark.parametrize(("cls", "changes", "match"), REFUSED, ids=str)
def test_a_config_that_asks_for_another_function(cls, changes, match, tmp_path):
    write(tmp_path, cls, **changes)
    with pytest.raises(ValueError, match=match):
        read(tmp_path)


def test_a_file_that_names_no_class_is_that_of_the_first(tmp_path):
    write(tmp_path, Bert, architectures=None)
    assert model_class(tmp_path) is Bert


def test_a_version_4_config_of_modernbert(tmp_path):
    old = {"layer_types": None, "rope_parameters": None, "global_attn_every_n_layers": 2}
    write(tmp_path, ModernBert, **old, global_rope_theta=300.0, local_rope_theta=20.0)
    found = read(tmp_path)
    assert (found.full_layers, found.rope, found.local_rope) == ((0,), RoPE(300.0), RoPE(20.0))


UNWRITABLE = [
    (
        DINOv2,
        {"d_hidden": 13},
        r"a d_hidden that is a multiple of d_model; got d_hidden=13, d_model=6\. Save with",
    ),
    (
        T5,
        {"tied": False},
        r"divides the input of a tied head alone; got scaled=True, tied=False\. Save with",
    ),
    (
        T5,
        {"gated": True, "activation": "gelu_exact"},
        r"no gated feed-forward layer with the exact GELU",
    ),
    (ModernBert, {"window": 3}, r"its window has two equal halves; got .*window=3"),
    (
        ModernBert,
        {"rope": RoPE(scaling=LinearScaling(2.0))},
        r"rotates plainly, .* got rope=RoPE\(.*LinearScaling",
    ),
]


@pytest.mark.parametrize(("cls", "changes", "match"), UNWRITABLE, ids=str)
def test_a_config_that_transformers_does_not_compute(cls, changes, match):
    with pytest.raises(ValueError, match=match):
        loader.write_config(cls.family, replace(CONFIGS[cls], **changes), "float32")


def test_layers_that_differ_are_not_stacked():
    with pytest.raises(ValueError, match=r"layer 1 differs from layer 0"):
        ModernBert(CONFIGS[ModernBert], scan_layers=True, rngs=nnx.Rngs(0))


def test_an_encoder_is_read_from_the_folder_of_its_language_model(tmp_path):
    whole = BertMaskedLM(CONFIGS[Bert], rngs=nnx.Rngs(0))
    whole.save_pretrained(tmp_path)
    assert isinstance(from_pretrained(tmp_path), BertMaskedLM)
    encoder = Bert.from_pretrained(tmp_path)
    assert not encoder.config.pooler  # there is none in the file
    whole.eval()
    tokens = jnp.array([[1, 5, 10]])
    assert (encoder(tokens) == whole.hidden(tokens)).all()
