"""The decoder block that attends to the output of an encoder."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from attn_spec.checks import check_type
from attn_spec.module_checks import check_block_widths, check_parts
from torch_ref.functional.cache import KVCache
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.calls import Attention, Bias, CallOptions, run_layer
from torch_ref.modules.cross_attention import CrossAttention
from torch_ref.modules.dropout import Dropout
from torch_ref.modules.typed import TypedModule

# A part of a block, from tokens to tokens.
_Part = nn.Module


class CrossBlock(TypedModule):
    """A decoder block that attends to the output of an encoder.

        norm_first:  x = x + drop(att(norm1(x)))
                     x = x + drop(cross(norm2(x), kept))
                     x = x + drop(ff(norm3(x)))
        otherwise:   x = norm1(x + drop(att(x)))
                     x = norm2(x + drop(cross(x, kept)))
                     x = norm3(x + drop(ff(x)))

    T5 and Whisper have the norms before the layers; the paper of 2017 and, by default,
    `torch.nn.TransformerDecoderLayer` have them after the sums.

    Shapes:
        `(t, d_model)` or `(b, t, d_model)`, kept.

    Example:
        >>> from torch_ref import FeedForward, LayerNorm, MultiHeadAttention
        >>> att = MultiHeadAttention(6, 6, num_heads=2)
        >>> cross = CrossAttention(6, 4, num_heads=2)
        >>> norms = [LayerNorm(6) for _ in range(3)]
        >>> block = CrossBlock(att, cross, FeedForward(6), *norms)
        >>> block(torch.ones((4, 5, 6)), cross.keep(torch.ones((4, 7, 4)))).shape
        torch.Size([4, 5, 6])
    """

    def __init__(
        self,
        att: Attention,
        cross: CrossAttention,
        ff: _Part,
        norm1: _Part,
        norm2: _Part,
        norm3: _Part,
        *,
        norm_first: bool = True,
        drop_shortcut: Dropout | None = None,
    ):
        super().__init__()
        check_type("att", att, Attention, "att=MultiHeadAttention(...)")
        # By class: its keys and values are made once, by `keep`, and passed to every step.
        check_type("cross", cross, CrossAttention, "cross=CrossAttention(...)")
        check_type(
            "drop_shortcut", drop_shortcut, Dropout | None, "drop_shortcut=Dropout(...), or None"
        )
        parts = {"ff": ff, "norm1": norm1, "norm2": norm2, "norm3": norm3}
        check_parts(**parts)
        # What states no width, such as a function, is not checked.
        widths = {name: getattr(part, "d_model", None) for name, part in parts.items()}
        check_block_widths(att.d_in, {"d_out": att.d_out}, widths | {"cross": cross.d_in})
        self.norm_first = norm_first
        self.att, self.cross, self.ff = att, cross, ff
        self.norm1, self.norm2, self.norm3 = norm1, norm2, norm3
        self.drop_shortcut = drop_shortcut

    def attend(
        self,
        x: Tokens,
        kept: KVCache,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Cache]:
        """Return the tokens, with the new cache if there is a cache.

        `kept` is what `cross.keep` returned; the other arguments are those of the self-attention.
        Children 0 to 4 of `dropout_key` decide what is dropped: of the weights and the output of
        either attention, and of the feed-forward layer's output.
        """
        # One for each place where numbers are dropped: equal keys would drop equal places.
        keys = [fold_in(dropout_key, i) for i in range(5)]
        normed = self._before(self.norm1, x)
        attended = run_layer(
            self.att,
            normed,
            mask=mask,
            bias=bias,
            positions=positions,
            lengths=lengths,
            cache=cache,
            dropout_key=keys[0],
        )
        x = self._add(x, attended.output, self.norm1, keys[1])
        normed = self._before(self.norm2, x)
        crossed = self.cross(normed, kept, dropout_key=keys[2])
        x = self._add(x, crossed, self.norm2, keys[3])
        normed = self._before(self.norm3, x)
        x = self._add(x, self.ff(normed), self.norm3, keys[4])
        return replace(attended, output=x)

    def forward(
        self,
        x: Tokens,
        kept: KVCache,
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
        return self.attend(x, kept, **options).output

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache of the self-attention, see `MultiHeadAttention.init_cache`."""
        return self.att.init_cache(b, capacity, dtype)

    def _before(self, norm: _Part, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first else x

    def _add(self, x: Tensor, y: Tensor, norm: _Part, key: Tensor | None) -> Tensor:
        y = y if self.drop_shortcut is None else self.drop_shortcut(y, dropout_key=key)
        return x + y if self.norm_first else norm(x + y)
