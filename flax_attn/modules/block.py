"""The transformer block: attention and feed-forward layers with norms and residuals."""

from collections.abc import Callable
from dataclasses import replace

from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array

from attn_spec.checks import check_tokens, check_type
from attn_spec.module_checks import check_block_norms, check_block_widths, check_parts
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.modules.calls import Attention, Bias, CallOptions, run_layer
from flax_attn.modules.dropout import Dropout
from flax_attn.sharding.axes import RESIDUAL, TOKENS, constrain

_Part = Callable[[Array], Array]


class TransformerBlock(nnx.Module):
    """Attention, then feed-forward, each with a residual connection.

        norm_first:  x = x + drop(post_norm1(att(norm1(x))))
                     x = x + drop(post_norm2(ff(norm2(x))))
        otherwise:   x = norm1(x + drop(att(x)))
                     x = norm2(x + drop(ff(x)))

    GPT-2 and Llama have `norm1` and `norm2` alone, Gemma 2 all four norms, OLMo 2 the post norms
    alone; the paper of 2017 and BERT are `norm_first=False`. A norm that is None is left out.

    Args:
        att: the attention, `d_model` wide at both ends: `MultiHeadAttention`, or what is called
            like it.
        ff: the feed-forward layer, or any other module from tokens to tokens.
        norm1: norm of the attention.
        norm2: norm of the feed-forward layer.
        norm_first: whether `norm1` and `norm2` come before the layers, or after the sums.
        post_norm1: norm of what the attention returns, with `norm_first`.
        post_norm2: norm of what the feed-forward layer returns, with `norm_first`.
        drop_shortcut: dropout of what either layer adds; None is no dropout.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; the weights are `(n, t, t)` or `(b, n, t, t)`.

    Raises:
        ValueError: if `att` or `drop_shortcut` is another kind of module, the parts differ in
            width, or a norm stands where `norm_first=False` has none; in the call, where the
            attention does.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import FeedForward, LayerNorm, MultiHeadAttention
        >>> rngs = nnx.Rngs(0)
        >>> att = MultiHeadAttention(6, 6, num_heads=2, rngs=rngs)
        >>> block = TransformerBlock(att, FeedForward(6, rngs=rngs), LayerNorm(6), LayerNorm(6))
        >>> block(jnp.ones((4, 5, 6))).shape
        (4, 5, 6)

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Xiong et al. 2020, norm before or after
        (arXiv:2002.04745); Gemma Team 2024, norms before and after (arXiv:2408.00118); OLMo Team
        2024 (arXiv:2501.00656).
    """

    def __init__(
        self,
        att: Attention,
        ff: _Part,
        norm1: _Part | None,
        norm2: _Part | None,
        *,
        norm_first: bool = True,
        post_norm1: _Part | None = None,
        post_norm2: _Part | None = None,
        drop_shortcut: Dropout | None = None,
    ):
        check_type("att", att, Attention, "att=MultiHeadAttention(...)")
        check_type(
            "drop_shortcut", drop_shortcut, Dropout | None, "drop_shortcut=Dropout(...), or None"
        )
        # A norm that `norm_first` never calls would be a parameter that nothing trains.
        check_block_norms(norm_first, norm1, norm2, post_norm1, post_norm2)
        parts = {
            "ff": ff,
            "norm1": norm1,
            "norm2": norm2,
            "post_norm1": post_norm1,
            "post_norm2": post_norm2,
        }
        check_parts(**parts)
        # What states no width, such as a function, is not checked.
        widths = {name: getattr(part, "d_model", None) for name, part in parts.items()}
        # kdim and vdim are the widths of the key and value inputs, if there are any.
        inputs = {name: getattr(att, name, att.d_in) for name in ("d_out", "kdim", "vdim")}
        check_block_widths(att.d_in, inputs, widths)
        self.norm_first = norm_first
        self.att, self.ff = att, ff
        self.norm1, self.norm2 = norm1, norm2
        self.post_norm1, self.post_norm2 = post_norm1, post_norm2
        self.drop_shortcut = drop_shortcut

    def attend(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        dropout_key: Array | None = None,
    ) -> Outputs[Cache]:
        """Return the tokens with the weights and the new cache, if requested.

        The arguments are those of `MultiHeadAttention.attend`. Children 0, 1 and 2 of `dropout_key`
        decide what is dropped of the attention weights, the attention output and the feed-forward
        output.
        """
        check_tokens("x", x, "d_model", self.att.d_in, self.att.context_length)
        x = x if self.att.dtype is None else x.astype(self.att.dtype)
        x = constrain(x, *RESIDUAL)
        # One for each place where numbers are dropped: equal keys would drop equal places.
        keys = [fold_in(dropout_key, i) for i in range(3)]
        attended = run_layer(
            self.att,
            self._before(self.norm1, x),
            mask=mask,
            bias=bias,
            positions=positions,
            lengths=lengths,
            cache=cache,
            return_weights=return_weights,
            dropout_key=keys[0],
        )
        x = self._add(x, attended.output, self.norm1, self.post_norm1, keys[1])
        x = self._add(x, self.ff(self._before(self.norm2, x)), self.norm2, self.post_norm2, keys[2])
        return replace(attended, output=x)

    def __call__(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the tokens; `attend` describes the arguments."""
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(x, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> Cache:
        """Return an empty cache of the attention, see `MultiHeadAttention.init_cache`."""
        return self.att.init_cache(b, capacity, dtype)

    def _before(self, norm: _Part | None, x: Array) -> Array:
        return constrain(norm(x) if self.norm_first and norm is not None else x, *TOKENS)

    def _add(
        self, x: Array, y: Array, norm: _Part | None, post_norm: _Part | None, key: Array | None
    ) -> Array:
        y = constrain(y, *RESIDUAL)
        y = y if post_norm is None else post_norm(y)
        y = y if self.drop_shortcut is None else self.drop_shortcut(y, dropout_key=key)
        # Post-norm is that of the first Transformer: the shortcut is normed as well.
        return x + y if self.norm_first or norm is None else norm(x + y)
