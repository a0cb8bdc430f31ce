"""The rows of encoders and of encoder-decoders."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flax_attn.proof.variant import Shape, TableSizes, Variant


def _encoder(
    module: str,
    config: Callable[[Any], Any],
    *inputs: Shape,
    vocab_size: int | None = None,
    call: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    name: str = "",
) -> Variant:
    """Return the row of a model that is called without a cache."""
    return Variant(
        name or module.lower(),
        module,
        lambda p: getattr(p, module)(config(p)),
        inputs,
        call,
        vocab_size=vocab_size,
        dropout=True,
    )


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    t, times, hidden = sizes.t, sizes.times(2), 10 * sizes.times(10)
    heads, words = 2 * times, 11 * sizes.times(11)
    images: dict[str, Any] = {
        "d_model": 6 * times,
        "num_heads": heads,
        "num_layers": 2,
        "d_hidden": hidden,
        "channels": 2,
        "dropout": 0.3,
    }
    # The rows of patches, which stand beside a class token.
    rows = 2 if t % 2 else 1
    return (
        # Text.
        _encoder(
            "BertMaskedLM",
            lambda p: p.BertConfig(
                6 * times,
                heads,
                2,
                context_length=9,
                vocab_size=words,
                num_types=3,
                d_hidden=hidden,
                eps=1e-3,
            ),
            (sizes.b, t),
            vocab_size=words,
            call=lambda p: {"token_types": np.arange(t) % 3},
        ),
        # Images.
        _encoder(
            "ViT",
            lambda p: p.ViTConfig(
                **images, image_size=(3 * rows, 2 * (t - 1) // rows), patch_size=(3, 2)
            ),
            (sizes.b, 2, 3 * rows, 2 * (t - 1) // rows),
        ),
        # Of images of another size than those of the positions.
        _encoder(
            "DINOv2Classifier",
            lambda p: p.DINOv2Config(**images, image_size=(4, 4), patch_size=(2, 2), swiglu=True),
            (sizes.b, 2, 2, 2 * t - 2),
            call=lambda p: {"masked": np.arange(t - 1) % 3 == 0},
            name="dinov2",
        ),
        _encoder(
            "ModernBertMaskedLM",
            lambda p: p.ModernBertConfig(
                *(8 * times, hidden, heads, 3),
                vocab_size=words,
                window=2,
                full_layers=(0, 2),
                rope=p.RoPE(500.0),
                dropout=0.3,
            ),
            (sizes.b, t),
            vocab_size=words,
        ),
        # Encoder-decoders: two inputs, of different lengths.
        _encoder(
            "T5",
            lambda p: p.T5Config(
                6,
                hidden,
                heads,
                4,
                2,
                2,
                vocab_size=words,
                num_buckets=8,
                max_distance=6,
                dropout=0.3,
            ),
            (sizes.b, sizes.s),
            (sizes.b, t),
            vocab_size=words,
            call=lambda p: {"lengths": sizes.s - 2},
        ),
        _encoder(
            "Whisper",
            lambda p: p.WhisperConfig(
                *(6 * times, heads, 2, heads, 2, 8, hidden),
                num_mel=5,
                num_positions=sizes.s,
                context_length=9,
                vocab_size=words,
                dropout=0.3,
            ),
            (sizes.b, 5, 2 * sizes.s),
            (sizes.b, t),
            vocab_size=words,
        ),
    )
