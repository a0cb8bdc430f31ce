"""The base of encoder-decoders: a decoder attends to the kept keys and values of an encoder."""

from dataclasses import replace
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.cache_checks import check_caches
from attn_spec.checks import shape_of
from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import EncoderDecoderConfig, check_config
from flax_attn.functional.cache import KVCache
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.outputs import Outputs
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.blocks import Blocks
from flax_attn.models.initialise import draw
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.stack import Stack
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.calls import Bias
from flax_attn.modules.cross_block import CrossBlock
from flax_attn.modules.embedding import Embedding
from flax_attn.modules.initialisation import drawn_once
from flax_attn.modules.linear import Linear
from flax_attn.modules.norm import LayerNorm, RMSNorm
from flax_attn.sharding.axes import RESIDUAL, TOKENS, constrain
from flax_attn.sharding.zigzag_inputs import arranged, without_arranged_padding


# As a class, so that type checkers follow options that pass through several methods.
class DecodeOptions(TypedDict, total=False):
    """The keywords of `EncoderDecoder.hidden`; `decode` describes them."""

    lengths: ArrayLike | int | None
    dropout_key: Array | None


# One for each layer of the decoder.
Caches = tuple[Cache, ...]
Kept = tuple[KVCache, ...]


C = TypeVar("C", bound=EncoderDecoderConfig)


class EncoderDecoder(Pretrained, Generic[C]):
    """An encoder, and a decoder that attends to it; a base class, see `T5` and `Whisper`.

        encoded = enc_norm(enc_blocks(embed_inputs(inputs)))
        logits = head(final_norm(dec_blocks(embed(tokens), encoded)))

    A family defines `create_embeddings`, `encoder_block`, `decoder_block`, `norm`, `embed_inputs`
    and `embed`. Where it is decoded in steps, the keys and values of what was encoded are computed
    once, by `keep`:

        kept = model.keep(model.encode(inputs))
        logits = model.attend(tokens, kept, cache=model.init_cache(b, capacity)).output

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

    Raises:
        ValueError: where its layers do.
    """

    config: C
    tok_emb: Embedding
    enc_blocks: Blocks | Stack
    dec_blocks: Blocks | Stack
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
        check_config(config, EncoderDecoderConfig)
        numerics = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        products = {"precision": precision, **numerics}
        self.config = config
        self.remat = remat
        with drawn_once(self):
            self.create_embeddings(**products)
            layers = range(config.num_layers)
            self.enc_blocks = Blocks(self.encoder_block(i, backend, **products) for i in layers)
            self.enc_norm = self.norm(**numerics)
            layers = range(config.num_decoder_layers)
            self.dec_blocks = Blocks(self.decoder_block(i, backend, **products) for i in layers)
            self.final_norm = self.norm(**numerics)
            products["axes"] = ("embed", "vocab")
            sizes = config.d_model, config.vocab_size
            # Where it is tied, the table of tokens is the head: no second copy is held.
            self.out_head = None if config.tied else Linear(*sizes, bias=False, **products)
            self.initialise(rngs)
        if scan_layers:
            self.enc_blocks = Stack(self.enc_blocks)
            self.dec_blocks = Stack(self.dec_blocks)

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
        shape = shape_of("inputs", inputs)
        # Encoder and decoder have keys of their own, and so has each place in them.
        key = fold_in(dropout_key, 0)
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            inputs = without_arranged_padding(inputs, shape, lengths)
        x = constrain(self.embed_inputs(inputs, fold_in(key, 0)), *RESIDUAL)
        ran = self.enc_blocks.run(
            x,
            cache=None,
            key=key,
            remat=self.remat,
            positions=None,
            lengths=lengths,
            bias=self.biases()[0],
        )
        return constrain(self.enc_norm(ran.output), *TOKENS)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None = None) -> Kept:
        """Return the keys and values of the encoder's output, for each layer of the decoder.

        Those of stacked layers are one.
        """
        # Once for a prompt: each step of decoding reads them again.
        return self.dec_blocks.keep(encoded, lengths)

    def attend(
        self,
        tokens: Integer[Array, "*b t"],
        kept: Kept,
        *,
        lengths: ArrayLike | int | None = None,
        cache: Caches | None = None,
        dropout_key: Array | None = None,
    ) -> Outputs[Caches]:
        """Return the logits of the decoder's next tokens, and the cache if one is given.

        The arguments are those of `decode`.
        """
        decoded = self.decode(tokens, kept, cache=cache, lengths=lengths, dropout_key=dropout_key)
        return replace(decoded, output=self.logits(decoded.output))

    def hidden(
        self, tokens: Integer[Array, "*b t"], kept: Kept, **options: Unpack[DecodeOptions]
    ) -> Tokens:
        """Return the input of the head, `(b, t, d_model)`; the arguments are those of `decode`."""
        return self.decode(tokens, kept, **options).output

    def decode(
        self,
        tokens: Integer[Array, "*b t"],
        kept: Kept,
        *,
        lengths: ArrayLike | int | None = None,
        cache: Caches | None = None,
        dropout_key: Array | None = None,
    ) -> Outputs[Caches]:
        """Return the input of the head, `(b, t, d_model)`, and the cache if one is given.

        Args:
            tokens: tokens of the decoder, `(b, t)` or `(t,)`.
            kept: keys and values that `keep` returned.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            cache: keys and values of the tokens before, from `init_cache`; the new ones are
                appended.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.
        """
        # A cache of another model would be read layer by layer without an error.
        check_caches("kept", kept, len(self.dec_blocks.blocks))
        check_token_ids("tokens", tokens)
        # The encoder has key 0.
        t, key = tokens.shape[-1], fold_in(dropout_key, 1)
        tokens = without_arranged_padding(tokens, tokens.shape, lengths)
        if cache is None:
            order = arranged(jnp.arange(t))
        else:
            order = self.dec_blocks.positions(cache, tokens.shape, lengths)
        x = constrain(self.embed(tokens, order, fold_in(key, 0)), *RESIDUAL)
        ran = self.dec_blocks.run(
            x,
            cache=cache,
            key=key,
            remat=self.remat,
            positions=None,
            # Each layer has keys and values of its own of the same encoder output.
            each=[{"kept": one} for one in kept],
            lengths=lengths,
            bias=self.biases()[1],
        )
        return replace(ran, output=constrain(self.final_norm(ran.output), *TOKENS))

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
        kept = self.keep(encoded, lengths)
        return self.logits(self.hidden(tokens, kept, dropout_key=dropout_key))

    def init_cache(self, b: int | None, capacity: int, dtype: Dtype | None = None) -> Caches:
        """Return an empty cache for `b` sequences of up to `capacity` tokens of the decoder."""
        return self.dec_blocks.init_cache(b, capacity, dtype)
