"""One head of self-attention with learned projections."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array

from attn_spec.checks import check_positive, check_tokens
from flax_attn.attention import attend_one_head
from flax_attn.backends.registry import check_backend
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.linear import Linear


class SelfAttention(nnx.Module):
    """One head, every token attending to every token.

        softmax(q k^T / sqrt(d_key)) v    with q = x W_query, k = x W_key, v = x W_value

    Args:
        d_in: width of the input.
        d_out: width of the values, and so of the output.
        qkv_bias: whether the three projections have a bias.
        d_key: width of queries and keys; None is d_out.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(t, d_in)` to `(t, d_out)` or `(b, t, d_in)` to `(b, t, d_out)`; the weights are `(t, t)`
        or `(b, t, t)`.

    Raises:
        ValueError: if a width is not positive, the backend is unknown or `rngs` is missing; in the
            call, if the input has another rank or width, or if the mask is not boolean or does not
            broadcast to the weights.

    Example:
        >>> layer = SelfAttention(3, 2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((6, 3))).shape
        (6, 2)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        qkv_bias: bool = False,
        *,
        d_key: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        # One head has no axis of heads that a mesh could split.
        numerics["axes"] = ("embed", None)
        # Products of queries and keys do not depend on the width of the values.
        d_key = d_out if d_key is None else d_key
        check_positive(d_in=d_in, d_out=d_out, d_key=d_key)
        check_backend(backend)
        self.d_in, self.d_out, self.d_key = d_in, d_out, d_key
        self.precision, self.backend = precision, backend
        self.W_query = Linear(d_in, d_key, qkv_bias, **numerics)
        self.W_key = Linear(d_in, d_key, qkv_bias, **numerics)
        self.W_value = Linear(d_in, d_out, qkv_bias, **numerics)

    def project(self, x: Tokens) -> tuple[Array, Array, Array]:
        """Return queries, keys and values."""
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def attend(
        self, x: Tokens, *, mask: Mask | Array | None = None, return_weights: bool = False
    ) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`."""
        check_tokens("x", x, "d_in", self.d_in, None)
        # Without the axis of heads, which the textbook's formula does not have either.
        return attend_one_head(
            *self.project(x),
            mask=mask,
            precision=self.precision,
            backend=self.backend,
            return_weights=return_weights,
        )

    def __call__(self, x: Tokens, *, mask: Mask | Array | None = None) -> Array:
        """Return the context vectors."""
        return self.attend(x, mask=mask).output
