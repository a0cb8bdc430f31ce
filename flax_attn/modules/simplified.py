"""Self-attention without parameters: the idea alone."""

from flax import nnx
from jaxtyping import Array

from attn_spec.checks import check_tokens
from flax_attn.attention import attend_one_head
from flax_attn.backends.registry import check_backend
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import Tokens


class SimplifiedSelfAttention(nnx.Module):
    """`softmax(x x^T) x`: no parameters, no scaling.

    Args:
        backend: name of an attention backend, or `"auto"`.
        rngs: not used; accepted so that every variant is built alike.

    Shapes:
        `(t, d)` or `(b, t, d)`, kept; the weights are `(t, t)` or `(b, t, t)`.

    Raises:
        ValueError: if the backend is unknown; in the call, if the input has another rank.

    Example:
        >>> import jax.numpy as jnp
        >>> print((100 * SimplifiedSelfAttention()(jnp.eye(2))).astype(int))
        [[73 26]
         [26 73]]
    """

    def __init__(self, *, backend: str = "auto", rngs: nnx.Rngs | None = None):
        del rngs
        check_backend(backend)
        self.backend = backend

    def attend(self, x: Tokens, *, return_weights: bool = False) -> Outputs[Cache]:
        """Return the context vectors, with the weights if `return_weights`."""
        # Any width does, so that only the rank is checked.
        check_tokens("x", x, "d", x.shape[-1], None)
        return attend_one_head(
            # The idea alone is not scaled; the default would divide by the square root of the
            # width.
            x,
            x,
            x,
            scale=1.0,
            backend=self.backend,
            return_weights=return_weights,
        )

    def __call__(self, x: Tokens) -> Array:
        """Return the context vectors."""
        return self.attend(x).output
