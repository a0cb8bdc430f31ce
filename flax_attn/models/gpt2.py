"""GPT-2: the model, the published sizes, and their attention layer."""

from dataclasses import dataclass
from types import MappingProxyType

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Integer

from flax_attn.functional.checks import check_choice
from flax_attn.functional.shapes import Tokens
from flax_attn.models.language_model import LanguageModel, initialise
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.linear import Linear
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import LayerNorm


@dataclass(frozen=True)
class GPT2Config:
    """The numbers of one size of GPT-2.

    Args:
        d_model: width of the tokens.
        num_heads: number of heads.
        num_layers: number of blocks.
        context_length: the longest input taken.
        vocab_size: number of tokens.
        qkv_bias: whether the input projections of the attention have a bias.
        dropout: the probability that an attention weight, or an element of an embedding or a sublayer's output, is
            dropped in train mode.
        d_hidden: width inside the feed-forward layer; None is `4 * d_model`.
        activation: of the feed-forward layer.
        eps: of the norms.
        tied: whether the output head is the table of the tokens.

    Example:
        >>> GPT2_CONFIGS["gpt2-medium"].num_heads
        16
    """

    d_model: int
    num_heads: int
    num_layers: int
    context_length: int = 1024
    vocab_size: int = 50257
    qkv_bias: bool = True
    dropout: float = 0.1
    d_hidden: int | None = None
    activation: str = "gelu_tanh"
    eps: float = 1e-5
    tied: bool = True


GPT2_CONFIGS = MappingProxyType(
    {
        "gpt2-small": GPT2Config(768, 12, 12),
        "gpt2-medium": GPT2Config(1024, 16, 24),
        "gpt2-large": GPT2Config(1280, 20, 36),
        "gpt2-xl": GPT2Config(1600, 25, 48),
    }
)


class GPT2(LanguageModel):
    """GPT-2: learned positions, norm before the sublayer, GELU in its tanh form.

        x = drop(tok_emb[tokens] + pos_emb[positions]);  x = block_i(x) for each i;  logits = final_norm(x) @ tok_emb^T

    Args:
        config: its numbers; `GPT2_CONFIGS` holds the published ones.
        backend: of the attention calls; `"auto"` or the name of one.
        remat: whether the backward pass computes each block again instead of keeping what it made.
        dtype: of the computation; None is that of the parameters.
        param_dtype: of the parameters.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params` as `initialise` says, keys of dropout from `dropout`.

    Shapes:
        tokens `(b, t)` or `(t,)` to logits `(b, t, vocab_size)` or `(t, vocab_size)`.

    Raises:
        ValueError: where its layers do.

    Example:
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((4, 5), int)).shape
        (4, 5, 11)

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        backend: str = "auto",
        remat: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs,
    ):
        norms = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        numerics = {**norms, "precision": precision}
        self.config, self.remat = config, remat
        self.tok_emb = Embedding(config.vocab_size, config.d_model, **numerics)
        self.pos_emb = Embedding(config.context_length, config.d_model, **numerics)
        self.drop_emb = Dropout(config.dropout, rngs=rngs)
        self.trf_blocks = nnx.List(
            TransformerBlock(
                config.d_model,
                config.context_length,
                config.dropout,
                config.num_heads,
                config.qkv_bias,
                d_hidden=config.d_hidden,
                activation=config.activation,
                eps=config.eps,
                backend=backend,
                **numerics,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = LayerNorm(config.d_model, config.eps, **norms)
        self.out_head = None if config.tied else Linear(config.d_model, config.vocab_size, bias=False, **numerics)
        initialise(self, rngs)

    def embed(self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None) -> Tokens:
        """Return the vectors of tokens and of their positions, summed, and dropped in train mode."""
        x = self.tok_emb(tokens)
        return self.drop_emb(x + jnp.broadcast_to(self.pos_emb(positions), x.shape), dropout_key=dropout_key)


def create_gpt2_attention(
    size: str,
    dropout: float = 0.1,
    *,
    qkv_bias: bool | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    precision: PrecisionLike = None,
    backend: str = "auto",
    rngs: nnx.Rngs | None = None,
) -> MultiHeadAttention:
    """Return one attention layer of a published GPT-2 size.

    Args:
        size: `"small"`, `"medium"`, `"large"` or `"xl"`, or a key of `GPT2_CONFIGS`.
        dropout: the probability that a weight is dropped in train mode.
        qkv_bias: whether the input projections have a bias; None is as published: they do.
        dtype: of the computation; None is that of the input and the parameters together.
        param_dtype: of the parameters.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        backend: of the attention call; `"auto"` or the name of one.
        rngs: random streams, as `MultiHeadAttention` takes them.

    Raises:
        ValueError: if the size is not a published one or the backend is unknown.

    Example:
        >>> create_gpt2_attention("small", rngs=nnx.Rngs(0)).num_heads
        12

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    name = size if size in GPT2_CONFIGS else f"gpt2-{size}"
    check_choice("size", size if name not in GPT2_CONFIGS else name, tuple(GPT2_CONFIGS))
    config = GPT2_CONFIGS[name]
    return MultiHeadAttention(
        config.d_model,
        config.d_model,
        config.context_length,
        dropout,
        config.num_heads,
        config.qkv_bias if qkv_bias is None else qkv_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        backend=backend,
        rngs=rngs,
    )
