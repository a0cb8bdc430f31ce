"""Gemma 2."""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from attn_spec.models.gemma2 import Gemma2Config
from attn_spec.scores import Scores
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.models.gemma import Gemma
from torch_ref.modules.multi_head import MultiHeadAttention

C = TypeVar("C", bound=Gemma2Config)


class Gemma2(Gemma[C]):
    """Gemma 2: a Gemma with more norms, capped scores and logits, and windows in turn.

        logits = logit_cap * tanh(head(final_norm(x)) / logit_cap)

    There are norms before and after the sublayers. Arguments and errors are those of
    `LanguageModel`.

    Example:
        >>> import torch
        >>> config = Gemma2Config(
        ...     8, 12, 4, 2, 1, context_length=16, vocab_size=11, window=3, full_layers=(1,))
        >>> Gemma2(config)(torch.ones((3, 5), dtype=torch.long)).shape
        torch.Size([3, 5, 11])
    """

    def attention(self, layer: int, **options: Any) -> MultiHeadAttention:
        """Return the attention of a layer, its scores scaled and capped."""
        config = self.config
        # The scale is an argument of its own, and not always that of a head's width.
        scores = Scores(scale=config.query_pre_attn_scalar**-0.5, soft_cap=config.score_cap)
        return super().attention(layer, scores=scores, **options)

    def block_norms(self) -> dict[str, Any]:
        """Return the norms of a block, before and after both of its parts."""
        names = "norm1", "norm2", "post_norm1", "post_norm2"
        return {name: self.norm() for name in names}

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocab"]:
        """Return the logits of what `hidden` returned, capped in at least float32."""
        cap = self.config.logit_cap
        found = super().logits(hidden)
        # Gemma 3, which extends this family, has no caps.
        if cap is None:
            return found
        wide = found.to(accumulation_dtype(found.dtype))
        capped = cap * torch.tanh(wide / cap)
        return capped.to(found.dtype)
