"""The base of decoder-only language models: embedding, blocks, norm and head."""

from dataclasses import replace
from math import prod
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import ModelConfig, check_config
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.positions import as_positions
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.blocks import Blocks
from flax_attn.models.initialise import draw
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.stack import Stack
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.initialisation import drawn_once
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import LayerNorm, RMSNorm
from flax_attn.modules.work import Work, work_of_parts
from flax_attn.sharding.axes import RESIDUAL, TOKENS, constrain
from flax_attn.sharding.zigzag_inputs import arranged_positions, without_arranged_padding

# One for each layer.
ModelCache = tuple[Cache, ...]


# As a class, so that type checkers follow options that pass through several methods.
class ModelOptions(TypedDict, total=False):
    """The keywords of a call; `LanguageModel.attend` describes them."""

    mask: Mask | Array | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Array | None


C = TypeVar("C", bound=ModelConfig)


class LanguageModel(Pretrained, Generic[C]):
    """A decoder-only language model; a base class, see `GPT2` and `Llama`.

        logits = head(final_norm(block_L(... block_1(embed(tokens)))))

    A family defines `block` and `norm`, and `embed` and `create_embeddings` where it has more than
    a table of tokens.

    Args:
        config: the sizes.
        backend: attention backend; `"auto"` or the name of one.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        scan_layers: whether the parameters of the blocks are stacked, and the blocks run by one
            scan: compiled once.
        dtype: dtype of the computation; None is that of the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params` as `initialise` says, keys of
            dropout from `dropout`.

    Shapes:
        tokens `(b, t)` or `(t,)` to logits `(b, t, vocab_size)` or `(t, vocab_size)`.

    Raises:
        ValueError: where its layers do.
    """

    config: C
    tok_emb: Embedding
    trf_blocks: Blocks | Stack
    final_norm: LayerNorm | RMSNorm
    out_head: Linear | None
    remat: bool

    def __init__(
        self,
        config: C,
        *,
        backend: str = "auto",
        remat: bool = False,
        scan_layers: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs,
    ):
        check_config(config, ModelConfig)
        numerics = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        products = {"precision": precision, **numerics}
        self.config = config
        self.remat = remat
        with drawn_once(self):
            self.create_embeddings(**products)
            layers = range(config.num_layers)
            self.trf_blocks = Blocks(self.block(i, backend, **products) for i in layers)
            self.final_norm = self.norm(**numerics)
            products["axes"] = ("embed", "vocab")
            sizes = config.d_model, config.vocab_size
            # Where it is tied, the table of tokens is the head: no second copy is held.
            self.out_head = None if config.tied else Linear(*sizes, bias=False, **products)
            initialise(self, rngs)
        if scan_layers:
            self.trf_blocks = Stack(self.trf_blocks)

    def create_embeddings(self, **numerics: Any) -> None:
        """Set `tok_emb`, and what else `embed` reads."""
        self.tok_emb = Embedding(self.config.vocab_size, self.config.d_model, **numerics)

    def block(
        self, layer: int, backend: str, *, precision: PrecisionLike = None, **numerics: Any
    ) -> TransformerBlock:
        """Return the block of a layer, the first being 0."""
        raise NotImplementedError

    def norm(self, **numerics: Any) -> LayerNorm | RMSNorm:
        """Return a norm of the family."""
        raise NotImplementedError

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of tokens at these positions."""
        return self.tok_emb(tokens)

    def attend(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: ModelCache | None = None,
        dropout_key: Array | None = None,
    ) -> Outputs[ModelCache]:
        """Return the logits `(b, t, vocab_size)` of the next tokens, and the cache if one is given.

        Args:
            tokens: token ids `(b, t)` or `(t,)`.
            mask: further mask besides causality, such as `Mask.segments(ids)` for packed documents.
                With a cache it is that of the whole sequence, the same in every call.
            positions: integer positions `(t,)` or `(b, t)`; None is the order of the tokens.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            cache: keys and values of the tokens before, from `init_cache`; the new ones are
                appended.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.

        Raises:
            ValueError: if there are more than `context_length` tokens, or mask, positions or cache
                do not fit. Values are not read: a token outside the vocabulary, or one that the
                cache has no space for, gives NaN.
        """
        options: ModelOptions = {
            "mask": mask,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        decoded = self.decode(tokens, cache=cache, **options)
        return replace(decoded, output=self.logits(decoded.output))

    def __call__(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the logits `(b, t, vocab_size)`; `attend` describes the arguments."""
        options: ModelOptions = {
            "mask": mask,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(tokens, **options).output

    def hidden(self, tokens: Integer[Array, "*b t"], **options: Unpack[ModelOptions]) -> Tokens:
        """Return the input of the head, `(b, t, d_model)`; the arguments are those of a call."""
        return self.decode(tokens, **options).output

    def decode(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: ModelCache | None = None,
        dropout_key: Array | None = None,
    ) -> Outputs[ModelCache]:
        """Return the input of the head, and the cache if one is given.

        The arguments are those of `attend`, which computes the logits of all tokens.
        """
        check_token_ids("tokens", tokens)
        t = tokens.shape[-1]
        tokens = without_arranged_padding(tokens, tokens.shape, lengths)
        tokens = constrain(tokens, "batch", "tokens")
        # Positions of padding could lie beyond a table, and are 0 then.
        if positions is None:
            positions = arranged_positions(t)
        else:
            positions = as_positions(positions, tuple(tokens.shape))
            positions = without_arranged_padding(positions, tokens.shape, lengths)
        if cache is None:
            order = jnp.arange(t)
        else:
            order = self.trf_blocks.positions(cache, tokens.shape, lengths)
        x = self.embed(tokens, order if positions is None else positions, fold_in(dropout_key, 0))
        x = constrain(x, *RESIDUAL)
        ran = self.trf_blocks.run(
            x,
            cache=cache,
            key=dropout_key,
            remat=self.remat,
            mask=mask,
            positions=positions,
            lengths=lengths,
        )
        return replace(ran, output=constrain(self.final_norm(ran.output), *TOKENS))

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        found = self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)
        return constrain(found, "batch", "tokens", "vocab")

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> ModelCache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens.

        If `b` is None, it has no batch axis. The cache of a layer with a window is a ring buffer,
        which holds the window at least. With `scan_layers` there is one cache for all layers, the
        first axis of its keys and values; where layers take turns, one for each of a turn.

        Example:
            >>> from flax_attn.models import GPT2, GPT2Config
            >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11), rngs=nnx.Rngs(0))
            >>> prompt = model.attend(jnp.ones((4, 5), int), cache=model.init_cache(4, 8))
            >>> step = model.attend(jnp.ones((4, 1), int), cache=prompt.cache)
            >>> step.output.shape, step.cache[0].length.tolist()
            ((4, 1, 11), [6, 6, 6, 6])
        """
        return self.trf_blocks.init_cache(b, capacity, dtype)

    def work(self, t: int, s: int) -> Work:
        """Return the operations of a call of `t` tokens behind a cache, `s` tokens in all."""
        found = work_of_parts(self, t, s)
        # The table is the head.
        if self.out_head is None:
            found += Work(2 * t * prod(self.tok_emb.embedding.shape))
        return found


def initialise(model: LanguageModel, rngs: nnx.Rngs) -> None:
    """Draw the parameters of a model as GPT-2's were.

    Kernels and tables are normal with a deviation of 0.02, that of the last layer on each residual
    path divided by `sqrt(2 * num_layers)`; biases are 0. Norms keep 1 and 0.

    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    # A model of embedding and head alone has none.
    layers = max(1, len(model.trf_blocks))
    # Each layer adds two terms to the residual path: their sum keeps its variance.
    last = 0.02 * (2 * layers) ** -0.5
    draw(model, rngs, lambda path: last if _ends_a_residual_path(path) else 0.02)


def _ends_a_residual_path(path: tuple) -> bool:
    return path[-2] in ("out_proj", "W_down") or path[-3:-1] == ("layers", 2)
