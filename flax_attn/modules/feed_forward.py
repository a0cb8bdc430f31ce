"""The feed-forward layers of a transformer block: plain and gated."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_choice, check_positive, check_width
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.modules.linear import Linear
from flax_attn.sharding.axes import constrain


def _gelu_tanh(x: Array) -> Array:
    """`x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, in at least float32."""
    return jax.nn.gelu(x.astype(accumulation_dtype(x.dtype)), approximate=True).astype(x.dtype)


def _gelu_exact(x: Array) -> Array:
    """`x / 2 (1 + erf(x / sqrt(2)))`, in at least float32."""
    return jax.nn.gelu(x.astype(accumulation_dtype(x.dtype)), approximate=False).astype(x.dtype)


def _silu(x: Array) -> Array:
    """`x / (1 + exp(-x))`, in at least float32."""
    return jax.nn.silu(x.astype(accumulation_dtype(x.dtype))).astype(x.dtype)


ACTIVATIONS = {
    "gelu_tanh": _gelu_tanh,
    "gelu_exact": _gelu_exact,
    "silu": _silu,
    "relu": jax.nn.relu,
}


class FeedForward(nnx.Module):
    """`Linear(d_hidden, d_model)(activation(Linear(d_model, d_hidden)(x)))`.

    The two forms of GELU differ by up to 5e-4: a model trained with one and run with the other is a
    different model.

    Args:
        d_model: width of input and output.
        d_hidden: width in between; None is `4 * d_model`.
        activation: `"gelu_tanh"` (GPT-2), `"gelu_exact"` (BERT), `"silu"` or `"relu"` (T5).
        bias: whether the two layers have a bias.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if a width is not positive, the activation is unknown, `rngs` is missing, or the
            input has another width.

    Example:
        >>> FeedForward(3, 8, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
        (5, 3)

    References:
        Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = True,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_choice("activation", activation, tuple(ACTIVATIONS))
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.d_model = d_model
        self.layers = nnx.List(
            [
                Linear(d_model, d_hidden, bias, axes=("embed", "hidden"), **numerics),
                ACTIVATIONS[activation],
                Linear(d_hidden, d_model, bias, axes=("hidden", "embed"), **numerics),
            ]
        )

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        # Indexed as in `nn.Sequential`, whose state dicts then load.
        first, activation, last = self.layers
        return last(activation(constrain(first(x), "batch", "tokens", "hidden")))


class GatedFeedForward(nnx.Module):
    """`W_down(activation(W_gate(x)) * W_up(x))`.

    This is SwiGLU with `"silu"` (Llama), and GeGLU with a GELU (Gemma).

    Args:
        d_model: width of input and output.
        d_hidden: width in between; None is `4 * d_model`.
        activation: `"silu"`, `"gelu_tanh"`, `"gelu_exact"` or `"relu"`.
        bias: whether the three layers have a bias.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if a width is not positive, the activation is unknown, `rngs` is missing, or the
            input has another width.

    Example:
        >>> GatedFeedForward(3, 8, rngs=nnx.Rngs(0))(jnp.ones((5, 3))).shape
        (5, 3)

    References:
        Shazeer 2020 (arXiv:2002.05202).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_choice("activation", activation, tuple(ACTIVATIONS))
        numerics = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_positive(d_model=d_model, d_hidden=d_hidden)
        self.d_model, self.activation = d_model, ACTIVATIONS[activation]
        self.W_gate = Linear(d_model, d_hidden, bias, axes=("embed", "hidden"), **numerics)
        self.W_up = Linear(d_model, d_hidden, bias, axes=("embed", "hidden"), **numerics)
        self.W_down = Linear(d_hidden, d_model, bias, axes=("hidden", "embed"), **numerics)

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        gate, up = (
            constrain(layer(x), "batch", "tokens", "hidden") for layer in (self.W_gate, self.W_up)
        )
        return self.W_down(self.activation(gate) * up)
