"""What encoders and encoder-decoders refuse, on both sides, and with which words."""

import numpy as np
import pytest
from flax import nnx

IMAGES = {"image_size": (8, 6), "patch_size": (4, 3), "channels": 2}
# DINOv2 has positions of a square grid only.
SQUARE = {"image_size": (8, 8), "patch_size": (4, 4), "channels": 2}
WHISPER = {"num_mel": 5, "num_positions": 7, "context_length": 9, "vocab_size": 11}


CONFIGS = {
    "bert": "BertConfig",
    "vit": "ViTConfig",
    "dinov2": "DINOv2Config",
    "t5": "T5Config",
    "whisper": "WhisperConfig",
}


def make(side, file, name, *arguments, **options):
    """Return a model of a file of models, of the config of that family."""
    module = side.file(f"models.{file}")
    sizes = getattr(module, CONFIGS[file])(*arguments, **options)
    return getattr(module, name)(sizes, **numerics(side))


def numerics(side):
    # Only JAX takes a source of random numbers.
    return {"rngs": nnx.Rngs(0)} if side.is_flax else {}


def t5(side):
    return make(side, "t5", "T5", 6, 8, 2, 4, 1, 1, vocab_size=11)


def whisper(side):
    return make(side, "whisper", "Whisper", 6, 2, 1, 3, 1, 8, 10, **WHISPER)


def ones(side, *shape):
    return side.array(np.ones(shape, np.float32))


def cross_block(side, width=6, **parts):
    own = {f"norm{i}": side.LayerNorm(6) for i in (1, 2, 3)}
    own["att"] = side.MultiHeadAttention(6, 6, 5, 0.0, 2, **numerics(side))
    own["cross"] = side.CrossAttention(width, 4, 0.0, 2, **numerics(side))
    own["ff"] = side.FeedForward(6, **numerics(side))
    return side.CrossBlock(**own | parts)


# A wrong call of each rule, and the words that name the rule, the values and the remedy.
CALLS = {
    "channels of an image": (
        lambda side: side.Patches(6, 3, 4, 2, **numerics(side))(ones(side, 5, 2, 8, 8)),
        (
            r"images must have shape .* with c=3 channels, .* 4 x 2 pixels must fill them; got"
            r" shape \(5, 2, 8, 8\)\. Res"
        ),
    ),
    "an image that patches do not fill": (
        lambda side: side.Patches(6, 3, 4, 2, **numerics(side))(ones(side, 5, 3, 8, 7)),
        r"patches of 4 x 2 pixels must fill them; got shape \(5, 3, 8, 7\)",
    ),
    "an image of another size": (
        lambda side: make(side, "vit", "ViT", 6, 2, 1, **IMAGES)(ones(side, 3, 2, 8, 12)),
        r"positions are learned for images of 8 x 6 pixels; got 8 x 12\. Resize the images first",
    ),
    "an image_size that patches do not fill": (
        lambda side: make(side, "vit", "ViT", 6, 2, 1, image_size=(8, 7), patch_size=(4, 3)),
        (
            r"patches must fill an image; got image_size=\(8, 7\), patch_size=\(4, 3\)\. Take an"
            r" image_size that"
        ),
    ),
    "positions of an oblong DINOv2": (
        lambda side: make(side, "dinov2", "DINOv2", 6, 2, 1, image_size=(8, 12), patch_size=(4, 4)),
        (
            r"positions of a DINOv2 are those of a square grid; got image_size=\(8, 12\),"
            r" patch_size=\(4, 4\)\. Images of"
        ),
    ),
    "masked patches without a token for them": (
        lambda side: make(side, "dinov2", "DINOv2", 6, 2, 1, **SQUARE, mask_token=False)(
            ones(side, 3, 2, 8, 8), masked=np.array([True, False, False, True])
        ),
        r"masked patches need a mask token; got mask_token=False\. Construct the model with one",
    ),
    "a BERT without a pooler": (
        lambda side: make(side, "bert", "Bert", 6, 2, 1, pooler=False).pooled(ones(side, 3, 5, 6)),
        r"this BERT has no pooler; got pooler=False\. Take the first token",
    ),
    "a ViT without a pooler": (
        lambda side: make(side, "vit", "ViT", 6, 2, 1, **IMAGES, d_pooled=0).pooled(
            ones(side, 3, 5, 6)
        ),
        r"this ViT has no pooler; got d_pooled=0\. Take the class token",
    ),
    "a window without a middle": (
        lambda side: side.Convolution(3, 4, 2, **numerics(side)),
        r"width must be odd, so that a window has a middle; got width=2\. Use 3",
    ),
    "no reach": (
        lambda side: side.LocalAttention(6, 6, None, 0.0, 2, reach=0, **numerics(side)),
        r"reach must be a positive integer; got reach=0",
    ),
    "layers that are not there": (
        lambda side: side.file("models.modernbert").ModernBertConfig(
            6, 8, 2, 2, full_layers=(0, 2)
        ),
        (
            r"full_layers must be numbers of layers, 0 to 1; got \(0, 2\)\. Leave out those beyond"
            r" num_layers"
        ),
    ),
    "features of another length": (
        lambda side: whisper(side)(ones(side, 3, 5, 12), side.array(np.ones((3, 4), int))),
        r"\(b, mel, frames\) with mel=5, frames=14; got shape \(3, 5, 12\)\. Pad or cut the sound",
    ),
    "an unknown activation of a head": (
        lambda side: side.file("models.masked_lm").MaskedLMHead(
            4, 11, side.LayerNorm(4), "tanh", **numerics(side)
        ),
        r"activation must be one of .*; got 'tanh'",
    ),
    "a block of parts of two widths": (
        lambda side: cross_block(side, width=8),
        (
            r"all parts of a block have one width; got att\.d_in=6, cross\.d_model=8\. Construct"
            r" them with one d_model"
        ),
    ),
    "a block of another attention": (
        lambda side: cross_block(side, att=side.FeedForward(6, **numerics(side))),
        r"att must be Attention; got FeedForward\. Pass att=MultiHeadAttention",
    ),
    "a block of another cross-attention": (
        lambda side: cross_block(side, cross=side.FeedForward(6, **numerics(side))),
        r"cross must be CrossAttention; got FeedForward\. Pass cross=CrossAttention",
    ),
    "a cross block of classes": (
        lambda side: cross_block(side, ff=side.FeedForward),
        "ff must be a module or a function of tokens; got the class FeedForward, not an instance",
    ),
    "a start without an encoder": (
        lambda side: side.generate(
            side.GPT2(side.GPT2Config(6, 2, 1), **numerics(side)), [1], 1, start=[2]
        ),
        (
            r"start is what the decoder of an encoder-decoder begins with; got start=\[2\] for a"
            r" model without an encoder"
        ),
    ),
    "no start": (
        lambda side: side.generate(t5(side), [1], 1, start=[]),
        r"at least one token; prompt 0 is empty",
    ),
    "a start outside the vocabulary": (
        lambda side: side.generate(t5(side), [1], 1, start=[3, 11]),
        r"token ids lie in the vocabulary, 0 to 10; got 11 in prompt 0",
    ),
    "an input outside the vocabulary": (
        lambda side: side.generate(t5(side), [[1], [-1, 2]], 1),
        r"token ids lie in the vocabulary, 0 to 10; got -1 in prompt 1",
    ),
    "a text that is too long": (
        lambda side: side.generate(whisper(side), np.ones((5, 14), np.float32), 8, start=[1, 2]),
        r"at most context_length=9; prompt 0 has 2 tokens and max_new_tokens=8",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_words(name, side, no_shape_checks):
    call, rule = CALLS[name]
    with pytest.raises(ValueError, match=rule):
        call(side)


def test_a_model_keeps_its_mode_where_its_text_is_refused(sides):
    model = t5(sides[1]).train()
    # To generate is to evaluate: a mode that stays so would drop nothing in the next step.
    with pytest.raises(ValueError, match="vocabulary"):
        sides[1].generate(model, [99], 1)
    assert model.training
