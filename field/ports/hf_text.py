"""Encoders and decoders of text in transformers 4.57, the last release with Flax models."""

from __future__ import annotations

from collections.abc import Iterator

from field.port import Port
from field.ports._hf import TEXT, row

BERTS = {"BertModel": "bert", "RobertaModel": "roberta", "XLMRobertaModel": "xlm_roberta"}
EMBEDDED = TEXT | {"embedding_size": 10}  # embeddings narrower than the model
GROUPED = TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 37, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3}
NEO = {"vocab_size": 37, "max_position_embeddings": 64, "hidden_size": 24, "num_heads": 3}
XGLM = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "d_model": 24,
    "ffn_dim": 40,
    "num_layers": 2,
    "attention_heads": 3,
}
OPT = {key: value for key, value in TEXT.items() if key != "intermediate_size"} | {"ffn_dim": 40}
DISTIL = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "n_layers": 2,
    "n_heads": 3,
    "dim": 24,
    "hidden_dim": 40,
}


def ports() -> list[Port]:
    """Return the rows."""
    return [*_berts(), *_encoders(), *_decoders(), *_rotary_decoders()]


def _berts() -> Iterator[Port]:
    for model, name in BERTS.items():
        yield row(f"{name}/base", model, "exact GELU, learned positions, pooler", TEXT)
    yield row(
        "bert/gelu_new", "BertForMaskedLM", "tanh GELU, tied head", TEXT, hidden_act="gelu_new"
    )
    yield row(
        "bert/untied",
        "BertForMaskedLM",
        "ReLU, a head of its own",
        TEXT,
        hidden_act="relu",
        tie_word_embeddings=False,
    )
    yield row(
        "bert/classes",
        "BertForSequenceClassification",
        "three classes from the pooler",
        TEXT,
        num_labels=3,
    )
    yield row("bert/pretraining", "BertForPreTraining", "both heads of pretraining", TEXT)
    yield row(
        "bert/decoder",
        "BertModel",
        "causal, for a decoder",
        TEXT,
        is_decoder=True,
        use_cache=False,
        attn_implementation="eager",
    )
    yield row(
        "bert/relative",
        "BertModel",
        "relative positions of keys",
        TEXT,
        position_embedding_type="relative_key",
    )
    yield row(
        "bert/relative, rest",
        "BertModel",
        "the same, compared without the parameters that Flax lacks",
        TEXT,
        position_embedding_type="relative_key",
        alone=r".*distance_embedding.weight",
    )
    yield row(
        "roberta/padded",
        "RobertaModel",
        "pad tokens among the ids, which move positions",
        TEXT,
        call="pad tokens",
    )
    yield row("roberta/head", "RobertaForMaskedLM", "tied head", TEXT)
    yield row(
        "roberta_prelayernorm/base", "RobertaPreLayerNormModel", "norms before the layers", TEXT
    )
    yield row("roberta_prelayernorm/head", "RobertaPreLayerNormForMaskedLM", "tied head", TEXT)


def _encoders() -> Iterator[Port]:
    def rotary(name, model, words, **settings):
        base = TEXT | {"embedding_size": 24, "num_attention_heads": 2}
        return row(
            f"roformer/{name}", model, words, base, alone=r".*embed_positions.weight", **settings
        )

    yield row("albert/base", "AlbertModel", "one layer shared, narrow embeddings", EMBEDDED)
    yield row(
        "albert/groups", "AlbertModel", "two groups of a layer each", EMBEDDED, num_hidden_groups=2
    )
    yield row(
        "albert/inner",
        "AlbertModel",
        "one group of two layers, used twice",
        EMBEDDED,
        inner_group_num=2,
    )
    yield row("albert/head", "AlbertForMaskedLM", "tied head", EMBEDDED)
    yield row("distilbert/base", "DistilBertModel", "learned positions", DISTIL)
    yield row(
        "distilbert/sinusoids",
        "DistilBertModel",
        "sinusoidal positions",
        DISTIL,
        sinusoidal_pos_embds=True,
        alone=r".*position_embeddings.weight",
    )
    yield row("distilbert/head", "DistilBertForMaskedLM", "tied head", DISTIL)
    yield row("electra/base", "ElectraModel", "narrow embeddings", EMBEDDED)
    yield row(
        "electra/wide",
        "ElectraModel",
        "embeddings as wide as the model",
        EMBEDDED,
        embedding_size=24,
    )
    yield row("electra/generator", "ElectraForMaskedLM", "tied head", EMBEDDED)
    yield row(
        "electra/discriminator",
        "ElectraForPreTraining",
        "a score for each token, tanh GELU",
        EMBEDDED,
        hidden_act="gelu_new",
    )
    yield row(
        "electra/classes",
        "ElectraForSequenceClassification",
        "three classes",
        EMBEDDED,
        num_labels=3,
    )
    yield rotary("base", "RoFormerModel", "rotary positions of queries and keys")
    yield rotary("values", "RoFormerModel", "rotary positions of values too", rotary_value=True)
    yield rotary("narrow", "RoFormerModel", "narrow embeddings", embedding_size=10)
    yield rotary("head", "RoFormerForMaskedLM", "a head")
    yield row(
        "big_bird/full", "BigBirdModel", "full attention", TEXT, attention_type="original_full"
    )
    yield row(
        "big_bird/rescaled",
        "BigBirdModel",
        "full attention, embeddings rescaled",
        TEXT,
        attention_type="original_full",
        rescale_embeddings=True,
    )
    yield row(
        "big_bird/no bias",
        "BigBirdModel",
        "full attention without biases",
        TEXT,
        attention_type="original_full",
        use_bias=False,
    )


def _decoders() -> Iterator[Port]:
    yield row("gpt2/base", "GPT2Model", "learned positions, tanh GELU", GPT2)
    yield row(
        "gpt2/head", "GPT2LMHeadModel", "tied head, a feed-forward layer of 40", GPT2, n_inner=40
    )
    yield row(
        "gpt2/unscaled", "GPT2Model", "scores without a scale", GPT2, scale_attn_weights=False
    )
    yield row(
        "gpt2/inverse layer",
        "GPT2Model",
        "scores divided by the number of the layer",
        GPT2,
        scale_attn_by_inverse_layer_idx=True,
    )
    yield row(
        "gpt_neo/global and local",
        "GPTNeoModel",
        "a global layer and a local one, window of 4",
        NEO,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    yield row(
        "gpt_neo/head",
        "GPTNeoForCausalLM",
        "global, tied head",
        NEO,
        num_layers=1,
        attention_types=[[["global"], 1]],
    )
    yield row(
        "bloom/base",
        "BloomModel",
        "ALiBi of 4 heads",
        {"vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    )
    yield row(
        "bloom/odd heads",
        "BloomModel",
        "ALiBi of 3 heads, no power of two",
        {"vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 3},
    )
    yield row(
        "bloom/residual",
        "BloomForCausalLM",
        "residuals after the norm, tied head",
        {"vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 4},
        apply_residual_connection_post_layernorm=True,
    )
    yield row("opt/base", "OPTModel", "norms before the layers", OPT)
    yield row(
        "opt/after",
        "OPTModel",
        "norms after the layers, narrow embeddings, as OPT-350M",
        OPT,
        do_layer_norm_before=False,
        word_embed_proj_dim=10,
    )
    yield row("opt/head", "OPTForCausalLM", "tied head", OPT)
    yield row("xglm/base", "XGLMModel", "sinusoidal positions", XGLM)
    yield row(
        "xglm/head",
        "XGLMForCausalLM",
        "tied head, no scaled embedding",
        XGLM,
        scale_embedding=False,
    )


def _rotary_decoders() -> Iterator[Port]:
    yield row("gptj/base", "GPTJModel", "rotary positions of 4 of 8 dimensions", GPT2, rotary_dim=4)
    yield row("gptj/head", "GPTJForCausalLM", "a head of its own", GPT2, rotary_dim=4)
    yield row("llama/base", "LlamaModel", "as many key/value heads as heads", TEXT)
    yield row(
        "llama/grouped",
        "LlamaForCausalLM",
        "2 key/value heads of 4, a base of 500",
        GROUPED,
        rope_theta=500.0,
    )
    yield row("llama/biases", "LlamaModel", "biases in attention", GROUPED, attention_bias=True)
    yield row("llama/tied", "LlamaForCausalLM", "tied head", GROUPED, tie_word_embeddings=True)
    yield row(
        "llama/scaled positions",
        "LlamaModel",
        "linear rope scaling by 2",
        GROUPED,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    yield row("mistral/full", "MistralModel", "no window", GROUPED, sliding_window=None)
    yield row("mistral/window", "MistralModel", "a window of 4", GROUPED, sliding_window=4)
    yield row(
        "mistral/wide heads",
        "MistralForCausalLM",
        "heads wider than the model gives",
        GROUPED,
        sliding_window=None,
        head_dim=10,
    )
    yield row(
        "mistral/theta",
        "MistralModel",
        "rotary base of 500",
        GROUPED,
        sliding_window=64,
        rope_theta=500.0,
    )
    yield row(
        "gemma/theta", "GemmaModel", "rotary base of 500", GROUPED, head_dim=8, rope_theta=500.0
    )
    yield row(
        "gemma/base",
        "GemmaModel",
        "heads of 10, one key/value head",
        TEXT,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
    )
    yield row(
        "gemma/grouped",
        "GemmaForCausalLM",
        "2 key/value heads of 4, tied head",
        GROUPED,
        head_dim=8,
    )
    yield row(
        "gemma/gelu",
        "GemmaModel",
        "exact GELU asked for",
        GROUPED,
        head_dim=8,
        hidden_activation="gelu",
    )
