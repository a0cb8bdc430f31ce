"""What decoder-only language models share: tokens in, blocks, a norm, and logits of the next token out."""

from __future__ import annotations

from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float, Integer

from flax_attn.functional.cache import KVCache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import LayerNorm, RMSNorm

Cache = tuple[KVCache, ...]


class LanguageModel(nnx.Module):
    """A decoder-only language model; a base class, see `GPT2` and `Llama`.

        logits = head(final_norm(block_L(... block_1(embed(tokens)))))

    A model defines `embed` and, in its constructor, `tok_emb`, `trf_blocks`, `final_norm`, and `out_head`, which is
    None where the head is tied to `tok_emb`.
    """

    config: Any
    tok_emb: Embedding
    trf_blocks: nnx.List[TransformerBlock]
    final_norm: LayerNorm | RMSNorm
    out_head: Linear | None
    remat: bool

    def embed(self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None) -> Tokens:
        """Return the vectors of tokens that stand at these positions."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """How many keys in all a token sees; None is all."""
        return self.trf_blocks[0].att.window

    def block_options(self, positions: ArrayLike | None) -> dict[str, Any]:
        """Return what positions mean to the blocks."""
        return {}

    def __call__(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Return the logits `(b, t, vocab_size)` of the token after each, followed by the cache if there is one.

        Args:
            tokens: `(b, t)` or `(t,)`.
            mask: hides more than causality does, such as `Mask.segments(ids)` for packed documents. Under a cache it
                is that of the whole sequence, the same in every call.
            positions: integers `(t,)` or `(b, t)`; None is the order of the tokens.
            lengths: how many tokens of each row are real, `(b,)`; what follows is padding. None is all.
            cache: keys and values of what came before, from `init_cache`; the new ones are stored behind them.
            dropout_key: decides what is dropped in train mode; None draws keys from the `dropout` streams.

        Raises:
            ValueError: if tokens or positions lie outside their tables, there are more than `context_length` of them,
                mask or positions do not fit, or the cache is full. Where values are traced the row becomes NaN.
        """
        options = {"mask": mask, "positions": positions, "lengths": lengths, "dropout_key": dropout_key}
        if cache is None:
            return self.logits(self.hidden(tokens, **options))
        hidden, cache = self.hidden(tokens, cache=cache, **options)
        return self.logits(hidden), cache

    def hidden(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: Cache | None = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Return what the head reads, `(b, t, d_model)`; arguments, and the cache behind it, are those of a call."""
        t = tokens.shape[-1]
        places = jnp.arange(t) if cache is None else cache[0].positions(t, lengths)
        x = self.embed(tokens, places if positions is None else jnp.asarray(positions), fold_in(dropout_key, 0))
        options = {"mask": mask, "lengths": lengths, **self.block_options(positions)}
        caches = []
        for i, block in enumerate(self.trf_blocks):
            key = fold_in(dropout_key, 1 + i)
            if cache is not None:
                x, held = block(x, cache=cache[i], dropout_key=key, **options)
                caches.append(held)
            elif self.remat:
                x = nnx.remat(lambda block, x, key: block(x, dropout_key=key, **options))(block, x, key)
            else:
                x = block(x, dropout_key=key, **options)
        x = self.final_norm(x)
        return x if cache is None else (x, tuple(caches))

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        return self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> Cache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens; b None is one without a batch axis.

        Example:
            >>> from flax_attn.models import GPT2, GPT2Config
            >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
            >>> logits, cache = model(jnp.ones((4, 5), int), cache=model.init_cache(4, 8))
            >>> logits, cache = model(jnp.ones((4, 1), int), cache=cache)
            >>> logits.shape, cache[0].length.tolist()
            ((4, 1, 11), [6, 6, 6, 6])
        """
        return tuple(block.init_cache(b, capacity, dtype) for block in self.trf_blocks)

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], **options: Any) -> LanguageModel:
        """Return the model of a local Hugging Face folder, in eval mode: see `flax_attn.models.pretrained`."""
        from flax_attn.models.pretrained import from_pretrained

        return from_pretrained(cls, path, **options)

    def save_pretrained(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a Hugging Face folder that transformers loads: see `flax_attn.models.pretrained`."""
        from flax_attn.models.pretrained import save_pretrained

        save_pretrained(self, path, **options)


def initialise(model: LanguageModel, rngs: nnx.Rngs) -> None:
    """Draw the parameters of a model as GPT-2's were.

    Kernels and tables are normal with a deviation of 0.02, that of the last layer on each residual path divided by
    `sqrt(2 * num_layers)`; biases are 0. Norms keep 1 and 0.

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    for path, param in nnx.iter_graph(model):
        if not isinstance(param, nnx.Param):
            continue
        if path[-1] == "bias":
            param.set_value(jnp.zeros_like(param[...]))
        elif path[-1] in ("kernel", "embedding"):
            std = 0.02 * (2 * len(model.trf_blocks)) ** -0.5 if _ends_a_residual_path(path) else 0.02
            param.set_value(std * jax.random.normal(rngs.params(), param.shape, param.dtype))


def _ends_a_residual_path(path: tuple) -> bool:
    return path[-2] in ("out_proj", "W_down") or path[-3:-1] == ("layers", 2)
