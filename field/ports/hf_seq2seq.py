"""Models of transformers 4.57 that make text from text."""

from __future__ import annotations

from collections.abc import Iterator

from field.port import Port
from field.ports._hf import SEQ2SEQ, row

T5 = {
    "vocab_size": 37,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
LONG = T5 | {"local_radius": 3, "global_block_size": 4}
# PyTorch keeps the sinusoids as parameters that it does not train.
SINUSOIDS = {"alone": r".*embed_positions.weight"}
SHARED = SINUSOIDS | {
    "decoder_start_token_id": 1,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}


def ports() -> list[Port]:
    """Return the rows."""
    return [*_barts(), *_t5(), *_long()]


def _barts() -> Iterator[Port]:
    def seq2seq(name, model, words, **settings):
        return row(name, model, words, SEQ2SEQ, "seq2seq", **settings)

    yield seq2seq("bart/base", "BartModel", "norms after the layers, exact GELU")
    yield seq2seq(
        "bart/head",
        "BartForConditionalGeneration",
        "tied head with a bias, embeddings scaled, ReLU",
        scale_embedding=True,
        activation_function="relu",
    )
    yield seq2seq("mbart/base", "MBartModel", "norms before the layers")
    yield seq2seq(
        "mbart/head",
        "MBartForConditionalGeneration",
        "tied head, embeddings scaled",
        scale_embedding=True,
    )
    yield seq2seq("blenderbot/base", "BlenderbotModel", "norms before the layers")
    yield seq2seq(
        "blenderbot/head",
        "BlenderbotForConditionalGeneration",
        "tied head, embeddings scaled",
        scale_embedding=True,
    )
    yield seq2seq("blenderbot_small/base", "BlenderbotSmallModel", "norms after the layers")
    yield seq2seq(
        "blenderbot_small/head",
        "BlenderbotSmallForConditionalGeneration",
        "tied head, tanh GELU",
        activation_function="gelu_new",
    )
    yield seq2seq(
        "marian/base",
        "MarianModel",
        "sinusoidal positions, swish",
        activation_function="swish",
        **SHARED,
    )
    yield seq2seq(
        "marian/head",
        "MarianMTModel",
        "tied head, embeddings scaled",
        scale_embedding=True,
        **SHARED,
    )
    yield seq2seq(
        "marian/two vocabularies",
        "MarianMTModel",
        "embeddings not shared",
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=37,
        **SHARED,
    )
    yield seq2seq(
        "pegasus/base", "PegasusModel", "sinusoidal positions, norms before the layers", **SINUSOIDS
    )
    yield seq2seq(
        "pegasus/head",
        "PegasusForConditionalGeneration",
        "tied head, embeddings scaled, ReLU",
        scale_embedding=True,
        activation_function="relu",
        **SINUSOIDS,
    )
    yield row(
        "bart/causal",
        "BartForCausalLM",
        "the decoder alone",
        SEQ2SEQ,
        is_decoder=True,
        is_encoder_decoder=False,
    )


def _t5() -> Iterator[Port]:
    yield row("t5/base", "T5Model", "ReLU, 8 buckets of distances", T5, "seq2seq")
    yield row(
        "t5/gated",
        "T5ForConditionalGeneration",
        "gated tanh GELU, a head of its own, as T5 1.1",
        T5,
        "seq2seq",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    yield row("t5/tied", "T5ForConditionalGeneration", "tied head, scaled", T5, "seq2seq")
    yield row(
        "t5/encoder",
        "T5EncoderModel",
        "the encoder alone, gated SiLU",
        T5,
        feed_forward_proj="gated-silu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    yield row(
        "mt5/base", "MT5Model", "gated tanh GELU", T5, "seq2seq", feed_forward_proj="gated-gelu"
    )
    yield row(
        "mt5/head",
        "MT5ForConditionalGeneration",
        "a head of its own",
        T5,
        "seq2seq",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )


def _long() -> Iterator[Port]:
    yield row(
        "longt5/local",
        "LongT5Model",
        "local attention, radius 3",
        LONG,
        "seq2seq",
        encoder_attention_type="local",
    )
    yield row(
        "longt5/global",
        "LongT5Model",
        "local and transient-global attention, blocks of 4",
        LONG,
        "seq2seq",
        encoder_attention_type="transient-global",
    )
    yield row(
        "longt5/head",
        "LongT5ForConditionalGeneration",
        "local, gated, tied head",
        LONG,
        "seq2seq",
        feed_forward_proj="gated-gelu",
    )
