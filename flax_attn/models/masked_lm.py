"""The head of masked language models: which token stands where one was hidden."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_choice
from flax_attn.functional.parameter_sums import add
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.feed_forward import ACTIVATIONS
from flax_attn.modules.initialisation import filled
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import LayerNorm
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.parameters import named


class MaskedLMHead(nnx.Module):
    """`norm(activation(dense(x))) @ table^T + bias`, with the table of the token embedding.

    Args:
        d_model: width of the tokens.
        vocab_size: number of tokens.
        norm: norm of the hidden features.
        activation: activation of the hidden features.
        dense_bias: whether the hidden layer has a bias.
        bias: whether the logits have a bias.
        dtype: dtype of the computation; None is that of the input and the parameters together.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`.

    Shapes:
        `(..., d_model)` to `(..., vocab_size)`.

    Raises:
        ValueError: if the activation is unknown.

    Example:
        >>> from flax_attn import LayerNorm
        >>> table = Embedding(11, 4, rngs=nnx.Rngs(0))
        >>> head = MaskedLMHead(4, 11, LayerNorm(4), rngs=nnx.Rngs(1))
        >>> head(jnp.ones((2, 3, 4)), table).shape
        (2, 3, 11)

    References:
        Devlin et al. 2018 (arXiv:1810.04805).
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        norm: LayerNorm,
        activation: str = "gelu_exact",
        *,
        dense_bias: bool = True,
        bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs,
    ):
        check_choice("activation", activation, tuple(ACTIVATIONS))
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        self.dense = Linear(d_model, d_model, dense_bias, axes=("embed", None), **numerics)
        self.activation, self.norm = ACTIVATIONS[activation], norm
        values = filled(vocab_size, 0, param_dtype) if bias else None
        # It starts at 0, as in transformers.
        self.bias = None if values is None else nnx.Param(values, **named("vocab"))

    def __call__(
        self, x: Float[Array, "*shape d"], table: Embedding
    ) -> Float[Array, "*shape vocab"]:
        # The table of the embedding is the last matrix: only the bias is the head's own.
        logits = table.attend(self.norm(self.activation(self.dense(x))))
        if self.bias is not None:
            logits = add(logits, self.bias[...].astype(logits.dtype))
        return constrain(logits, "batch", "tokens", "vocab")
