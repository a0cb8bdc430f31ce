"""BERT: the encoder, and its masked language model."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.models.bert import BertConfig, read, read_tied, write
from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.parameter_sums import add
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.encoder import TextEncoder
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.masked_lm import MaskedLMHead
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import FeedForward
from flax_attn.modules.linear import Linear
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm


def _fit(config: BertConfig, names: Collection[str]) -> BertConfig:
    """Return the config with a pooler only if the files have one: `config.json` does not say."""
    return replace(config, pooler=any(name.endswith("pooler.dense.weight") for name in names))


_HEAD = "cls.predictions.transform."


def _layout(base: str, ignored: str) -> Layout:
    """Return the names of the weights, those of the encoder behind a prefix."""
    tables = {
        "tok_emb": "word_embeddings",
        "type_emb": "token_type_embeddings",
        "pos_emb": "position_embeddings",
    }
    layers = {
        "att.W_query": "attention.self.query",
        "att.W_key": "attention.self.key",
        "att.W_value": "attention.self.value",
        "att.out_proj": "attention.output.dense",
        "ff.layers.0": "intermediate.dense",
        "ff.layers.2": "output.dense",
    }
    of_layers = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}
    prefixes = "trf_blocks.{i}.", f"{base}encoder.layer.{{i}}."
    return Layout(
        (
            *embeddings(tables, "", f"{base}embeddings."),
            *linears(layers, *prefixes),
            *norms(of_layers, *prefixes),
            *norms({"emb_norm": f"{base}embeddings.LayerNorm", "head.norm": f"{_HEAD}LayerNorm"}),
            *linears({"pooler": f"{base}pooler.dense", "head.dense": f"{_HEAD}dense"}),
            Rule(("head.bias",), "cls.predictions.bias"),
        ),
        ignored=rf"(.*\.)?embeddings\.position_ids|{ignored}",
    )


class Bert(TextEncoder[BertConfig]):
    """BERT: learned positions, token types, norm after the sublayer, GELU in its exact form.

        x = drop(norm(tok_emb[tokens] + type_emb[token_types] + pos_emb[positions]))
        x = block_i(x) for each i

    Arguments and errors are those of `Encoder`, and a call takes `token_types` beside. `BertModel`
    of transformers has the same function; where its config names a `pad_token_id`, it leaves the
    row of that token out of the gradient.

    Example:
        >>> model = Bert(BertConfig(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> hidden = model(jnp.ones((4, 5), int), lengths=jnp.array([5, 3, 1, 2]))
        >>> hidden.shape, model.pooled(hidden).shape
        ((4, 5, 6), (4, 6))

    References:
        Devlin et al. 2018 (arXiv:1810.04805).
    """

    family = Family(
        {"bert": read},
        lambda config: write("BertModel", config),
        _layout("", r"(.*\.)?cls\..*"),
        base="",
        architecture="BertModel",
        fit=_fit,
    )
    pooler: Linear | None

    def create_embeddings(self, **numerics: Any) -> None:
        """Set the tables of tokens, types and positions, and the norm and dropout of their sum."""
        config = self.config
        d_model = config.d_model
        self.tok_emb = Embedding(config.vocab_size, d_model, **numerics)
        # Of these short tables devices split the width alone.
        tables = {"axes": (None, "embed"), **numerics}
        # Both sentences of a pair pass through the model together.
        self.type_emb = Embedding(config.num_types, d_model, **tables)
        self.pos_emb = Embedding(config.context_length, d_model, **tables)
        self.emb_norm = self.norm(**numerics)
        self.drop_emb = self.drop(**numerics)

    def block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block: norms after the sums, dropout on what is added."""
        config = self.config
        d = config.d_model
        options = {"qkv_bias": True, "causal": False, "backend": backend, **numerics}
        return TransformerBlock(
            MultiHeadAttention(
                d, d, config.context_length, config.attention_dropout, config.num_heads, **options
            ),
            FeedForward(d, config.d_hidden, config.activation, **numerics),
            self.norm(**numerics),
            self.norm(**numerics),
            # As in the first Transformer: the norms stand after the sums.
            norm_first=False,
            drop_shortcut=self.drop(**numerics),
        )

    def norm(self, *, precision: PrecisionLike = None, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps, **numerics)

    def drop(self, rngs: nnx.Rngs, **numerics: Any) -> Dropout:
        """Return the dropout of the embeddings, and of what the layers of a block add."""
        return Dropout(self.config.dropout, rngs=rngs)

    def create_head(self, **numerics: Any) -> None:
        """Set the layer of `pooled`."""
        d = self.config.d_model
        numerics["axes"] = ("embed", None)
        self.pooler = Linear(d, d, **numerics) if self.config.pooler else None

    def embed(
        self,
        tokens: Integer[Array, "*b t"],
        positions: Array,
        dropout_key: Array | None,
        token_types: ArrayLike | None = None,
    ) -> Tokens:
        """Return the normed sum of the vectors of tokens, of their types, and of their positions.

        `token_types` are integers `(t,)` or `(b, t)`; None is 0.
        """
        types = 0 if token_types is None else token_types
        types = jnp.broadcast_to(jnp.asarray(types), tokens.shape)
        x = self.tok_emb(tokens) + self.type_emb(types)
        x = add(x, self.pos_emb(positions))
        x = self.emb_norm(x)
        return self.drop_emb(x, dropout_key=dropout_key)

    def pooled(self, hidden: Tokens) -> Float[Array, "*b d"]:
        """Return `tanh(pooler(x))` of the first token of `x`, a vector for the whole input.

        Raises:
            ValueError: if the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "this BERT has no pooler; got pooler=False. Take the first token, hidden[..., 0,"
                " :], or average them"
            )
        return jnp.tanh(self.pooler(hidden[..., 0, :]))


class BertMaskedLM(Bert):
    """BERT with the head that it was trained with: the logits of every token.

        logits = norm(gelu(dense(x))) @ tok_emb^T + bias

    Arguments and errors are those of `Encoder`; `BertForMaskedLM` of transformers has the same
    function.

    Example:
        >>> config = BertConfig(6, 2, 3, context_length=8, vocab_size=11)
        >>> model = BertMaskedLM(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 11)

    References:
        Devlin et al. 2018 (arXiv:1810.04805).
    """

    family = Family(
        {"bert": read_tied},
        lambda config: write("BertForMaskedLM", config),
        # The head is stored a second time, tied, and the layers of the other task of the training
        # may be there.
        _layout(
            "bert.", r"cls\.predictions\.decoder\..*|bert\.pooler\..*|cls\.seq_relationship\..*"
        ),
        base="bert.",
        copies={
            "cls.predictions.decoder.weight": "tok_emb.embedding",
            "cls.predictions.decoder.bias": "head.bias",
        },
        architecture="BertForMaskedLM",
    )

    def create_head(self, **numerics: Any) -> None:
        """Set the head."""
        config = self.config
        norm = self.norm(**numerics)
        self.pooler = None
        self.head = MaskedLMHead(
            config.d_model, config.vocab_size, norm, config.activation, **numerics
        )

    def predict(self, hidden: Tokens) -> Array:
        """Return the logits of every token, `(b, t, vocab_size)`."""
        return self.head(hidden, self.tok_emb)
