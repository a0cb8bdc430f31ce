"""Encoder-decoders: equal to transformers, in one call and in steps, with the same text.

Models go through folders.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file
from transformers import GenerationMixin
from transformers.models.t5 import modeling_t5

from flax_attn import convert
from flax_attn.models import from_pretrained, generate
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn
from flax_attn.proof.prove import prove
from flax_attn.proof.variants import select
from parity_tests.asserts import assert_gradients_near, assert_near

B, S, T, VOCAB = 3, 9, 7, 13
LENGTHS = np.array([9, 3, 5])  # of the inputs
TOTALS = np.array([7, 4, 6])  # of the decoder's tokens
STEPS = (((4, 1, 3), 4), ((1, 1, 1), 1), ((1, 1, 1), 1), ((1, 1, 1), 1))
CHUNKS = (((3, 0, 2), 4), ((2, 2, 0), 4), ((2, 2, 4), 4))
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
EVERY = pytest.mark.parametrize("row", ROWS)


class Float64Torch:
    """Stands for torch in modules of transformers that name float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Let transformers compute all in float64."""
    monkeypatch.setattr(modeling_t5, "torch", Float64Torch())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(row, draw=lambda name, random, shape: random.normal(0, 0.5, shape), **fields):
    """Return a model of transformers, every parameter random."""
    name, own = ROWS[row]
    config = getattr(transformers, f"{name}Config")(**own | fields, dtype="float64")
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().eval()
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
    source = (
        random.normal(size=(B, 5, 2 * S)) if row == "whisper" else random.integers(0, VOCAB, (B, S))
    )
    return source, tokens


def lengths(row):
    """Return how many of the inputs are real: of the sound all."""
    return {} if row == "whisper" else {"lengths": jnp.asarray(LENGTHS)}


def their_logits(model, row):
    source, tokens = map(torch.from_numpy, inputs(row))
    if row == "whisper":
        return model(input_features=source, decoder_input_ids=tokens).logits
    real = torch.from_numpy((np.arange(S) < LENGTHS[:, None]).astype(int))
    return model(input_ids=source, attention_mask=real, decoder_input_ids=tokens).logits


@EVERY
def test_a_model_is_the_same_function(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    reference = their_logits(theirs, row)
    cotangent = np.random.default_rng(2).normal(size=reference.shape)

    def weighed(model):
        logits = model(*map(jnp.asarray, inputs(row)), **lengths(row))
        return (logits * cotangent).sum(), logits

    gradients, logits = nnx.jit(nnx.grad(weighed, has_aux=True))(ours)
    assert_near({"logits": np.asarray(logits)}, {"logits": reference.detach().numpy()})
    nnx.update(ours, gradients)
    (reference * torch.from_numpy(cotangent)).sum().backward()
    for parameter in theirs.parameters():  # transformers does not train Whisper's sinusoids
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found, expected = (
        in_files(model, tmp_path / name) for model, name in ((ours, "a"), (theirs, "b"))
    )
    assert found.keys() == expected.keys()
    found = {
        name: value
        for name, value in found.items()
        if name != "model.encoder.embed_positions.weight"
    }
    assert_gradients_near(found, {name: expected[name] for name in found})


def in_files(model, folder):
    """Return the parameters of a model as it stores them."""
    model.save_pretrained(folder)
    return {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}


@EVERY
def test_a_round_trip_keeps_every_bit(row, tmp_path):
    theirs, ours = stored(row, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(
        torch.equal(again.state_dict()[name], value) for name, value in theirs.state_dict().items()
    )
    assert from_pretrained(tmp_path / "ours").config == ours.config
    # Where in memory the weights are decides how PyTorch multiplies them.
    again_logits, logits = (their_logits(model, row).detach().numpy() for model in (again, theirs))
    assert (
        tolerance.relative({"logits": again_logits}, {"logits": logits})["logits"]
        <= tolerance.FORWARD
    )


def test_a_head_of_its_own(tmp_path):
    """Transformers 5 does not tie what a file holds twice, with other values."""
    theirs, ours = stored("t5 1.1", tmp_path / "tied")
    assert ours.config.tied
    theirs.lm_head.weight = torch.nn.Parameter(torch.ones(VOCAB, 12) + theirs.shared.weight.data)
    theirs.all_tied_weights_keys.pop("lm_head.weight")
    theirs.save_pretrained(tmp_path / "own")
    own = from_pretrained(tmp_path / "own")
    assert not own.config.tied
    logits = nnx.jit(lambda model, *given: model(*given, lengths=LENGTHS))(
        own, *map(jnp.asarray, inputs())
    )
    assert_near(
        {"logits": np.asarray(logits)}, {"logits": their_logits(theirs, "t5").detach().numpy()}
    )


def config(side, row):
    if row == "whisper":
        module, sizes = side.file("models.whisper"), (6, 2, 1, 3, 2, 8, 10)
        limits = {"num_mel": 5, "num_positions": S, "context_length": 16, "vocab_size": VOCAB}
        return module.Whisper, module.WhisperConfig(*sizes, **limits)
    module = side.file("models.t5")
    gated = (
        {"gated": True, "activation": "gelu_tanh", "scaled": False, "tied": False}
        if row == "t5 1.1"
        else {}
    )
    return module.T5, module.T5Config(
        6, 10, 2, 4, 2, 2, vocab_size=VOCAB, num_buckets=8, max_distance=10, **gated
    )


def both(sides, row):
    """Return each side with its model, the weights of both being the same."""
    made = []
    for side in sides:
        cls, sizes = config(side, row)
        if side.is_flax:
            made.append(
                drawn(
                    lambda cls=cls, sizes=sizes: cls(
                        sizes, rngs=nnx.Rngs(0), param_dtype=jnp.float64
                    )
                )
            )
        else:
            made.append(cls(sizes).double())
    ours, theirs = made
    theirs.load_state_dict(
        {name: torch.tensor(value) for name, value in convert.state_dict(ours).items()}
    )
    for model in made:
        model.eval()
    return list(zip(sides, made, strict=True))


def real(logits):
    return np.where(np.arange(T)[:, None] < TOTALS[:, None, None], logits, 0.0)


def in_calls(side, model, call, kept, plan):
    """Return the logits of all tokens, computed with a cache, in calls of some tokens a row."""
    _, tokens = inputs()
    cache, whole, cached = model.init_cache(B, T), np.zeros((B, T, VOCAB)), np.zeros(B, int)
    for counts, width in plan:
        where = np.minimum(cached[:, None] + np.arange(width), T - 1)
        taken = np.where(
            np.arange(width) < np.array(counts)[:, None],
            tokens[np.arange(B)[:, None], where],
            VOCAB - 1,
        )
        logits, cache = call(cache, kept, side.array(taken), side.array(np.array(counts)))
        for row, count in enumerate(counts):
            whole[row, where[row, :count]] = side.numpy(logits)[row, :count]
        cached = cached + np.array(counts)
    return whole


@EVERY
def test_steps_and_chunks_equal_the_full_forward(row, sides):
    found = {}
    for side, model in both(sides, row):
        source, tokens = map(side.array, inputs(row))
        counts = side.array(LENGTHS)
        full = side.jit(lambda x, y, n, model=model: model(x, y, lengths=n))(source, tokens, counts)
        found[f"{side.name}: full"] = real(side.numpy(full))
        kept = side.jit(lambda x, n, model=model: model.keep(model.encode(x, lengths=n), n))(
            source, counts
        )

        def step(cache, kept, tokens, counts, model=model):
            attended = model.attend(tokens, kept, cache=cache, lengths=counts)
            return attended.output, attended.cache

        call = side.jit(step)
        found |= {
            f"{side.name}: {i}": in_calls(side, model, call, kept, plan)
            for i, plan in enumerate((STEPS, CHUNKS))
        }
    assert_near(found, dict.fromkeys(found, found["torch_ref: full"]))


def test_what_padding_holds_does_not_matter(sides):
    source, tokens = inputs()
    other = np.where(np.arange(S) < LENGTHS[:, None], source, (source + 1) % VOCAB)
    for side, model in both(sides, "t5"):
        call = side.jit(lambda x, y, n, model=model: model(x, y, lengths=n))
        found = [side.numpy(call(*map(side.array, (x, tokens, LENGTHS)))) for x in (source, other)]
        np.testing.assert_array_equal(*found)


def test_a_step_does_not_touch_what_was_encoded(sides):
    """The keys and values are computed once: with weights that are NaN a step still finds them."""
    for side, model in both(sides, "t5"):
        source, tokens = map(side.array, inputs())
        kept = model.keep(model.encode(source))
        whole = side.numpy(model.hidden(tokens, kept))
        for block in model.dec_blocks:
            for layer in (block.cross.W_key, block.cross.W_value):
                if side.is_flax:
                    layer.kernel.set_value(jnp.full_like(layer.kernel[...], jnp.nan))
                else:
                    layer.weight.data.fill_(torch.nan)
        np.testing.assert_array_equal(side.numpy(model.hidden(tokens, kept)), whole)
        assert np.isnan(side.numpy(model.hidden(tokens, model.keep(model.encode(source))))).all()


NEW = 200
LONG = {"vocab_size": 97, "d_model": 24, "d_ff": 40, "num_heads": 6}
DISTANCES = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


def varied(name, random, shape):
    """Draw parameters whose text does not repeat itself soon.

    The text of T5 depends mostly on distances.
    """
    if len(shape) == 1:
        return random.normal(name.endswith("norm.weight"), 0.05, shape)
    deviations = {
        "relative_attention_bias": 4.0,
        "o": 3.0,
        "embed_positions": 3.0,
        "embed_tokens": 1.0,
    }
    return random.normal(0, deviations.get(name.split(".")[-2], 0.5), shape)


def with_a_head_of_its_own(theirs):
    theirs.lm_head.weight = torch.nn.Parameter(
        torch.from_numpy(np.random.default_rng(5).normal(size=(97, 24)))
    )
    theirs.all_tied_weights_keys.pop("lm_head.weight")


def test_greedy_tokens_are_those_of_transformers(tmp_path):
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 97, length).tolist() for length in (3, 20, 9)]
    theirs = build("t5 1.1", varied, **LONG, **DISTANCES)
    with_a_head_of_its_own(theirs)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    found = generate(ours, prompts, NEW)
    for prompt, tokens in zip(prompts, found, strict=True):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        reference = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, 1:
        ].tolist()
        assert len(set(reference)) > 20  # not stuck on a few words
        assert tokens == reference


def test_greedy_tokens_of_sound_are_those_of_transformers(tmp_path):
    sizes = {"vocab_size": 97, "d_model": 24, "max_target_positions": NEW + 8, "decoder_layers": 2}
    theirs, ours = stored("whisper", tmp_path, draw=varied, **sizes)
    features, begin = np.random.default_rng(0).normal(size=(2, 5, 2 * S)), [5, 3]
    found = generate(ours, features, NEW, start=begin)
    # Their own generate is for an hour of sound, and suppresses tokens.
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    start = torch.tensor([begin, begin])
    reference = GenerationMixin.generate(
        theirs, torch.from_numpy(features), decoder_input_ids=start, **options
    )
    assert all(len(set(row)) > 20 for row in found)
    assert found == reference[:, 2:].tolist()


def test_both_sides_make_the_same_text(sides):
    source, _ = inputs()
    prompts = [row[:n].tolist() for row, n in zip(source, LENGTHS, strict=True)]
    options = {"temperature": 1.5, "top_k": 7}
    made = [
        side.file("models.generate").generate(
            model, prompts, 6, start=[3, 1], key=side.key(), **options
        )
        for side, model in both(sides, "t5")
    ]
    assert made[0] == made[1]


def test_remat_has_the_same_gradients(sides):
    (_, ours), (_, theirs) = both(sides, "t5")
    found = []
    for theirs.remat in (False, True):
        theirs.zero_grad()
        (theirs(*map(torch.from_numpy, inputs())) ** 2).sum().backward()
        found.append({name: p.grad.numpy().copy() for name, p in theirs.named_parameters()})
    ours.remat = True
    gradients = nnx.jit(nnx.grad(lambda m, x, y: (m(x, y) ** 2).sum()))(
        ours, *map(jnp.asarray, inputs())
    )
    flat = {
        ".".join(map(str, path)): np.asarray(a[...]) for path, a in nnx.to_flat_state(gradients)
    }
    found.append(convert.to_layout(flat, "torch_ref"))
    for one in found[1:]:
        assert_gradients_near(one, found[0])


def test_training_is_that_of_the_twin():
    """A hundred steps of AdamW."""
    small = replace(
        select(["T5"])[0],
        make=lambda p: p.T5(p.T5Config(6, 10, 2, 4, 1, 1, vocab_size=11, dropout=0.3)),
    )
    (check,) = prove(small, checks=["training"]).checks
    assert check.passed, check
