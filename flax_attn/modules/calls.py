"""How attention modules are called, and what they return."""

from collections.abc import Callable
from typing import Any, TypedDict

from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from flax_attn.functional.cache_base import Cache
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.positions import RoPE, as_positions
from flax_attn.functional.shapes import ArrayLike
from flax_attn.modules.work import Work

Bias = Float[Array, "..."] | Callable[[Array, Array], Array]


# As a class, so that type checkers follow options that pass through several layers.
class CallOptions(TypedDict, total=False):
    """Keyword arguments of a call; `MultiHeadAttention.attend` describes them."""

    mask: Mask | Array | None
    bias: Bias | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Array | None


class Attention(nnx.Module):
    """The attention of a block: a base class.

    `MultiHeadAttention` derives from it, as can your own module that is called in the same way.

    Attributes:
        d_in: width of the input.
        d_out: width of the output.
        context_length: maximum length of the input; None is no limit.
        window: number of keys that a token attends to, and the least that the cache holds; None is
            all.
        rope: rotary positions; None where the module takes no `positions`.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Attention, FeedForward, Outputs, TransformerBlock
        >>> class FirstToken(Attention):
        ...     def __init__(self, width):
        ...         self.d_in = self.d_out = width
        ...     def attend(self, query, **options):
        ...         return Outputs(query[..., :1, :] + 0 * query)
        >>> block = TransformerBlock(FirstToken(4), FeedForward(4, rngs=nnx.Rngs(0)), None, None)
        >>> block(jnp.ones((2, 3, 4))).shape
        (2, 3, 4)
    """

    d_in: int
    d_out: int
    context_length: int | None = None
    window: int | None = None
    rope: RoPE | None = None
    dtype: Dtype | None = None

    def attend(
        self,
        query: Array,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Any = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Outputs[Any]:
        """Return the output with the weights and the new cache, if requested.

        The arguments are those of `MultiHeadAttention.attend`.
        """
        raise NotImplementedError

    def __call__(
        self,
        query: Array,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the output of `attend`, which describes the arguments."""
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(query, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> Cache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens.

        With `b` None it holds one sequence, without a batch axis.
        """
        raise NotImplementedError

    def work(self, t: int, s: int) -> Work:
        """Return the operations of a call of `t` queries and `s` keys, its projections included.

        Raises:
            ValueError: unless a subclass says it.
        """
        raise ValueError(
            f"a plan asks each attention for its operations; {type(self).__name__} does not say"
            " them. Define work(t, s), which returns a Work"
        )


def run_layer(
    layer: Any, *inputs: Any, cache: Any = None, return_weights: bool = False, **options: Any
) -> Outputs[Any]:
    """Return the outputs of an attention layer, a block or what is called like them.

    Where the output alone is requested it is a plain call: that is what hooks observe.
    """
    requested: dict[str, Any] = {}
    # Named only where requested: a layer need not know both.
    if cache is not None:
        requested["cache"] = cache
    if return_weights:
        requested["return_weights"] = True
    if not requested:
        return Outputs(layer(*inputs, **options))
    return layer.attend(*inputs, **requested, **options)


def check_self_attention(
    rope: RoPE | None,
    query: Array,
    key: Array | None,
    positions: ArrayLike | None,
    cache: Cache | None,
) -> None:
    """Raise where positions have no rope, or where there is a key beside rope or a cache."""
    # Else they would be dropped without a word.
    if rope is None and positions is not None:
        raise ValueError(
            "positions are for rope; got positions, rope=None. Construct the module with"
            " rope=RoPE()"
        )
    # A key of another sequence has positions of its own, which no argument gives.
    if rope is not None and key is not None:
        raise ValueError(
            "rope rotates queries and keys by the positions of one sequence, in self-attention;"
            f" got a key of shape {key.shape}. Leave it out, or construct the module with rope=None"
        )
    if cache is not None and key is not None:
        raise ValueError(
            "a cache holds the keys and values of one sequence, in self-attention; got a key of"
            f" shape {key.shape}. Leave out the key, or the cache"
        )
    if positions is not None:
        as_positions(positions, query.shape[:-1])
