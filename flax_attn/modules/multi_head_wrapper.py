"""Causal heads side by side, each with projections of its own."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array

from attn_spec.checks import check_positive
from attn_spec.module_checks import given_heads
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.calls import run_layer
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
        >>> layer = MultiHeadAttentionWrapper(3, 2, num_heads=4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((5, 6, 3))).shape
        (5, 6, 8)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int | None = None,
        qkv_bias: bool = False,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        num_heads = given_heads(type(self).__name__, num_heads)
        check_positive(num_heads=num_heads)
        options = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "backend": backend,
            "rngs": rngs,
        }
        # Each draws its own parameters, one head after the other, as the book does.
        self.heads = nnx.List(
            [
                CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, **options)
                for _ in range(num_heads)
            ]
        )

    def attend(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`.

        Child i of `dropout_key` decides what head i drops.
        """
        found = []
        for i, head in enumerate(self.heads):
            # Equal keys would drop the same weights in every head.
            key = fold_in(dropout_key, i)
            options = {"mask": mask, "dropout_key": key, "return_weights": return_weights}
            found.append(run_layer(head, x, **options))
        output = jnp.concatenate([one.output for one in found], axis=-1)
        if not return_weights:
            return Outputs(output)
        return Outputs(output, jnp.stack([one.weights for one in found], axis=-3))

    def __call__(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the context vectors; `attend` describes the arguments."""
        return self.attend(x, mask=mask, dropout_key=dropout_key).output
