"""What decoder-only language models share: tokens in, blocks, a norm, and logits of the next token out."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_ref.functional.cache import KVCache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import LayerNorm, RMSNorm

Cache = tuple[KVCache, ...]


class LanguageModel(nn.Module):
    """A decoder-only language model; a base class, see `GPT2` and `Llama`.

        logits = head(final_norm(block_L(... block_1(embed(tokens)))))

    A model defines `embed` and, in its constructor, `tok_emb`, `trf_blocks`, `final_norm`, and `out_head`, which is
    None where the head is tied to `tok_emb`.
    """

    config: Any
    tok_emb: Embedding
    trf_blocks: Any  # a ModuleList of TransformerBlock
    final_norm: LayerNorm | RMSNorm
    out_head: Linear | None
    remat: bool

    def embed(self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None) -> Tokens:
        """Return the vectors of tokens that stand at these positions."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """How many keys in all a token sees; None is all."""
        return self.trf_blocks[0].att.window

    def block_options(self, positions: ArrayLike | None) -> dict[str, Any]:
        """Return what positions mean to the blocks."""
        return {}

    def forward(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:
        """Return the logits `(b, t, vocab_size)` of the token after each, followed by the cache if there is one.

        Args:
            tokens: `(b, t)` or `(t,)`.
            mask: hides more than causality does, such as `Mask.segments(ids)` for packed documents. Under a cache it
                is that of the whole sequence, the same in every call.
            positions: integers `(t,)` or `(b, t)`; None is the order of the tokens.
            lengths: how many tokens of each row are real, `(b,)`; what follows is padding. None is all.
            cache: keys and values of what came before, from `init_cache`; the new ones are stored behind them.
            dropout_key: decides what is dropped in train mode; None draws keys from torch's generator.

        Raises:
            ValueError: if tokens or positions lie outside their tables, there are more than `context_length` of them,
                mask or positions do not fit, or the cache is full.
        """
        options = {"mask": mask, "positions": positions, "lengths": lengths, "dropout_key": dropout_key}
        if cache is None:
            return self.logits(self.hidden(tokens, **options))
        hidden, cache = self.hidden(tokens, cache=cache, **options)
        return self.logits(hidden), cache

    def hidden(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:
        """Return what the head reads, `(b, t, d_model)`; arguments, and the cache behind it, are those of a call."""
        t = tokens.shape[-1]
        places = torch.arange(t, device=tokens.device) if cache is None else cache[0].positions(t, lengths)
        x = self.embed(tokens, places if positions is None else torch.as_tensor(positions), fold_in(dropout_key, 0))
        options = {"mask": mask, "lengths": lengths, **self.block_options(positions)}
        caches = []
        for i, block in enumerate(self.trf_blocks):
            key = fold_in(dropout_key, 1 + i)
            if cache is not None:
                x, held = block(x, cache=cache[i], dropout_key=key, **options)
                caches.append(held)
            elif self.remat:
                x = checkpoint(block, x, dropout_key=key, use_reentrant=False, **options)
            else:
                x = block(x, dropout_key=key, **options)
        x = self.final_norm(x)
        return x if cache is None else (x, tuple(caches))

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        return self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens; b None is one without a batch axis.

        Example:
            >>> import torch
            >>> from torch_ref.models import GPT2, GPT2Config
            >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11)).eval()
            >>> logits, cache = model(torch.ones((4, 5), dtype=torch.long), cache=model.init_cache(4, 8))
            >>> logits, cache = model(torch.ones((4, 1), dtype=torch.long), cache=cache)
            >>> logits.shape, cache[0].length.tolist()
            (torch.Size([4, 1, 11]), [6, 6, 6, 6])
        """
        return tuple(block.init_cache(b, capacity, dtype) for block in self.trf_blocks)


def initialise(model: LanguageModel) -> None:
    """Draw the parameters of a model as GPT-2's were.

    Weights and tables are normal with a deviation of 0.02, that of the last layer on each residual path divided by
    `sqrt(2 * num_layers)`; biases are 0. Norms keep 1 and 0.

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    for name, param in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(param)
        elif name.endswith(".weight"):
            std = 0.02 * (2 * len(model.trf_blocks)) ** -0.5 if _ends_a_residual_path(name) else 0.02
            nn.init.normal_(param, std=std)


def _ends_a_residual_path(name: str) -> bool:
    return name.endswith(("out_proj.weight", "W_down.weight", "layers.2.weight"))
