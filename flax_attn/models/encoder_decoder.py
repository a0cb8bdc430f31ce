"""The base of encoder-decoders: a decoder attends to the kept keys and values of an encoder."""

from __future__ import annotations

from typing import (
    Any,
    Generic,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.cache_checks import check_caches
from flax_attn.functional.cache import KVCache
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.initialise import draw
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.stack import Stack, cached_positions, init_caches, run_blocks
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.calls import Bias
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.initialisation import drawn_once
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import LayerNorm, RMSNorm
from flax_attn.sharding.axes import RESIDUAL, TOKENS, constrain
from flax_attn.sharding.zigzag_inputs import arranged, without_arranged_padding


class DecodeOptions(TypedDict, total=False):
    """The keywords of `EncoderDecoder.hidden` that do not change what it returns."""

    lengths: ArrayLike | int | None
    dropout_key: Array | None


Caches = tuple[Cache, ...]  # one for each layer of the decoder
Kept = tuple[KVCache, ...]


@runtime_checkable
class EncoderDecoderConfig(Protocol):
    """The sizes that the config of every encoder-decoder has."""

    @property
    def d_model(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_decoder_layers(self) -> int: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def start_token(self) -> int: ...


C = TypeVar("C", bound=EncoderDecoderConfig)


class EncoderDecoder(Pretrained, Generic[C]):
    """An encoder, and a decoder that attends to it; a base class, see `T5` and `Whisper`.

        encoded = enc_norm(enc_blocks(embed_inputs(inputs)))
        logits = head(final_norm(dec_blocks(embed(tokens), encoded)))

    A family defines `create_embeddings`, `encoder_block`, `decoder_block`, `norm`, `embed_inputs`
    and `embed`. Where it is decoded in steps, the keys and values of what was encoded are computed
    once, by `keep`:

        kept = model.keep(model.encode(inputs))
        hidden, cache = model.hidden(tokens, kept, cache=model.init_cache(b, capacity))

    Args:
        config: the sizes.
        backend: attention backend; `"auto"` or the name of one.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        scan_layers: whether the parameters of the blocks are stacked, and the blocks run by one
            scan: compiled once.
        dtype: dtype of the computation; None is that of the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, keys of dropout from `dropout`.

    Shapes:
        inputs `(b, s)`, or those of the family, and tokens `(b, t)`, to logits
        `(b, t, vocab_size)`.
    """

    config: C
    tok_emb: Embedding
    enc_blocks: nnx.List[TransformerBlock] | Stack
    dec_blocks: nnx.List[CrossBlock] | Stack
    enc_norm: LayerNorm | RMSNorm
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
        numerics = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        products = {"precision": precision, **numerics}
        self.config, self.remat = config, remat
        with drawn_once(self):
            self.create_embeddings(**products)
            layers = range(config.num_layers)
            self.enc_blocks = nnx.List(self.encoder_block(i, backend, **products) for i in layers)
            self.enc_norm = self.norm(**numerics)
            layers = range(config.num_decoder_layers)
            self.dec_blocks = nnx.List(self.decoder_block(i, backend, **products) for i in layers)
            self.final_norm = self.norm(**numerics)
            products["axes"] = ("embed", "vocab")
            sizes = config.d_model, config.vocab_size
            self.out_head = None if config.tied else Linear(*sizes, bias=False, **products)
            self.initialise(rngs)
        if scan_layers:
            self.enc_blocks, self.dec_blocks = Stack(self.enc_blocks), Stack(self.dec_blocks)

    def create_embeddings(self, **numerics: Any) -> None:
        """Set `tok_emb`, and what else `embed_inputs` and `embed` read."""
        self.tok_emb = Embedding(self.config.vocab_size, self.config.d_model, **numerics)

    def encoder_block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return a block of the encoder, the first layer being 0."""
        raise NotImplementedError

    def decoder_block(self, layer: int, backend: str, **numerics: Any) -> CrossBlock:
        """Return a block of the decoder, the first layer being 0."""
        raise NotImplementedError

    def norm(self, **numerics: Any) -> LayerNorm | RMSNorm:
        """Return a norm of the family."""
        raise NotImplementedError

    def initialise(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters, see `draw`."""
        draw(self, rngs)

    def embed_inputs(self, inputs: Array, dropout_key: Array | None) -> Tokens:
        """Return the vectors of what is encoded."""
        raise NotImplementedError

    def embed(
        self, tokens: Integer[Array, "*b t"], positions: Array, dropout_key: Array | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens at these positions."""
        raise NotImplementedError

    def biases(self) -> tuple[Bias | None, Bias | None]:
        """Return the biases of the self-attention scores, of the encoder and of the decoder."""
        return None, None

    def encode(
        self,
        inputs: Array,
        *,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Tokens:
        """Return the output of the encoder; the first `lengths` inputs of each row are real."""
        key = fold_in(dropout_key, 0)
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            inputs = without_arranged_padding(inputs, inputs.shape, lengths)
        x, options = (
            self.embed_inputs(inputs, fold_in(key, 0)),
            {"lengths": lengths, "bias": self.biases()[0]},
        )
        x, _ = run_blocks(
            self.enc_blocks,
            constrain(x, *RESIDUAL),
            None,
            key,
            self.remat,
            positions=None,
            **options,
        )
        return constrain(self.enc_norm(x), *TOKENS)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None = None) -> Kept:
        """Return the keys and values of the encoder's output, for each layer of the decoder.

        Those of stacked layers are one.
        """
        if not isinstance(self.dec_blocks, Stack):
            return tuple(block.cross.keep(encoded, lengths) for block in self.dec_blocks)
        parts = [nnx.split(cast(CrossBlock, block).cross) for block in self.dec_blocks.blocks]
        return tuple(
            jax.lax.map(
                lambda state, graph=graph: nnx.merge(graph, state).keep(encoded, lengths), state
            )
            for graph, state in parts
        )

    @overload
    def hidden(
        self,
        tokens: Integer[Array, "*b t"],
        kept: Kept,
        *,
        cache: None = None,
        **options: Unpack[DecodeOptions],
    ) -> Tokens: ...
    @overload
    def hidden(
        self,
        tokens: Integer[Array, "*b t"],
        kept: Kept,
        *,
        cache: Caches,
        **options: Unpack[DecodeOptions],
    ) -> tuple[Tokens, Caches]: ...
    def hidden(
        self,
        tokens: Integer[Array, "*b t"],
        kept: Kept,
        *,
        cache: Caches | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Tokens | tuple[Tokens, Caches]:
        """Return the input of the head, `(b, t, d_model)`, followed by the cache if one is given.

        Args:
            tokens: tokens of the decoder, `(b, t)` or `(t,)`.
            kept: keys and values that `keep` returned.
            cache: keys and values of the tokens before, from `init_cache`; the new ones are
                appended.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.
        """
        blocks = self.dec_blocks.blocks if isinstance(self.dec_blocks, Stack) else self.dec_blocks
        check_caches("kept", kept, len(blocks))
        t, key = tokens.shape[-1], fold_in(dropout_key, 1)
        order = (
            arranged(jnp.arange(t))
            if cache is None
            else cached_positions(self.dec_blocks, cache, t, lengths)
        )
        tokens = without_arranged_padding(tokens, tokens.shape, lengths)
        x, options = (
            self.embed(tokens, order, fold_in(key, 0)),
            {"lengths": lengths, "bias": self.biases()[1]},
        )
        each = [{"kept": one} for one in kept]
        x, cache = run_blocks(
            self.dec_blocks, constrain(x, *RESIDUAL), cache, key, self.remat, None, each, **options
        )
        x = constrain(self.final_norm(x), *TOKENS)
        return x if cache is None else (x, cache)

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        found = self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)
        return constrain(found, "batch", "tokens", "vocab")

    def __call__(
        self,
        inputs: Array,
        tokens: Integer[Array, "*b t"],
        *,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Return the logits `(b, t, vocab_size)` of the token after each of the decoder's.

        Args:
            inputs: inputs of the encoder.
            tokens: tokens of the decoder, `(b, t)` or `(t,)`; the first is the start token.
            lengths: number of real inputs of each row, `(b,)`; the rest is padding. None is all.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.
        """
        encoded = self.encode(inputs, lengths=lengths, dropout_key=dropout_key)
        return self.logits(
            self.hidden(tokens, self.keep(encoded, lengths), dropout_key=dropout_key)
        )

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> Caches:
        """Return an empty cache for `b` sequences of up to `capacity` tokens of the decoder."""
        return init_caches(self.dec_blocks, b, capacity, dtype)
