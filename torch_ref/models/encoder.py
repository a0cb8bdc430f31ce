"""What bidirectional encoders share: blocks in which every token attends to all others."""

from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Integer
from torch import Tensor

from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import EncoderConfig, check_config
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.padding import without_padding
from torch_ref.functional.positions import as_positions
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.blocks import Blocks
from torch_ref.models.initialise import draw
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.norm import LayerNorm
from torch_ref.modules.typed import TypedModule

C = TypeVar("C", bound=EncoderConfig)


class Encoder(TypedModule, Generic[C]):
    """A bidirectional encoder; a base class, see `Bert` and `ViT`.

        x = final_norm(block_L(... block_1(embedded)))

    A family defines `block`, `create_embeddings`, and the call, which embeds its inputs and hands
    them to `run`; `create_head` and `predict` where something follows the blocks.
    """

    config: C
    # A ModuleList of TransformerBlock.
    trf_blocks: Any
    final_norm: LayerNorm | None
    remat: bool

    def __init__(
        self,
        config: C,
        *,
        backend: str = "auto",
        remat: bool = False,
    ):
        super().__init__()
        check_config(config, EncoderConfig)
        self.config, self.remat, self.final_norm = config, remat, None
        self.create_embeddings()
        self.trf_blocks = Blocks(self.block(i, backend) for i in range(config.num_layers))
        self.create_head()
        draw(self)

    def create_embeddings(self) -> None:
        """Set what makes tokens of the inputs."""
        raise NotImplementedError

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return the block of a layer, the first being 0."""
        raise NotImplementedError

    def create_head(self) -> None:
        """Set `final_norm` and what else follows the blocks; by default nothing."""

    def predict(self, hidden: Tokens) -> Tensor:
        """Return the output of a call, from that of `hidden`; the same if there is no head."""
        # A family with a head overrides it.
        return hidden

    def run(
        self,
        x: Tokens,
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tokens:
        """Return embedded tokens after the blocks and the final norm.

        The arguments are those of the call of a family.
        """
        # Without a cache: every token sees those behind it, so that none can be kept.
        ran = self.trf_blocks.run(
            x,
            cache=None,
            key=dropout_key,
            remat=self.remat,
            mask=mask,
            positions=positions,
            lengths=lengths,
        )
        return ran.output if self.final_norm is None else self.final_norm(ran.output)


class TextEncoder(Encoder[C]):
    """An encoder of tokens; a base class, see `Bert` and `ModernBert`. A family defines `embed`.

    Shapes:
        tokens `(b, t)` or `(t,)` to `(b, t, d_model)` or `(t, d_model)`, or the output of the head.
    """

    def embed(
        self,
        tokens: Integer[Tensor, "*b t"],
        positions: Tensor,
        dropout_key: Tensor | None,
        **inputs: Any,
    ) -> Tokens:
        """Return the vectors of tokens at these positions; `inputs` are those of the family."""
        raise NotImplementedError

    def hidden(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
        **inputs: Any,
    ) -> Tokens:
        """Return the vectors of all tokens, `(b, t, d_model)`; takes the arguments of a call."""
        check_token_ids("tokens", tokens)
        shape = tuple(tokens.shape)

        # Padding is looked up as token 0, which every table has.
        def real(numbers: ArrayLike) -> Tensor:
            return without_padding(numbers, shape, lengths)

        if positions is None:
            order = torch.arange(shape[-1], device=tokens.device)
        else:
            order = positions = real(as_positions(positions, shape))
        # Numbers of padding could lie beyond a table.
        for name, numbers in inputs.items():
            if numbers is not None:
                inputs[name] = real(numbers)
        x = self.embed(real(tokens), order, fold_in(dropout_key, 0), **inputs)
        return self.run(x, mask=mask, positions=positions, lengths=lengths, dropout_key=dropout_key)

    def forward(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the vectors of all tokens, or what the head makes of them.

        Args:
            tokens: token ids `(b, t)` or `(t,)`.
            mask: further mask besides `lengths`, such as `Mask.segments(ids)` for packed documents.
            positions: integer positions `(t,)` or `(b, t)`; None is the order of the tokens.
            lengths: number of real tokens of each row, `(b,)`; the rest is padding. None is all.
            dropout_key: key of the dropout in train mode; None draws keys from torch's generator.
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
