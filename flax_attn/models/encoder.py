"""What bidirectional encoders share: blocks in which every token attends to all others."""

from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Integer

from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import EncoderConfig, check_config
from flax_attn.functional.dropout import fold_in
from flax_attn.functional.masks import Mask
from flax_attn.functional.positions import as_positions
from flax_attn.functional.shapes import ArrayLike, Tokens
from flax_attn.models.blocks import Blocks
from flax_attn.models.initialise import draw
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.stack import Stack
from flax_attn.modules.block import TransformerBlock
from flax_attn.modules.initialisation import drawn_once
from flax_attn.modules.norm import LayerNorm
from flax_attn.sharding.axes import RESIDUAL, TOKENS, constrain
from flax_attn.sharding.zigzag_inputs import arranged, without_arranged_padding

C = TypeVar("C", bound=EncoderConfig)


class Encoder(Pretrained, Generic[C]):
    """A bidirectional encoder; a base class, see `Bert` and `ViT`.

        x = final_norm(block_L(... block_1(embedded)))

    A family defines `block`, `create_embeddings`, and the call, which embeds its inputs and hands
    them to `run`; `create_head` and `predict` where something follows the blocks.

    Args:
        config: the sizes.
        backend: attention backend; `"auto"` or the name of one.
        remat: whether the backward pass recomputes each block instead of storing its activations.
        scan_layers: whether the parameters of the blocks are stacked, and the blocks run by one
            scan: compiled once.
        dtype: dtype of the computation; None is that of the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params` as `draw` says, keys of dropout
            from `dropout`.

    Raises:
        ValueError: where its layers do.
    """

    config: C
    trf_blocks: Blocks | Stack
    final_norm: LayerNorm | None = None
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
        check_config(config, EncoderConfig)
        products = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        self.config, self.remat = config, remat
        with drawn_once(self):
            self.create_embeddings(**products)
            layers = range(config.num_layers)
            self.trf_blocks = Blocks(self.block(i, backend, **products) for i in layers)
            self.create_head(**products)
            draw(self, rngs)
        if scan_layers:
            self.trf_blocks = Stack(self.trf_blocks)

    def create_embeddings(self, **numerics: Any) -> None:
        """Set what makes tokens of the inputs."""
        raise NotImplementedError

    def block(self, layer: int, backend: str, **numerics: Any) -> TransformerBlock:
        """Return the block of a layer, the first being 0."""
        raise NotImplementedError

    def create_head(self, **numerics: Any) -> None:
        """Set `final_norm` and what else follows the blocks; by default nothing."""

    def predict(self, hidden: Tokens) -> Array:
        """Return the output of a call, from that of `hidden`; the same if there is no head."""
        # A family with a head overrides it.
        return hidden

    def run(
        self,
        x: Tokens,
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
    ) -> Tokens:
        """Return embedded tokens after the blocks and the final norm.

        The arguments are those of the call of a family.
        """
        # Without a cache: every token sees those behind it, so that none can be kept.
        ran = self.trf_blocks.run(
            constrain(x, *RESIDUAL),
            cache=None,
            key=dropout_key,
            remat=self.remat,
            mask=mask,
            positions=positions,
            lengths=lengths,
        )
        x = ran.output if self.final_norm is None else self.final_norm(ran.output)
        return constrain(x, *TOKENS)


class TextEncoder(Encoder[C]):
    """An encoder of tokens; a base class, see `Bert` and `ModernBert`. A family defines `embed`.

    Shapes:
        tokens `(b, t)` or `(t,)` to `(b, t, d_model)` or `(t, d_model)`, or the output of the head.
    """

    def embed(
        self,
        tokens: Integer[Array, "*b t"],
        positions: Array,
        dropout_key: Array | None,
        **inputs: Any,
    ) -> Tokens:
        """Return the vectors of tokens at these positions; `inputs` are those of the family."""
        raise NotImplementedError

    def hidden(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
        **inputs: Any,
    ) -> Tokens:
        """Return the vectors of all tokens, `(b, t, d_model)`; takes the arguments of a call."""
        check_token_ids("tokens", tokens)
        shape = tuple(tokens.shape)

        # Padding is looked up as token 0, which every table has.
        def real(numbers: ArrayLike) -> Array:
            return without_arranged_padding(numbers, shape, lengths)

        if positions is None:
            order = arranged(jnp.arange(shape[-1]))
        else:
            order = positions = real(as_positions(positions, shape))
        # Numbers of padding could lie beyond a table.
        for name, numbers in inputs.items():
            if numbers is not None:
                inputs[name] = real(numbers)
        x = self.embed(real(tokens), order, fold_in(dropout_key, 0), **inputs)
        return self.run(x, mask=mask, positions=positions, lengths=lengths, dropout_key=dropout_key)

    def __call__(
        self,
        tokens: Integer[Array, "*b t"],
        *,
        mask: Mask | Array | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Array | None = None,
        **inputs: Any,
    ) -> Array:
        """Return the vectors of all tokens, or what the head makes of them.

        Args:
            tokens: token ids `(b, t)` or `(t,)`.
            mask: further mask besides `lengths`, such as `Mask.segments(ids)` for packed documents.
            positions: integer positions `(t,)` or `(b, t)`; None is the order of the tokens.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            dropout_key: key of the dropout in train mode; None draws keys from the `dropout`
                streams.
            inputs: further inputs of the family's `embed`, such as `token_types`.

        Raises:
            ValueError: if there are more than `context_length` tokens, or mask or positions do not
                fit.
        """
        options: dict[str, Any] = {
            "mask": mask,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.predict(self.hidden(tokens, **options, **inputs))
