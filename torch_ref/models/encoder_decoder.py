"""The base of encoder-decoders: a decoder attends to the kept keys and values of an encoder."""

from dataclasses import replace
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.cache_checks import check_caches
from attn_spec.checks import shape_of
from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import EncoderDecoderConfig, check_config
from torch_ref.functional.cache import KVCache
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.padding import without_padding
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.blocks import Blocks
from torch_ref.models.initialise import draw
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.calls import Bias
from torch_ref.modules.cross_block import CrossBlock
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import LayerNorm, RMSNorm
from torch_ref.modules.typed import TypedModule


# As a class, so that type checkers follow options that pass through several methods.
class DecodeOptions(TypedDict, total=False):
    """The keywords of `EncoderDecoder.hidden`; `decode` describes them."""

    lengths: ArrayLike | int | None
    dropout_key: Tensor | None


# One for each layer of the decoder.
Caches = tuple[Cache, ...]
Kept = tuple[KVCache, ...]


C = TypeVar("C", bound=EncoderDecoderConfig)


class EncoderDecoder(TypedModule, Generic[C]):
    """An encoder, and a decoder that attends to it; a base class, see `T5` and `Whisper`.

        encoded = enc_norm(enc_blocks(embed_inputs(inputs)))
        logits = head(final_norm(dec_blocks(embed(tokens), encoded)))

    A family defines `create_embeddings`, `encoder_block`, `decoder_block`, `norm`, `embed_inputs`
    and `embed`. Where it is decoded in steps, the keys and values of what was encoded are computed
    once, by `keep`:

        kept = model.keep(model.encode(inputs))
        logits = model.attend(tokens, kept, cache=model.init_cache(b, capacity)).output

    Shapes:
        inputs `(b, s)`, or those of the family, and tokens `(b, t)`, to logits
        `(b, t, vocab_size)`.
    """

    config: C
    tok_emb: Embedding
    # A ModuleList of TransformerBlock.
    enc_blocks: Any
    # A ModuleList of CrossBlock.
    dec_blocks: Any
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
    ):
        super().__init__()
        check_config(config, EncoderDecoderConfig)
        self.config = config
        self.remat = remat
        self.create_embeddings()
        self.enc_blocks = Blocks(self.encoder_block(i, backend) for i in range(config.num_layers))
        self.enc_norm = self.norm()
        self.dec_blocks = Blocks(
            self.decoder_block(i, backend) for i in range(config.num_decoder_layers)
        )
        self.final_norm = self.norm()
        # Where it is tied, the table of tokens is the head: no second copy is held.
        self.out_head = (
            None if config.tied else Linear(config.d_model, config.vocab_size, bias=False)
        )
        self.initialise()

    def create_embeddings(self) -> None:
        """Set `tok_emb`, and what else `embed_inputs` and `embed` read."""
        self.tok_emb = Embedding(self.config.vocab_size, self.config.d_model)

    def encoder_block(self, layer: int, backend: str) -> TransformerBlock:
        """Return a block of the encoder, the first layer being 0."""
        raise NotImplementedError

    def decoder_block(self, layer: int, backend: str) -> CrossBlock:
        """Return a block of the decoder, the first layer being 0."""
        raise NotImplementedError

    def norm(self) -> LayerNorm | RMSNorm:
        """Return a norm of the family."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Draw the parameters, see `draw`."""
        draw(self)

    def embed_inputs(self, inputs: Tensor, dropout_key: Tensor | None) -> Tokens:
        """Return the vectors of what is encoded."""
        raise NotImplementedError

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of the decoder's tokens at these positions."""
        raise NotImplementedError

    def biases(self) -> tuple[Bias | None, Bias | None]:
        """Return the biases of the self-attention scores, of the encoder and of the decoder."""
        return None, None

    def encode(
        self,
        inputs: Tensor,
        *,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tokens:
        """Return the output of the encoder; the first `lengths` inputs of each row are real."""
        shape = shape_of("inputs", inputs)
        # Encoder and decoder have keys of their own, and so has each place in them.
        key = fold_in(dropout_key, 0)
        # Features of sound have no padding token that could replace them.
        if not inputs.is_floating_point():
            inputs = without_padding(inputs, shape, lengths)
        ran = self.enc_blocks.run(
            self.embed_inputs(inputs, fold_in(key, 0)),
            cache=None,
            key=key,
            remat=self.remat,
            positions=None,
            lengths=lengths,
            bias=self.biases()[0],
        )
        return self.enc_norm(ran.output)

    def keep(self, encoded: Tokens, lengths: ArrayLike | int | None = None) -> Kept:
        """Return the keys and values of the encoder's output, for each layer of the decoder."""
        # Once for a prompt: each step of decoding reads them again.
        return self.dec_blocks.keep(encoded, lengths)

    def attend(
        self,
        tokens: Integer[Tensor, "*b t"],
        kept: Kept,
        *,
        lengths: ArrayLike | int | None = None,
        cache: Caches | None = None,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Caches]:
        """Return the logits of the decoder's next tokens, and the cache if one is given.

        The arguments are those of `decode`.
        """
        decoded = self.decode(tokens, kept, cache=cache, lengths=lengths, dropout_key=dropout_key)
        return replace(decoded, output=self.logits(decoded.output))

    def hidden(
        self, tokens: Integer[Tensor, "*b t"], kept: Kept, **options: Unpack[DecodeOptions]
    ) -> Tokens:
        """Return the input of the head, `(b, t, d_model)`; the arguments are those of `decode`."""
        return self.decode(tokens, kept, **options).output

    def decode(
        self,
        tokens: Integer[Tensor, "*b t"],
        kept: Kept,
        *,
        lengths: ArrayLike | int | None = None,
        cache: Caches | None = None,
        dropout_key: Tensor | None = None,
    ) -> Outputs[Caches]:
        """Return the input of the head, `(b, t, d_model)`, and the cache if one is given.

        Args:
            tokens: tokens of the decoder, `(b, t)` or `(t,)`.
            kept: keys and values that `keep` returned.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            cache: keys and values of the tokens before, from `init_cache`; the new ones are
                appended.
            dropout_key: key of the dropout in train mode; None draws keys from torch's generator.
        """
        # A cache of another model would be read layer by layer without an error.
        check_caches("kept", kept, len(self.dec_blocks))
        check_token_ids("tokens", tokens)
        # The encoder has key 0.
        t, key = tokens.shape[-1], fold_in(dropout_key, 1)
        tokens = without_padding(tokens, tuple(tokens.shape), lengths)
        if cache is None:
            order = torch.arange(t, device=tokens.device)
        else:
            order = self.dec_blocks.positions(cache, tokens.shape, lengths)
        ran = self.dec_blocks.run(
            self.embed(tokens, order, fold_in(key, 0)),
            cache=cache,
            key=key,
            remat=self.remat,
            positions=None,
            # Each layer has keys and values of its own of the same encoder output.
            each=[{"kept": one} for one in kept],
            lengths=lengths,
            bias=self.biases()[1],
        )
        return replace(ran, output=self.final_norm(ran.output))

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        return self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)

    def forward(
        self,
        inputs: Tensor,
        tokens: Integer[Tensor, "*b t"],
        *,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the logits `(b, t, vocab_size)` of the token after each of the decoder's.

        Args:
            inputs: inputs of the encoder.
            tokens: tokens of the decoder, `(b, t)` or `(t,)`; the first is the start token.
            lengths: number of real inputs of each row, `(b,)`; the rest is padding. None is all.
            dropout_key: key of the dropout in train mode; None draws keys from torch's generator.
        """
        encoded = self.encode(inputs, lengths=lengths, dropout_key=dropout_key)
        kept = self.keep(encoded, lengths)
        return self.logits(self.hidden(tokens, kept, dropout_key=dropout_key))

    def init_cache(self, b: int | None, capacity: int, dtype: torch.dtype | None = None) -> Caches:
        """Return an empty cache for `b` sequences of up to `capacity` tokens of the decoder."""
        return self.dec_blocks.init_cache(b, capacity, dtype)
