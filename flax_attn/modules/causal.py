"""One head of causal self-attention, with dropout on the weights."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array

from attn_spec.checks import check_context_length, check_tokens
from flax_attn.attention import attend_one_head
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.dropout import Dropout
from flax_attn.modules.self_attention import SelfAttention


class CausalAttention(SelfAttention):
    """One head, every token attending to itself and what came before.

        dropout(softmax(causal(q k^T / sqrt(d_key)))) v
        with q = x W_query, k = x W_key, v = x W_value

    Args:
        d_in: width of the input.
        d_out: width of the values, and so of the output.
        context_length: maximum length of the input; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        qkv_bias: whether the three projections have a bias.
        d_key: width of queries and keys; None is d_out.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`, and the keys of dropout from `dropout`.

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`; the weights are `(t, t)`
        or `(b, t, t)`.

    Raises:
        ValueError: if a width is not positive, `dropout` lies outside [0, 1), the backend is
            unknown or `rngs` is missing; in the call, if the input has another rank or width or is
            longer than `context_length`, or if the mask is not boolean or does not broadcast to the
            weights.

    Example:
        >>> layer = CausalAttention(3, 2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((4, 6, 3))).shape
        (4, 6, 2)

    References:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        d_key: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        # Before any parameter is drawn: a refused layer must not take keys from a stream.
        check_context_length(context_length)
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        super().__init__(d_in, d_out, qkv_bias, d_key=d_key, backend=backend, **numerics)
        self.context_length = context_length
        self.dropout = Dropout(dropout, rngs=rngs)

    def attend(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`.

        `mask` hides more than the causal mask does. In train mode `dropout_key` decides what is
        dropped; without it a key is drawn from the `dropout` stream.
        """
        check_tokens("x", x, "d_in", self.d_in, self.context_length)
        return attend_one_head(
            *self.project(x),
            # The mask that is passed can hide more, and show nothing that is behind a token.
            mask=Mask.causal() & as_mask(mask, heads=False),
            dropout=self.dropout.keyed(dropout_key),
            precision=self.precision,
            backend=self.backend,
            return_weights=return_weights,
        )

    def __call__(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the context vectors; `attend` describes the arguments."""
        return self.attend(x, mask=mask, dropout_key=dropout_key).output
