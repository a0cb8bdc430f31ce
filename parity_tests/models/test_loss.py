"""The loss of a language model against torch's.

Packing, padding and the number of rows must not change it.
"""

from functools import partial

import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

import flax_attn.models.loss
import torch_ref.models.loss
from flax_attn import convert
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn

VOCAB, CONTEXT = 13, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 11))
SEGMENTS = np.stack([np.repeat(ids, (4, 4, 3)) for ids in ([4, 2, 0], [6, 1, 3], [9, 8, 7])])
SEGMENTS[1] = np.repeat(
    [6, 1, 0, 5], [1, 4, 3, 3]
)  # a document of one token, of which nothing is asked
MODELS = ("gpt2", "llama")


def build(side, name):
    """Return a model with random parameters, in eval mode: the same numbers on both sides."""
    options = {"context_length": CONTEXT, "vocab_size": VOCAB}
    if name == "llama":
        config = side.LlamaConfig(8, 14, num_heads=4, num_layers=1, num_kv_heads=2, **options)
    elif name == "gemma2":  # scales the table as an input, and caps what it gives as a head
        config = side.file("models.gemma2").Gemma2Config(8, 14, 4, 1, 2, logit_cap=0.5, **options)
    else:
        config = side.GPT2Config(6, 2, 1, dropout=0.4, **options)
    model = _models(side, name)(config)
    draw, shapes = (
        np.random.default_rng(1),
        convert.state_dict(model) if side.is_flax else model.state_dict(),
    )
    weights = {name: draw.normal(0, 0.4, tuple(shapes[name].shape)) for name in sorted(shapes)}
    if side.is_flax:
        convert.load_state_dict(model, weights)
    else:
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model.eval()
    return model


def _models(side, name):
    """Return the function from a config to a model in float64."""
    if name != "gemma2":
        return partial(side.build, {"llama": "Llama", "gpt2": "GPT2"}[name])
    cls = side.file("models.gemma2").Gemma2
    if not side.is_flax:
        return lambda config: cls(config).double()
    return lambda config: drawn(lambda: cls(config, rngs=nnx.Rngs(0), param_dtype="float64"))


def loss_and_gradients(side, model, tokens, **options):
    """Return the loss and its gradients by the names of torch_ref."""
    options = {name: side.array(value) for name, value in options.items()}
    if side.is_flax:
        return flax_loss_and_gradients(model, side.array(tokens), options)
    names, params = zip(*model.named_parameters(), strict=True)
    value = torch_ref.models.loss.next_token_loss(model, side.array(tokens), **options)
    gradients = (g.numpy() for g in torch.autograd.grad(value, params))
    return {"loss": value.detach().numpy(), **dict(zip(names, gradients, strict=True))}


def flax_loss_and_gradients(model, tokens, options):
    value, gradients = flax_gradients(model, tokens, options)
    arrays = {
        ".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(gradients)
    }
    return {"loss": np.asarray(value), **convert.to_layout(arrays, "torch_ref")}


@nnx.jit
def flax_gradients(model, tokens, options):
    return nnx.value_and_grad(
        lambda model: flax_attn.models.loss.next_token_loss(model, tokens, **options)
    )(model)


def assert_equal(ours, reference):
    loss = tolerance.relative({"loss": ours["loss"]}, {"loss": reference["loss"]})
    assert loss["loss"] <= tolerance.FORWARD, loss
    ours, reference = (
        {name: value for name, value in side.items() if name != "loss"}
        for side in (ours, reference)
    )
    errors = tolerance.gradient_errors(ours, reference)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    assert ours.keys() == reference.keys()


def mean(parts):
    """Return what the parts, each with how many tokens it asks for, amount to together."""
    count = sum(n for n, _ in parts)
    return {
        name: np.asarray(sum(n * part[name] for n, part in parts) / count) for name in parts[0][1]
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"lengths": np.array([11, 0, 7])}),
        ("gpt2", {"segments": SEGMENTS}),
        ("gpt2", {"segments": SEGMENTS[0], "lengths": np.int64(8)}),
        ("llama", {"segments": SEGMENTS}),
        ("gemma2", {}),
    ],
    ids=["plain", "padded", "packed", "both", "rope", "capped"],
)
def test_both_sides_agree(name, options, sides):
    ours, reference = (
        loss_and_gradients(side, build(side, name), TOKENS, **options) for side in sides
    )
    assert_equal(ours, reference)


def test_both_sides_drop_alike(sides):
    found = []
    for side in sides:
        model = build(side, "gpt2")
        still = loss_and_gradients(side, model, TOKENS)
        model.train()
        found.append(loss_and_gradients(side, model, TOKENS, dropout_key=side.key()))
        assert abs(found[-1]["loss"] - still["loss"]) > 1e-3
    assert_equal(*found)


def test_it_is_the_cross_entropy_of_torch(side):
    model = build(side, "gpt2")
    logits = side.numpy(side.jit(lambda tokens: model(tokens))(side.array(TOKENS)))[:, :-1]
    reference = functional.cross_entropy(
        torch.tensor(logits).flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten()
    )
    assert (
        abs(loss_and_gradients(side, model, TOKENS)["loss"] - reference.item())
        <= tolerance.FORWARD * reference.item()
    )


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_as_if_each_came_alone(name, side):
    model, parts = build(side, name), []
    for row, ids in zip(TOKENS, SEGMENTS, strict=True):
        documents = np.split(row, np.flatnonzero(np.diff(ids)) + 1)
        parts += [
            (len(document) - 1, loss_and_gradients(side, model, document))
            for document in documents
            if len(document) > 1
        ]
    assert len(parts) == 9
    assert_equal(loss_and_gradients(side, model, TOKENS, segments=SEGMENTS), mean(parts))


def test_padding_counts_nothing(side):
    model, lengths = build(side, "gpt2"), np.array([4, 1, 3])
    rows = zip(TOKENS, lengths, strict=True)
    alone = mean([(n - 1, loss_and_gradients(side, model, row[:n])) for row, n in rows if n > 1])
    assert_equal(loss_and_gradients(side, model, TOKENS, lengths=lengths), alone)
    padding = np.arange(11)[None] >= lengths[:, None]
    assert_equal(
        loss_and_gradients(side, model, np.where(padding, 12 - TOKENS, TOKENS), lengths=lengths),
        alone,
    )


@pytest.mark.parametrize("stranger", [-100, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("name", MODELS)
def test_ids_of_padding_may_be_any(name, stranger, side):
    model, lengths = build(side, name), np.array([7, 0, 4])
    strange = np.where(np.arange(11)[None] >= lengths[:, None], stranger, TOKENS)
    expected = loss_and_gradients(side, model, TOKENS, lengths=lengths)
    assert_equal(loss_and_gradients(side, model, strange, lengths=lengths), expected)


def test_a_real_token_outside_the_vocabulary_makes_the_loss_nan(side):
    model, tokens = build(side, "gpt2"), TOKENS.copy()
    for stranger in (-100, -1, VOCAB):
        tokens[1, 10] = stranger
        assert np.isnan(loss_and_gradients(side, model, tokens)["loss"])


@pytest.mark.parametrize(("dtype", "vocab"), [("uint8", 300), ("uint8", 512), ("int8", 130)])
def test_tokens_of_any_integer_dtype(dtype, vocab, side):
    """A vocabulary has more ids than int8 and uint8 can count."""
    config = side.GPT2Config(6, 2, 1, context_length=CONTEXT, vocab_size=vocab, dropout=0.0)
    model = side.build("GPT2", config)
    expected = loss_and_gradients(side, model, TOKENS)
    assert_equal(loss_and_gradients(side, model, TOKENS.astype(dtype)), expected)


@pytest.mark.parametrize("lengths", [[99, 11, -3], [12, 12, 0]])
def test_lengths_that_are_not_known_are_clipped(lengths, side):
    model = build(side, "gpt2")
    clipped = loss_and_gradients(side, model, TOKENS, lengths=np.clip(lengths, 0, 11))
    assert_equal(loss_and_gradients(side, model, TOKENS, lengths=np.array(lengths)), clipped)
    bytes_of_them = np.array(lengths, "int8")
    assert_equal(loss_and_gradients(side, model, TOKENS, lengths=bytes_of_them), clipped)


LENGTHS = r"lengths counts the real tokens of a call of t=11 tokens; got lengths={}\. Use 0 to 11"
KNOWN = {
    "above": (12, LENGTHS.format(12)),
    "below": (-1, LENGTHS.format(-1)),
    "one of a list": ([11, 3, 12], LENGTHS.format(12)),
    "one of an array": (np.array([0, -2, 11]), LENGTHS.format(-2)),
    "floats": (np.array([1.0, 2.0, 3.0]), r"lengths must be integers; got dtype (torch\.)?float64"),
    "too few": (
        [1, 2],
        r"lengths must be one integer or one a row, shape \(3,\); got shape \(2,\)",
    ),
}


@pytest.mark.parametrize(("lengths", "match"), KNOWN.values(), ids=KNOWN)
def test_lengths_that_are_known_are_checked(lengths, match, side, no_shape_checks):
    with pytest.raises(ValueError, match=match):
        side.file("models.loss").next_token_loss(
            build(side, "gpt2"), side.array(TOKENS), lengths=lengths
        )


def test_tokens_are_integers(side, no_shape_checks):
    with pytest.raises(ValueError, match=r"ids must be integers; got dtype float64"):
        side.file("models.loss").next_token_loss(build(side, "gpt2"), side.array(TOKENS / 2))


def test_a_model_of_another_class_is_refused(side, no_shape_checks):
    with pytest.raises(
        ValueError,
        match=r"next_token_loss and train_step take a LanguageModel; got object\. Derive",
    ):
        side.file("models.loss").next_token_loss(object(), side.array(TOKENS))


def test_padding_behind_packed_documents(side):
    model, lengths = build(side, "gpt2"), np.array([7, 5, 4])
    parts = [TOKENS[0, :4], TOKENS[0, 4:7], TOKENS[1, 1:5], TOKENS[2, :4]]
    alone = mean([(len(part) - 1, loss_and_gradients(side, model, part)) for part in parts])
    assert_equal(loss_and_gradients(side, model, TOKENS, segments=SEGMENTS, lengths=lengths), alone)


def test_one_row_needs_no_batch(side):
    model = build(side, "gpt2")
    assert_equal(
        loss_and_gradients(side, model, TOKENS[0], segments=SEGMENTS[0]),
        loss_and_gradients(side, model, TOKENS[:1], segments=SEGMENTS[:1]),
    )


def test_no_token_that_is_asked_for(side):
    found = loss_and_gradients(side, build(side, "gpt2"), TOKENS, segments=np.arange(11))
    assert all((value == 0).all() for value in found.values())


@pytest.mark.parametrize(
    ("tokens", "options", "match"),
    [
        (TOKENS[:, :1], {}, r"there must be two; got shape \(3, 1\)"),
        (
            TOKENS,
            {"segments": SEGMENTS[:2]},
            r"one id a token, shape \(3, 11\) or \(11,\); got shape \(2, 11\)",
        ),
        (TOKENS, {"segments": SEGMENTS[:, :5]}, r"one id a token, .*; got shape \(3, 5\)"),
        (
            TOKENS,
            {"segments": SEGMENTS / 2},
            r"segments must be integers of shape .*; got shape \(3, 11\), dtype float64",
        ),
        (
            TOKENS,
            {"segments": SEGMENTS[None]},
            r"segments must be integers of shape .*; got shape \(1, 3, 11\)",
        ),
        (TOKENS, {"lengths": np.array([3, 4])}, r"lengths .*2"),
    ],
)
def test_a_call_that_is_wrong(tokens, options, match, side, no_shape_checks):
    options = {name: side.array(value) for name, value in options.items()}
    with pytest.raises(ValueError, match=match):
        side.file("models.loss").next_token_loss(build(side, "gpt2"), side.array(tokens), **options)


@pytest.mark.parametrize("ids", [[3, 3, 3], [[1, 1, 0], [5, 6, 6]], [0, 255, 255, 0, 0]], ids=str)
def test_positions_start_again_in_each_document(ids, side):
    wanted = np.zeros_like(ids)
    for i in range(1, wanted.shape[-1]):
        wanted[..., i] = (wanted[..., i - 1] + 1) * (
            np.array(ids)[..., i] == np.array(ids)[..., i - 1]
        )
    for kind in ("int64", "uint8"):
        found = side.file("functional.positions").segment_positions(side.array(np.array(ids), kind))
        np.testing.assert_array_equal(side.numpy(found), wanted)
