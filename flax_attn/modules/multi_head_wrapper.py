"""Causal heads side by side, each with projections of its own."""

from typing import Literal, overload

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array

from attn_spec.checks import check_positive
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.calls import unpack
from flax_attn.modules.causal import CausalAttention


class MultiHeadAttentionWrapper(nnx.Module):
    """`concat(head_1(x), ..., head_n(x))` of `CausalAttention` heads; no output projection.

    The plain way to many heads: n small products instead of one. `MultiHeadAttention` computes all
    heads at once.

    Args:
        d_in: width of the input.
        d_out: width of each head's output; that of the module is `d_out * num_heads`.
        context_length: maximum length of the input; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of heads.
        qkv_bias: whether the projections have a bias.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`, and the keys of dropout from `dropout`.

    Shapes:
        `(t, d_in)` to `(t, d_out * n)` or `(b, t, d_in)` to `(b, t, d_out * n)`; the weights are
        `(n, t, t)` or `(b, n, t, t)`.

    Raises:
        ValueError: where `CausalAttention` does, and if `num_heads` is not positive.

    Example:
        >>> layer = MultiHeadAttentionWrapper(
        ...     3, 2, context_length=6, dropout=0.0, num_heads=4, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((5, 6, 3))).shape
        (5, 6, 8)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        check_positive(num_heads=num_heads)
        options = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "backend": backend,
            "rngs": rngs,
        }
        self.heads = nnx.List(
            [
                CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, **options)
                for _ in range(num_heads)
            ]
        )

    @overload
    def __call__(
        self, x: Array, *, mask: Mask | Array | None = None, return_weights: Literal[False] = False,
        dropout_key: Array | None = None,
    ) -> Array: ...  # fmt: skip

    @overload
    def __call__(
        self, x: Array, *, mask: Mask | Array | None = None, return_weights: Literal[True],
        dropout_key: Array | None = None,
    ) -> tuple[Array, Array]: ...  # fmt: skip

    def __call__(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        """Return the context vectors, followed by the weights if `return_weights`.

        Child i of `dropout_key` decides what head i drops.
        """
        results = [
            unpack(
                head(
                    x, return_weights=return_weights, mask=mask, dropout_key=fold_in(dropout_key, i)
                ),
                return_weights,
            )
            for i, head in enumerate(self.heads)
        ]
        output = jnp.concatenate([result.output for result in results], axis=-1)
        weights = [result.weights for result in results if result.weights is not None]
        return (output, jnp.stack(weights, axis=-3)) if return_weights else output
