"""Dropout as a module, with its rate and a source of keys."""

from flax import nnx
from jaxtyping import Array

from attn_spec.checks import check_rate, check_tokens
from flax_attn.functional.dropout import KeyedDropout, drop, keep_grid
from flax_attn.functional.shapes import Tokens
from flax_attn.modules.initialisation import drawn_key, fork
from flax_attn.sharding.zigzag_inputs import arranged_dropout


class Dropout(nnx.Module):
    """Zero elements with probability `rate` and divide the rest by `1 - rate`.

    In eval mode, and at rate 0, it is the identity. It starts in train mode; `.train()` and
    `.eval()` switch it.

    Each call draws a new key from the `dropout` stream, unless it is given one. The same key drops
    the same elements here and in `torch_ref`.

    Args:
        rate: the probability that an element is dropped, in [0, 1).
        rngs: random streams; needed if rate > 0.

    Shapes:
        `(t, d)` or `(b, t, d)`, kept.

    Raises:
        ValueError: if `rate` lies outside [0, 1), or if there is no stream to draw keys from.
        TraceContextError: in a call, if a transform of JAX such as `jax.jit` captured the module:
            pass it to `nnx.jit` as an argument.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> Dropout(0.5, rngs=nnx.Rngs(0))(jnp.ones((2, 6)), dropout_key=jax.random.key(0))
        Array([[2., 0., 2., 2., 0., 0.],
               [0., 2., 0., 2., 0., 0.]], dtype=float32)
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs | None = None):
        check_rate(rate)
        if rate > 0 and (rngs is None or not ("dropout" in rngs or "default" in rngs)):
            raise ValueError(
                f"dropout={rate} needs a random stream to draw keys from; got none. "
                "Pass rngs=nnx.Rngs(0) or rngs=nnx.Rngs(params=0, dropout=1)"
            )
        self.rate = rate
        self.deterministic = False
        # A stream of its own: layers that are added later change no numbers of this one.
        stream = fork(rngs.dropout) if rngs is not None and rate > 0 else None
        self.stream = nnx.data(stream)

    def keyed(self, dropout_key: Array | None = None) -> KeyedDropout | None:
        """Return the dropout of this call, or None where nothing is dropped."""
        if self.deterministic or self.stream is None:
            return None
        key = drawn_key(self.stream, self.rate) if dropout_key is None else dropout_key
        return KeyedDropout(self.rate, key)

    def __call__(self, x: Tokens, *, dropout_key: Array | None = None) -> Tokens:
        dropout = self.keyed(dropout_key)
        if dropout is None:
            return x
        check_tokens("x", x, "d", x.shape[-1], None)
        # The same places as of weights `(b, n, t, s)`: features stand for keys, and one head for n.
        *batch, t, d = x.shape
        b = batch[0] if batch else 1
        dropout = arranged_dropout(dropout, t)
        keep = keep_grid(dropout, (b, 1, t, d))
        return drop(x, keep.reshape(x.shape), self.rate)
