"""GPT-2: the model, the published sizes, and their attention layer."""

from dataclasses import replace
from typing import Any

from flax import nnx
from flax.typing import PrecisionLike
from jaxtyping import Array, Integer

from attn_spec.checks import check_choice
from attn_spec.models.gpt2 import GPT2_CONFIGS, GPT2Config, read, write
from flax_attn.convert.rules import Layout, Rule
from flax_attn.functional.parameter_sums import add
from flax_attn.functional.shapes import Tokens
from flax_attn.models.hugging_face.family import Family, embeddings, linears, norms
from flax_attn.models.language_model import LanguageModel
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import FeedForward
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm

_QKV = tuple("trf_blocks.{i}.att." + name for name in ("W_query", "W_key", "W_value"))
_LINEARS = {"att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc", "ff.layers.2": "mlp.c_proj"}
_PREFIXES = "trf_blocks.{i}.", "transformer.h.{i}."
_LAYOUT = Layout(
    (
        *embeddings({"tok_emb": "transformer.wte", "pos_emb": "transformer.wpe"}),
        # Conv1D keeps its weight as (in, out); the columns of c_attn are [query, key, value].
        Rule(
            tuple(f"{name}.kernel" for name in _QKV), "transformer.h.{i}.attn.c_attn.weight", axis=1
        ),
        Rule(tuple(f"{name}.bias" for name in _QKV), "transformer.h.{i}.attn.c_attn.bias"),
        *linears(_LINEARS, *_PREFIXES, pattern=""),
        *norms({"norm1": "ln_1", "norm2": "ln_2"}, *_PREFIXES),
        *norms({"final_norm": "transformer.ln_f"}),
        *linears({"out_head": "lm_head"}),
    ),
    # Masks were stored as buffers once, and a tied head may be stored a second time.
    ignored=r"(.*\.)?attn\.(masked_)?bias|(.*\.)?lm_head\.weight",
)


class GPT2(LanguageModel[GPT2Config]):
    """GPT-2: learned positions, norm before the sublayer, GELU in its tanh form.

        x = drop(tok_emb[tokens] + pos_emb[positions])
        x = block_i(x) for each i
        logits = final_norm(x) @ tok_emb^T

    Arguments and errors are those of `LanguageModel`; `GPT2_CONFIGS` has the published sizes.

    Example:
        >>> import jax.numpy as jnp
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 11)

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    family = Family({"gpt2": read}, write, _LAYOUT, base="transformer.")

    def create_embeddings(self, *, rngs: nnx.Rngs, **numerics: Any) -> None:
        """Set the tables of tokens and of positions, and the dropout of their sum."""
        super().create_embeddings(rngs=rngs, **numerics)
        sizes = self.config.context_length, self.config.d_model
        self.pos_emb = Embedding(*sizes, axes=(None, "embed"), rngs=rngs, **numerics)
        self.drop_emb = Dropout(self.config.dropout, rngs=rngs)

    def block(
        self,
        layer: int,
        backend: str,
        *,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs,
        **numerics: Any,
    ) -> TransformerBlock:
        """Return a block: norms before attention and feed-forward, dropout on their outputs."""
        config, numerics = self.config, {"rngs": rngs, **numerics}
        products = {"precision": precision, **numerics}
        return TransformerBlock(
            _attention(config, backend=backend, **products),
            FeedForward(config.d_model, config.d_hidden, config.activation, **products),
            self.norm(**numerics),
            self.norm(**numerics),
            drop_shortcut=Dropout(config.dropout, rngs=rngs),
        )

    def norm(self, **numerics: Any) -> LayerNorm:
        """Return a norm."""
        return LayerNorm(self.config.d_model, self.config.eps, **numerics)

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the sum of token and position vectors, with dropout in train mode."""
        x = self.tok_emb(tokens)
        return self.drop_emb(add(x, self.pos_emb(positions)), dropout_key=dropout_key)


def _attention(config: GPT2Config, **options: Any) -> MultiHeadAttention:
    d, length = config.d_model, config.context_length
    return MultiHeadAttention(
        d, d, length, config.dropout, config.num_heads, config.qkv_bias, **options
    )


def create_gpt2_attention(
    size: str,
    dropout: float = 0.1,
    *,
    qkv_bias: bool | None = None,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> MultiHeadAttention:
    """Return one attention layer of a published GPT-2 size.

    Args:
        size: `"small"`, `"medium"`, `"large"` or `"xl"`, or a key of `GPT2_CONFIGS`.
        dropout: the probability that a weight is dropped in train mode.
        qkv_bias: whether the input projections have a bias; None is as published: they do.
        rngs: random streams, as `MultiHeadAttention` takes them.
        options: other arguments of `MultiHeadAttention`, such as `dtype` and `backend`.

    Raises:
        ValueError: if the size is not a published one, or where `MultiHeadAttention` does.

    Example:
        >>> create_gpt2_attention("small", rngs=nnx.Rngs(0)).num_heads
        12

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    # Both "small" and "gpt2-small" are names of a size.
    name = size if size in GPT2_CONFIGS else f"gpt2-{size}"
    check_choice("size", size if name not in GPT2_CONFIGS else name, tuple(GPT2_CONFIGS))
    config = GPT2_CONFIGS[name]
    bias = config.qkv_bias if qkv_bias is None else qkv_bias
    return _attention(replace(config, dropout=dropout, qkv_bias=bias), rngs=rngs, **options)
