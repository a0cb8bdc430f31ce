"""The loss of a language model against torch's.

Packing, padding and the number of rows must not change it.
"""

import itertools

import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

import flax_attn.models.loss
import torch_ref.models.loss
from flax_attn import convert
from flax_attn.parity import tolerance
from parity_tests.models.build import in_float64
from parity_tests.models.states import by_path

VOCAB, CONTEXT = 13, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 11))
SEGMENTS = np.stack([np.repeat(ids, (4, 4, 3)) for ids in ([4, 2, 0], [6, 1, 3], [9, 8, 7])])
# With a document of one token, of which nothing is asked.
SEGMENTS[1] = np.repeat([6, 1, 0, 5], [1, 4, 3, 3])
MODELS = ("gpt2", "llama")
SIZES = {"context_length": CONTEXT, "vocab_size": VOCAB}


def gpt2(side):
    return side.GPT2, side.GPT2Config(6, 2, 1, dropout=0.4, **SIZES)


def llama(side):
    sizes = {"num_heads": 4, "num_layers": 1, "num_kv_heads": 2, **SIZES}
    return side.Llama, side.LlamaConfig(8, 14, **sizes)


def gemma2(side):
    # It scales the table as an input, and caps what the table gives as a head.
    file = side.file("models.gemma2")
    return file.Gemma2, file.Gemma2Config(8, 14, 4, 1, 2, logit_cap=0.5, **SIZES)


FAMILIES = {"gpt2": gpt2, "llama": llama, "gemma2": gemma2}


def build(side, name):
    """Return a model with random parameters, in eval mode: the same numbers on both sides."""
    model = in_float64(side, *FAMILIES[name](side))
    state = convert.state_dict(model) if side.is_flax else model.state_dict()
    load(side, model, random_weights(state))
    return model


def load(side, model, weights):
    if side.is_flax:
        convert.load_state_dict(model, weights)
    else:
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})


def random_weights(state):
    random = np.random.default_rng(1)
    # Both sides draw in the order of the names.
    return {name: random.normal(0, 0.4, tuple(state[name].shape)) for name in sorted(state)}


def loss_and_gradients(side, model, tokens, **options):
    """Return the loss and its gradients by the names of torch_ref."""
    given = {name: side.array(value) for name, value in options.items()}
    compute = flax_loss_and_gradients if side.is_flax else torch_loss_and_gradients
    return compute(model, side.array(tokens), given)


def torch_loss_and_gradients(model, tokens, options):
    loss = torch_ref.models.loss.next_token_loss(model, tokens, **options)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters.values())
    arrays = [gradient.numpy() for gradient in gradients]
    return {"loss": loss.detach().numpy(), **dict(zip(parameters, arrays, strict=True))}


def flax_loss_and_gradients(model, tokens, options):
    loss, gradients = flax_gradients(model, tokens, options)
    arrays = by_path(gradients)
    return {"loss": np.asarray(loss), **convert.to_layout(arrays, "torch_ref")}


@nnx.jit
def flax_gradients(model, tokens, options):
    def loss(model):
        return flax_attn.models.loss.next_token_loss(model, tokens, **options)

    return nnx.value_and_grad(loss)(model)


def without_loss(found):
    return {name: value for name, value in found.items() if name != "loss"}


def assert_equal(ours, reference):
    loss = tolerance.relative({"loss": ours["loss"]}, {"loss": reference["loss"]})
    assert loss["loss"] <= tolerance.FORWARD, loss
    errors = tolerance.gradient_errors(without_loss(ours), without_loss(reference))
    assert max(errors.values()) <= tolerance.FORWARD, errors
    assert ours.keys() == reference.keys()


def mean(parts):
    """Return what parts, each with how many tokens it asks for, amount to together."""
    count = sum(asked for asked, _ in parts)
    _, first = parts[0]
    total = {name: sum(asked * part[name] for asked, part in parts) for name in first}
    return {name: np.asarray(value / count) for name, value in total.items()}


def each_alone(side, model, documents):
    """Return the loss and gradients of documents that come in calls of their own."""
    parts = []
    for document in documents:
        # Nothing is asked of the first token of a document.
        asked = len(document) - 1
        if asked:
            parts.append((asked, loss_and_gradients(side, model, document)))
    return mean(parts)


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


def dropped(side):
    """Return the loss and gradients with dropout, which changes the loss."""
    model = build(side, "gpt2")
    still = loss_and_gradients(side, model, TOKENS)
    model.train()
    found = loss_and_gradients(side, model, TOKENS, dropout_key=side.key())
    assert abs(found["loss"] - still["loss"]) > 1e-3
    return found


def test_both_sides_drop_alike(sides):
    ours, reference = map(dropped, sides)
    assert_equal(ours, reference)


def cross_entropy(logits, tokens):
    """Return PyTorch's loss of logits, each against the token that follows."""
    targets = torch.tensor(tokens[:, 1:]).flatten()
    # No token follows the last one.
    scores = torch.tensor(logits[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(scores, targets).item()


def test_it_is_the_cross_entropy_of_torch(side):
    model = build(side, "gpt2")
    call = side.jit(lambda tokens: model(tokens))
    reference = cross_entropy(side.numpy(call(side.array(TOKENS))), TOKENS)
    found = loss_and_gradients(side, model, TOKENS)["loss"]
    assert abs(found - reference) <= tolerance.FORWARD * reference


def split(row, ids):
    """Return the documents of a row, which begin where the id changes."""
    return np.split(row, np.flatnonzero(np.diff(ids)) + 1)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_as_if_each_came_alone(name, side):
    rows = [split(row, ids) for row, ids in zip(TOKENS, SEGMENTS, strict=True)]
    documents = list(itertools.chain.from_iterable(rows))
    assert sum(len(document) > 1 for document in documents) == 9
    model = build(side, name)
    packed = loss_and_gradients(side, model, TOKENS, segments=SEGMENTS)
    assert_equal(packed, each_alone(side, model, documents))


def is_padding(lengths):
    return np.arange(11)[None] >= lengths[:, None]


def test_padding_counts_nothing(side):
    model, lengths = build(side, "gpt2"), np.array([4, 1, 3])
    rows = [row[:length] for row, length in zip(TOKENS, lengths, strict=True)]
    alone = each_alone(side, model, rows)
    assert_equal(loss_and_gradients(side, model, TOKENS, lengths=lengths), alone)
    # Other real ids behind the ends of rows.
    other = np.where(is_padding(lengths), 12 - TOKENS, TOKENS)
    assert_equal(loss_and_gradients(side, model, other, lengths=lengths), alone)


@pytest.mark.parametrize("stranger", [-100, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("name", MODELS)
def test_ids_of_padding_may_be_any(name, stranger, side):
    model, lengths = build(side, name), np.array([7, 0, 4])
    strange = np.where(is_padding(lengths), stranger, TOKENS)
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
    # A batch may store its lengths in bytes.
    in_bytes = np.array(lengths, "int8")
    assert_equal(loss_and_gradients(side, model, TOKENS, lengths=in_bytes), clipped)


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


def next_token_loss(side, model, tokens, **options):
    return side.file("models.loss").next_token_loss(model, side.array(tokens), **options)


@pytest.mark.parametrize(("lengths", "match"), KNOWN.values(), ids=KNOWN)
def test_lengths_that_are_known_are_checked(lengths, match, side, no_shape_checks):
    model = build(side, "gpt2")
    with pytest.raises(ValueError, match=match):
        next_token_loss(side, model, TOKENS, lengths=lengths)


def test_a_model_of_another_class_is_refused(side, no_shape_checks):
    rule = r"next_token_loss and train_step take a LanguageModel; got object\. Derive"
    with pytest.raises(ValueError, match=rule):
        next_token_loss(side, object(), TOKENS)


def test_padding_behind_packed_documents(side):
    model, lengths = build(side, "gpt2"), np.array([7, 5, 4])
    # What is left of the documents of SEGMENTS within these lengths.
    documents = [TOKENS[0, :4], TOKENS[0, 4:7], TOKENS[1, 1:5], TOKENS[2, :4]]
    found = loss_and_gradients(side, model, TOKENS, segments=SEGMENTS, lengths=lengths)
    assert_equal(found, each_alone(side, model, documents))


def test_one_row_needs_no_batch(side):
    model = build(side, "gpt2")
    row = loss_and_gradients(side, model, TOKENS[0], segments=SEGMENTS[0])
    batch = loss_and_gradients(side, model, TOKENS[:1], segments=SEGMENTS[:1])
    assert_equal(row, batch)


def test_no_token_that_is_asked_for(side):
    model = build(side, "gpt2")
    # Each token is a document of its own. A mean over no token would be NaN.
    found = loss_and_gradients(side, model, TOKENS, segments=np.arange(11))
    assert all((value == 0).all() for value in found.values())


OF_SEGMENTS = r"segments must be integers of shape .*; got shape "
WRONG = [
    (TOKENS[:, :1], {}, r"there must be two; got shape \(3, 1\)"),
    (
        TOKENS,
        {"segments": SEGMENTS[:2]},
        r"one id a token, shape \(3, 11\) or \(11,\); got shape \(2, 11\)",
    ),
    (TOKENS, {"segments": SEGMENTS[:, :5]}, r"one id a token, .*; got shape \(3, 5\)"),
    (TOKENS, {"segments": SEGMENTS / 2}, OF_SEGMENTS + r"\(3, 11\), dtype float64"),
    (TOKENS, {"segments": SEGMENTS[None]}, OF_SEGMENTS + r"\(1, 3, 11\)"),
    (TOKENS, {"lengths": np.array([3, 4])}, r"lengths .*2"),
]


@pytest.mark.parametrize(("tokens", "options", "match"), WRONG)
def test_a_call_that_is_wrong(tokens, options, match, side, no_shape_checks):
    model = build(side, "gpt2")
    given = {name: side.array(value) for name, value in options.items()}
    with pytest.raises(ValueError, match=match):
        next_token_loss(side, model, tokens, **given)


def counted(ids):
    """Return the positions of tokens, counted one after another in Python."""
    positions = np.zeros_like(ids)
    for i in range(1, ids.shape[-1]):
        goes_on = ids[..., i] == ids[..., i - 1]
        positions[..., i] = np.where(goes_on, positions[..., i - 1] + 1, 0)
    return positions


@pytest.mark.parametrize("ids", [[3, 3, 3], [[1, 1, 0], [5, 6, 6]], [0, 255, 255, 0, 0]], ids=str)
def test_positions_start_again_in_each_document(ids, side):
    ids = np.array(ids)
    function = side.file("functional.positions").segment_positions
    for dtype in ("int64", "uint8"):
        # A difference of bytes wraps: 0 - 255 is 1.
        found = function(side.array(ids, dtype))
        np.testing.assert_array_equal(side.numpy(found), counted(ids))
