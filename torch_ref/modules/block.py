"""The transformer block: attention and feed-forward layers with norms and residuals."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from attn_spec.checks import check_tokens, check_type
from attn_spec.module_checks import check_block_norms, check_block_widths, check_parts
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.calls import Attention, Bias, CallOptions, run_layer
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.typed import TypedModule

# A part of a block, from tokens to tokens.
_Part = nn.Module


class TransformerBlock(TypedModule):
    """Attention, then feed-forward, each with a residual connection.

        norm_first:  x = x + drop(post_norm1(att(norm1(x))))
                     x = x + drop(post_norm2(ff(norm2(x))))
        otherwise:   x = norm1(x + drop(att(x)))
                     x = norm2(x + drop(ff(x)))

    GPT-2 and Llama have `norm1` and `norm2` alone, Gemma 2 all four norms, OLMo 2 the post norms
    alone; the paper of 2017 and BERT are `norm_first=False`. A norm that is None is left out.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept; the weights are `(n, t, t)` or `(b, n, t, t)`.

    Example:
        >>> import torch
        >>> from torch_ref import FeedForward, LayerNorm, MultiHeadAttention
        >>> att = MultiHeadAttention(6, 6, num_heads=2)
        >>> block = TransformerBlock(att, FeedForward(6), LayerNorm(6), LayerNorm(6))
        >>> block(torch.ones((4, 5, 6))).shape
        torch.Size([4, 5, 6])
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
        super().__init__()
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
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Cache]:
        """Return the tokens with the weights and the new cache, if requested.

        The arguments are those of `MultiHeadAttention.attend`. Children 0, 1 and 2 of `dropout_key`
        decide what is dropped of the attention weights, the attention output and the feed-forward
        output.
        """
        check_tokens("x", x, "d_model", self.att.d_in, self.att.context_length)
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

    def forward(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens; `attend` describes the arguments."""
        options: CallOptions = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(x, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache of the attention, see `MultiHeadAttention.init_cache`."""
        return self.att.init_cache(b, capacity, dtype)

    def _before(self, norm: _Part | None, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first and norm is not None else x

    def _add(
        self, x: Tensor, y: Tensor, norm: _Part | None, post_norm: _Part | None, key: Tensor | None
    ) -> Tensor:
        y = y if post_norm is None else post_norm(y)
        y = y if self.drop_shortcut is None else self.drop_shortcut(y, dropout_key=key)
        # Post-norm is that of the first Transformer: the shortcut is normed as well.
        return x + y if self.norm_first or norm is None else norm(x + y)
