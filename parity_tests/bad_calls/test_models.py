"""Bad tokens of models: the same error in the same words on both sides."""

import numpy as np
import pytest
from flax import nnx

from attn_spec.models.bert import BertConfig
from attn_spec.models.gpt2 import GPT2Config
from attn_spec.models.t5 import T5Config

pytestmark = pytest.mark.usefixtures("no_shape_checks")
IDS = np.ones((2, 3), int)


def numerics(side):
    return {"rngs": nnx.Rngs(0)} if side.is_flax else {}


def gpt2(side):
    return side.build("GPT2", side.GPT2Config(6, 2, 1, context_length=8, vocab_size=11))


def bert(side):
    config = BertConfig(6, 2, 1, context_length=8, vocab_size=11)
    return side.file("models.bert").Bert(config, **numerics(side))


def t5(side):
    config = T5Config(6, 8, 2, 3, 1, 1, vocab_size=11)
    return side.file("models.t5").T5(config, **numerics(side))


CALLS = {
    "decoder": ("tokens", lambda side, tokens: gpt2(side)(tokens)),
    "encoder": ("tokens", lambda side, tokens: bert(side)(tokens)),
    "inputs of an encoder-decoder": (
        "inputs",
        lambda side, inputs: t5(side)(inputs, side.array(IDS)),
    ),
    "tokens of an encoder-decoder": (
        "tokens",
        lambda side, tokens: t5(side)(side.array(IDS), tokens),
    ),
    "loss": (
        "tokens",
        lambda side, tokens: side.file("models.loss").next_token_loss(gpt2(side), tokens),
    ),
}


DECODER = "a language model has d_model, num_layers, context_length, vocab_size and tied"
ENCODER = "an encoder has d_model and num_layers"
ENCODER_DECODER = "an encoder-decoder has d_model, .* and start_token"
# What the error says of the config, and the class that it shows.
CONFIGS = {
    "gpt2.GPT2": (DECODER, "GPT2Config"),
    "bert.Bert": (ENCODER, "BertConfig"),
    "vit.ViTClassifier": (ENCODER, "BertConfig"),
    "t5.T5": (ENCODER_DECODER, "T5Config"),
    "whisper.Whisper": (ENCODER_DECODER, "T5Config"),
}
NO_CONFIGS = {
    "dict": {"d_model": 6},
    "str": "gpt2",
    "NoneType": None,
    "the class GPT2Config, not an instance": GPT2Config,
}


def build(side, name, config):
    file, model = name.split(".")
    models = side.file(f"models.{file}")
    return getattr(models, model)(config, **numerics(side))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", NO_CONFIGS)
def test_a_model_is_built_of_a_config(name, kind, assert_same_error):
    sizes, shown = CONFIGS[name]
    rule = rf"^the config of {sizes}; got {kind}\. Pass one, such as {shown}\("
    assert_same_error(lambda side: build(side, name, NO_CONFIGS[kind]), rule)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_that_the_error_shows_can_be_built(name, sides, error_of):
    message = error_of(sides[0], lambda side: build(side, name, {}))
    remedy = message.partition("such as ")[2]
    eval(remedy)


BAD_IDS = {
    "three axes": (
        np.ones((2, 3, 4), np.int32),
        r"got dtype int\d\d, shape \(2, 3, 4\)\. Reshape more batch axes into one",
    ),
    "halves": (
        IDS / 2,
        (
            r"got dtype float64, shape \(2, 3\)\. Pass the ids that the tokenizer of the model"
            r" returns"
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", BAD_IDS)
def test_tokens_are_integers_of_one_axis_or_two(name, bad, assert_same_error):
    argument, call = CALLS[name]
    ids, got = BAD_IDS[bad]
    rule = rf"^{argument} must be integers \(t,\) or \(b, t\); {got}$"
    assert_same_error(lambda side: call(side, side.array(ids)), rule)


@pytest.mark.parametrize("name", CALLS)
def test_tokens_are_an_array(name, assert_same_error):
    argument, call = CALLS[name]
    rule = f"^{argument} must be an array; got list. Make it one before the call$"
    assert_same_error(lambda side: call(side, IDS.tolist()), rule)


@pytest.mark.parametrize("bad", [11, -1])
@pytest.mark.parametrize("model", [gpt2, t5])
def test_stop_tokens_are_of_the_vocabulary(model, bad, assert_same_error):
    rule = (
        rf"^stop_tokens lie in the vocabulary, 0 to 10; got {bad}, which the model never makes\."
        r" Pass the end token of the tokenizer of this model$"
    )

    def act(side):
        built = model(side)
        side.generate(built, [1], 2, stop_tokens=[10, bad])

    assert_same_error(act, rule)
