"""The short convolution of a recurrent attention, and its activation."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float

from attn_spec.checks import check_positive
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.functional.short_convolution import Convolved, short_convolution
from flax_attn.modules.feed_forward import ACTIVATIONS
from flax_attn.modules.initialisation import check_dtypes, next_key, redrawn, uniform
from flax_attn.sharding.parameters import named


class ShortConvolution(nnx.Module):
    """`silu(short_convolution(x, kernel))`: causal, each feature for itself.

    Args:
        d_model: width of the input.
        kernel_size: number of tokens that an output is computed from, its own included.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        axes: names of the axes of the kernel, by which a mesh splits them.
        unit: how many elements along each axis of the kernel stay on one device, such as those of a
            head.
        rngs: random streams; the kernel is drawn from `params`, with the distribution of
            `torch.nn.Conv1d`.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; kernel `(kernel_size, d_model)`.

    Raises:
        ValueError: if a size is not positive, or the input or the state has another shape.

    Example:
        >>> convolution = ShortConvolution(3, 4, rngs=nnx.Rngs(0))
        >>> output, state = convolution(jnp.ones((2, 5, 3)))
        >>> output.shape, state.shape
        ((2, 5, 3), (2, 3, 3))
    """

    def __init__(
        self,
        d_model: int,
        kernel_size: int = 4,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        axes: tuple[str | None, str | None] = (None, None),
        unit: tuple[int, int] = (1, 1),
        rngs: nnx.Rngs,
    ):
        check_positive(d_model=d_model, kernel_size=kernel_size)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        self.d_model, self.kernel_size = d_model, kernel_size
        self.dtype = dtype
        # A feature sees `kernel_size` numbers, as in a depthwise convolution of PyTorch.
        draw = redrawn(uniform(kernel_size))
        key = next_key(rngs.params)
        kernel = draw(key, (kernel_size, d_model), param_dtype)
        metadata = named(*axes, unit=unit)
        self.kernel = nnx.Param(kernel, **metadata)

    def __call__(
        self,
        x: Tokens,
        state: Float[Array, "*b before d"] | None = None,
        *,
        starts: Bool[Array, "*b t"] | None = None,
        lengths: ArrayLike | int | None = None,
    ) -> Convolved:
        """Return the output and the inputs that the next tokens need; see `short_convolution`."""
        kernel = self.kernel[...]
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        x = x.astype(dtype)
        kernel = kernel.astype(dtype)
        # The state is what decoding needs: the last inputs before the next token.
        output, state = short_convolution(x, kernel, state, starts=starts, lengths=lengths)
        return Convolved(ACTIVATIONS["silu"](output), state)
