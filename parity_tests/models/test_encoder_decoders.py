"""Encoder-decoders: equal to transformers, in one call and in steps, with the same text.

Models go through folders.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers import GenerationMixin
from transformers.models.t5 import modeling_t5

from flax_attn import convert
from flax_attn.models import from_pretrained, generate
from flax_attn.proof.prove import prove
from flax_attn.proof.variants import select
from parity_tests.asserts import assert_gradients_near, assert_near, assert_results_near
from parity_tests.models.build import in_float64 as build_in_float64
from parity_tests.models.folders import assert_same_tensors, in_files, read_by_transformers
from parity_tests.models.plans import CHUNKS, STEPS, in_calls, real
from parity_tests.models.states import by_path

B, S, T, VOCAB = 3, 9, 7, 13
# Of the inputs of the encoder.
LENGTHS = np.array([9, 3, 5])
IDS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "decoder_start_token_id": 3,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 12,
    "d_kv": 4,
    "d_ff": 10,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    **IDS,
}
ROWS = {
    "t5": ("T5", T5),
    "t5 1.1": (
        "T5",
        {
            **T5,
            "tie_word_embeddings": False,
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": 2,
        },
    ),
}
WHISPER = {
    "vocab_size": VOCAB,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 10,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 14,
    "num_mel_bins": 5,
    "max_source_positions": S,
    "max_target_positions": 16,
    **IDS,
}
ROWS["whisper"] = ("Whisper", WHISPER)
# Whisper differs most: its encoder reads sound, and its positions are a table.
EVERY = pytest.mark.parametrize("row", ROWS)


@pytest.fixture(autouse=True)
def in_float64(float64_modules):
    """Let transformers compute all in float64."""
    torch.set_default_dtype(torch.float64)
    with float64_modules(modeling_t5):
        yield
    torch.set_default_dtype(torch.float32)


def normal(name, random, shape):
    return random.normal(0, 0.5, shape)


def build(row, draw=normal, **fields):
    """Return a model of transformers, every parameter random."""
    family, own = ROWS[row]
    config = getattr(transformers, f"{family}Config")(**own | fields, dtype="float64")
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    return redrawn(cls(config).double().eval(), draw)


def redrawn(model, draw):
    random = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(draw(name, random, parameter.shape))
    return model


def stored(row, folder, **options):
    """Return a model of transformers, and ours read from its folder."""
    theirs = build(row, **options)
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder)


def inputs(row="t5"):
    """Return inputs of the encoder, and tokens of the decoder."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (B, T))
    # Whisper's encoder halves the number of frames.
    sound = row == "whisper"
    source = random.normal(size=(B, 5, 2 * S)) if sound else random.integers(0, VOCAB, (B, S))
    return source, tokens


def lengths(row):
    """Return how many of the inputs are real: of the sound all."""
    return {} if row == "whisper" else {"lengths": jnp.asarray(LENGTHS)}


def their_logits(model, row):
    source, tokens = map(torch.from_numpy, inputs(row))
    if row == "whisper":
        return model(input_features=source, decoder_input_ids=tokens).logits
    # Transformers takes a mask of 0 and 1 where ours takes lengths.
    real = torch.from_numpy((np.arange(S) < LENGTHS[:, None]).astype(int))
    return model(input_ids=source, attention_mask=real, decoder_input_ids=tokens).logits


def outputs(logits):
    """Return the logits of transformers by name."""
    return {"logits": logits.detach().numpy()}


def our_results(row, model, cotangent, folder):
    """Return the logits and the gradients."""

    def weighed(model):
        logits = model(*map(jnp.asarray, inputs(row)), **lengths(row))
        return (logits * cotangent).sum(), logits

    gradients, logits = nnx.jit(nnx.grad(weighed, has_aux=True))(model)
    nnx.update(model, gradients)
    return {"logits": np.asarray(logits)}, in_files(model, folder)


def their_results(row, model, folder):
    """Return the cotangent, the logits and the gradients."""
    logits = their_logits(model, row)
    cotangent = np.random.default_rng(2).normal(size=logits.shape)
    (logits * torch.from_numpy(cotangent)).sum().backward()
    for parameter in model.parameters():
        # Transformers does not train Whisper's sinusoids.
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return cotangent, outputs(logits), in_files(model, folder)


@EVERY
def test_a_model_is_the_same_function(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    cotangent, *expected = their_results(row, theirs, tmp_path / "b")
    found = our_results(row, ours, cotangent, tmp_path / "a")
    assert found[1].keys() == expected[1].keys()
    # We train the sinusoids.
    found[1].pop("model.encoder.embed_positions.weight", None)
    expected[1].pop("model.encoder.embed_positions.weight", None)
    assert_results_near(found, expected)


@EVERY
def test_a_round_trip_keeps_every_bit(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = read_by_transformers(type(theirs), tmp_path / "ours")
    assert_same_tensors(again, theirs)
    assert from_pretrained(tmp_path / "ours").config == ours.config
    # Where in memory the weights are decides how PyTorch multiplies them.
    assert_near(outputs(their_logits(again, row)), outputs(their_logits(theirs, row)))


def our_logits(model):
    call = nnx.jit(lambda model, *given: model(*given, lengths=LENGTHS))
    return {"logits": np.asarray(call(model, *map(jnp.asarray, inputs())))}


def store_untied(theirs, head, folder):
    """Store a model whose head is another table, and return ours."""
    theirs.lm_head.weight = torch.nn.Parameter(head)
    theirs.all_tied_weights_keys.pop("lm_head.weight")
    theirs.save_pretrained(folder)
    return from_pretrained(folder)


def test_a_head_of_its_own(tmp_path):
    """Transformers 5 does not tie what a file holds twice, with other values."""
    theirs, ours = stored("t5 1.1", tmp_path / "tied")
    assert ours.config.tied
    head = torch.ones(VOCAB, 12) + theirs.shared.weight.data
    own = store_untied(theirs, head, tmp_path / "own")
    assert not own.config.tied
    assert_near(our_logits(own), outputs(their_logits(theirs, "t5")))


def whisper(side):
    module = side.file("models.whisper")
    limits = {"num_mel": 5, "num_positions": S, "context_length": 16, "vocab_size": VOCAB}
    return module.Whisper, module.WhisperConfig(6, 2, 1, 3, 2, 8, 10, **limits)


def t5(side, **options):
    module = side.file("models.t5")
    sizes = {"vocab_size": VOCAB, "num_buckets": 8, "max_distance": 10, **options}
    return module.T5, module.T5Config(6, 10, 2, 4, 2, 2, **sizes)


# What T5 1.1 does otherwise than T5.
GATED = {"gated": True, "activation": "gelu_tanh", "scaled": False, "tied": False}
TWINS = {"whisper": whisper, "t5": t5, "t5 1.1": partial(t5, **GATED)}


def new(side, row):
    """Return a model of our packages in float64."""
    return build_in_float64(side, *TWINS[row](side))


def both(sides, row):
    """Return each side with its model, the weights of both being the same."""
    ours, theirs = (new(side, row) for side in sides)
    weights = convert.state_dict(ours)
    theirs.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return list(zip(sides, (ours, theirs), strict=True))


def cached_call(side, model, kept):
    """Return a compiled call that takes a cache, and returns the logits and the new cache."""

    def call(cache, kept, tokens, lengths):
        attended = model.attend(tokens, kept, cache=cache, lengths=lengths)
        return attended.output, attended.cache

    compiled = side.jit(call)
    return lambda cache, tokens, lengths: compiled(cache, kept, tokens, lengths)


def encoded(side, model, source, counts):
    """Return the keys and values of what was encoded, which all steps read."""
    keep = side.jit(lambda x, n: model.keep(model.encode(x, lengths=n), n))
    return keep(source, counts)


def whole_call(side, model):
    return side.jit(lambda source, tokens, counts: model(source, tokens, lengths=counts))


def in_plan(side, model, call, row, plan):
    """Return the logits that the calls of a plan have, with a cache."""
    _, tokens = inputs(row)
    return in_calls(side, call, model.init_cache(B, T), tokens, plan, VOCAB)


def in_every_way(side, model, row):
    """Return the logits of the real tokens in one call, in steps and in chunks."""
    source, tokens, counts = map(side.array, (*inputs(row), LENGTHS))
    full = whole_call(side, model)(source, tokens, counts)
    call = cached_call(side, model, encoded(side, model, source, counts))
    steps, chunks = (in_plan(side, model, call, row, plan) for plan in (STEPS, CHUNKS))
    found = {"full": real(side.numpy(full)), "steps": steps, "chunks": chunks}
    return {f"{side.name}: {name}": logits for name, logits in found.items()}


@EVERY
def test_steps_and_chunks_equal_the_full_forward(row, sides):
    found = {}
    for side, model in both(sides, row):
        found |= in_every_way(side, model, row)
    assert_near(found, dict.fromkeys(found, found["torch_ref: full"]))


def whole(side, model, source):
    _, tokens = inputs()
    call = whole_call(side, model)
    return side.numpy(call(*map(side.array, (source, tokens, LENGTHS))))


def test_what_padding_holds_does_not_matter(sides):
    source, _ = inputs()
    padding = np.arange(S) >= LENGTHS[:, None]
    other = np.where(padding, (source + 1) % VOCAB, source)
    for side, model in both(sides, "t5"):
        np.testing.assert_array_equal(whole(side, model, other), whole(side, model, source))


def spoil(side, layer):
    """Make the weights of a layer NaN."""
    if side.is_flax:
        layer.kernel.set_value(jnp.full_like(layer.kernel[...], jnp.nan))
    else:
        layer.weight.data.fill_(torch.nan)


def spoil_cross_attention(side, model):
    """Make the weights NaN that compute keys and values of what was encoded."""
    for block in model.dec_blocks:
        spoil(side, block.cross.W_key)
        spoil(side, block.cross.W_value)


def encode(side, model):
    source, _ = inputs()
    return model.keep(model.encode(side.array(source)))


def hidden(side, model, kept):
    _, tokens = inputs()
    return side.numpy(model.hidden(side.array(tokens), kept))


def test_a_step_does_not_touch_what_was_encoded(sides):
    """The keys and values are computed once: with weights that are NaN a step still finds them."""
    for side, model in both(sides, "t5"):
        kept = encode(side, model)
        whole = hidden(side, model, kept)
        spoil_cross_attention(side, model)
        np.testing.assert_array_equal(hidden(side, model, kept), whole)
        # The weights do have an effect, if they are used again.
        assert np.isnan(hidden(side, model, encode(side, model))).all()


# Beyond the distance of 128 tokens from which T5 takes all to be equally far.
NEW = 200
LONG = {"vocab_size": 97, "d_model": 24, "d_ff": 40, "num_heads": 6}
DISTANCES = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


DEVIATIONS = {
    "relative_attention_bias": 4.0,
    "o": 3.0,
    "embed_positions": 3.0,
    "embed_tokens": 1.0,
}


def varied(name, random, shape):
    """Draw parameters whose text does not repeat itself soon.

    The text of T5 depends mostly on distances.
    """
    # Norms multiply by numbers near to 1, and biases are near to 0.
    if len(shape) == 1:
        return random.normal(name.endswith("norm.weight"), 0.05, shape)
    *_, layer, _ = name.split(".")
    return random.normal(0, DEVIATIONS.get(layer, 0.5), shape)


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def assert_not_stuck(texts):
    """Assert that texts have many words: one that repeats would be right by chance."""
    for tokens in texts:
        assert len(set(tokens)) > 20


@pytest.fixture
def untied(tmp_path):
    """Return a T5 of transformers with a head of its own, and ours."""
    theirs = build("t5 1.1", varied, **LONG, **DISTANCES)
    head = torch.from_numpy(np.random.default_rng(5).normal(size=(97, 24)))
    return theirs, store_untied(theirs, head, tmp_path)


def their_text(model, prompt):
    ids = torch.tensor([prompt])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    # The first token is the start of the decoder.
    return text[0, 1:].tolist()


def test_greedy_tokens_are_those_of_transformers(untied):
    theirs, ours = untied
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 97, length).tolist() for length in (3, 20, 9)]
    found = generate(ours, prompts, NEW)
    assert_not_stuck(found)
    assert found == [their_text(theirs, prompt) for prompt in prompts]


SOUND = {"vocab_size": 97, "d_model": 24, "max_target_positions": NEW + 8, "decoder_layers": 2}
BEGIN = [5, 3]


def their_text_of_sound(model, features):
    """Return greedy tokens; Whisper's own `generate` suppresses some."""
    start = torch.tensor([BEGIN] * len(features))
    given = {"inputs": torch.from_numpy(features), "decoder_input_ids": start}
    text = GenerationMixin.generate(model, **given, **GREEDY)
    return text[:, len(BEGIN) :].tolist()


def test_greedy_tokens_of_sound_are_those_of_transformers(tmp_path):
    theirs, ours = stored("whisper", tmp_path, draw=varied, **SOUND)
    features = np.random.default_rng(0).normal(size=(2, 5, 2 * S))
    found = generate(ours, features, NEW, start=BEGIN)
    assert_not_stuck(found)
    assert found == their_text_of_sound(theirs, features)


def sampled(side, model, prompts):
    options = {"temperature": 1.5, "top_k": 7, "start": [3, 1], "key": side.key()}
    return side.file("models.generate").generate(model, prompts, 6, **options)


def test_both_sides_make_the_same_text(sides):
    source, _ = inputs()
    # Prompts of different length share a batch, whose padding must not be drawn from.
    prompts = [row[:n].tolist() for row, n in zip(source, LENGTHS, strict=True)]
    ours, theirs = (sampled(side, model, prompts) for side, model in both(sides, "t5"))
    assert ours == theirs


def torch_gradients_of_square(model):
    model.zero_grad()
    logits = model(*map(torch.from_numpy, inputs()))
    (logits**2).sum().backward()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def gradients_of_square(model):
    differentiate = nnx.jit(nnx.grad(lambda model, x, y: (model(x, y) ** 2).sum()))
    gradients = differentiate(model, *map(jnp.asarray, inputs()))
    return convert.to_layout(by_path(gradients), "torch_ref")


def test_remat_has_the_same_gradients(sides):
    (_, ours), (_, theirs) = both(sides, "t5")
    reference = torch_gradients_of_square(theirs)
    ours.remat = theirs.remat = True
    assert_gradients_near(torch_gradients_of_square(theirs), reference)
    assert_gradients_near(gradients_of_square(ours), reference)


def small_t5(package):
    return package.T5(package.T5Config(6, 10, 2, 4, 1, 1, vocab_size=11, dropout=0.3))


def test_training_is_that_of_the_twin():
    """A hundred steps of AdamW."""
    (variant,) = select(["T5"])
    (check,) = prove(replace(variant, make=small_t5), checks=["training"]).checks
    assert check.passed, check
