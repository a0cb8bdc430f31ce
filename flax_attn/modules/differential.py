"""Differential attention: the difference of two softmaxes."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_positive
from attn_spec.module_checks import given_heads
from flax_attn.functional.explicit_sharding import split_as
from flax_attn.functional.parameter_sums import widened
from flax_attn.functional.positions import RoPE
from flax_attn.modules.initialisation import next_key, normal
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.modules.norm import rms_normed
from flax_attn.sharding.parameters import named


class DifferentialAttention(MultiHeadAttention):
    """Multi-head attention with the difference of two softmaxes.

        out_proj(concat_i((1 - lambda_init) * rms_normed((A_i - lambda A_j) [v_i, v_j])))
        with j = i + num_heads / 2,  A_i = softmax(mask(q_i k_i^T / sqrt(h))),
        lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init

    The difference cancels the weight that both softmaxes give to irrelevant tokens.

    Head `i` of the first half of the query heads is paired with head `j` of the second, as in
    transformers' DiffLlama; the code of the paper pairs neighbours. Both attend to the joined
    values of both, as wide as two heads. `q1`, `k1`, `q2` and `k2` are the parameters `lambda_q1`
    to `lambda_k2`, shared by all heads. In train mode each softmax drops its own weights.

    Args:
        d_in: width of the input.
        d_out: width of all query heads together, and of the output.
        context_length: maximum length of the input; None is no limit.
        dropout: the probability that a weight is dropped in train mode.
        num_heads: number of query heads, even; divides d_out unless `head_dim` is given.
        qkv_bias: whether the three input projections have a bias.
        num_kv_heads: number of key/value heads, even; divides num_heads. None is num_heads.
        head_dim: width h of a head; None is `d_out / num_heads`.
        out_bias: whether the output projection has a bias.
        window: number of keys that a token attends to, itself included; None is all.
        rope: rotary positions of queries and keys; None is no rotation.
        lambda_init: approximate initial value of lambda; `differential_lambda(layer)` in a model.
        eps: epsilon of the norm of each pair of heads, which has no parameters.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        backend: name of an attention backend, or `"auto"`.
        rngs: random streams; the projections are drawn from `params` with the distribution of
            `torch.nn.Linear`, the vectors of lambda from the normal one with a deviation of 0.1,
            and the keys of dropout from `dropout`.

    Shapes:
        `(b, t, d_in)` to `(b, t, d_out)`, weights `(b, n, t, t)`, those of both softmaxes; or all
        without b.

    Raises:
        ValueError: if the key/value heads are not pairs, or where `MultiHeadAttention` does.

    Example:
        >>> layer = DifferentialAttention(6, 8, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 6))).shape
        (3, 5, 8)

    References:
        Ye et al. 2024 (arXiv:2410.05258).
    """

    # A number that the layers of a stack have of their own.
    per_layer = ("lambda_init",)

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int | None = None,
        qkv_bias: bool = False,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_bias: bool = True,
        window: int | None = None,
        rope: RoPE | None = None,
        lambda_init: float = 0.8,
        eps: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        backend: str = "auto",
        rngs: nnx.Rngs | None = None,
    ):
        num_heads = given_heads(type(self).__name__, num_heads)
        # Before the parts are built, which would name another argument.
        _check_pairs(num_heads if num_kv_heads is None else num_kv_heads)
        super().__init__(
            *(d_in, d_out, context_length, dropout, num_heads, qkv_bias),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            out_bias=out_bias,
            window=window,
            rope=rope,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            backend=backend,
            rngs=rngs,
        )
        self.lambda_init, self.eps = lambda_init, eps
        # The projections need them too.
        draw, streams = normal(0.1), cast(nnx.Rngs, rngs)
        shape = (self.head_dim,)
        drawn = [draw(next_key(streams.params), shape, param_dtype) for _ in range(4)]
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nnx.Param(vector, **named(None)) for vector in drawn
        )

    def difference(self) -> Float[Array, ""]:
        """Return lambda, the factor on the second softmax, in at least float32."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        q1, k1, q2, k2 = (widened(x[...]) for x in vectors)
        return jnp.exp((q1 * k1).sum()) - jnp.exp((q2 * k2).sum()) + self._start(q1.dtype)

    def _attend(
        self, q: Array, k: Array, v: Array, *others: Any, return_weights: bool, **options: Any
    ) -> tuple[Array, Array | None]:
        # The key/value heads of both halves get the values of both: then query heads are grouped as
        # always.
        of_both = rearrange(v, "... s (two k) h -> ... s k (two h)", two=2)
        values = repeat(widened(of_both), "... s k h -> ... s (two k) h", two=2).astype(v.dtype)
        heads, weights = super()._attend(
            q, k, values, *others, return_weights=return_weights, **options
        )
        # Both halves of the heads have to be on one device.
        whole = split_as(heads, *range(heads.ndim - 2), None, heads.ndim - 1)
        if whole is not None:
            heads = jax.sharding.reshard(heads, whole)
        first, second = rearrange(widened(heads), "... (two n) h -> two ... n h", two=2)
        factor = self.difference().astype(first.dtype)
        # Each head by itself, as a group norm does: their scales differ after the subtraction.
        difference = first - factor * second
        normed = rms_normed(difference, self.eps)
        # What the subtraction takes from the heads at the start of training.
        scale = 1 - self._start(normed.dtype)
        return (scale * normed).astype(heads.dtype), weights

    def _start(self, dtype: Dtype) -> Array:
        # A number, or an array in a scan over layers.
        return jnp.asarray(self.lambda_init, dtype)

    def _widths(self, t: int, s: int) -> int:
        # A value is that of two heads.
        return 3 * self.head_dim


def differential_lambda(layer: int) -> float:
    """Return `lambda_init` of a layer, counted from 0: `0.8 - 0.6 exp(-0.3 layer)`.

    Example:
        >>> [round(differential_lambda(layer), 3) for layer in (0, 1, 20)]
        [0.2, 0.356, 0.799]
    """
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def _check_pairs(num_kv_heads: int) -> None:
    """Raise unless the key/value heads make pairs, and so the query heads that they serve."""
    check_positive(num_kv_heads=num_kv_heads)
    if num_kv_heads % 2:
        raise ValueError(
            "differential attention pairs the heads of the first half with those of the second, so"
            f" num_kv_heads must be even; got num_kv_heads={num_kv_heads}. Pass {num_kv_heads + 1},"
            " or another even number"
        )
