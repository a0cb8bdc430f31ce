"""The base of decoder-only language models: embedding, blocks, norm and head."""

from dataclasses import replace
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from attn_spec.generation_checks import check_token_ids
from attn_spec.model_configs import ModelConfig, check_config
from torch_ref.functional.cache_base import Cache
from torch_ref.functional.dropout import fold_in
from torch_ref.functional.masks import Mask
from torch_ref.functional.outputs import Outputs
from torch_ref.functional.padding import without_padding
from torch_ref.functional.positions import as_positions
from torch_ref.functional.shapes import ArrayLike, Tokens
from torch_ref.models.blocks import Blocks
from torch_ref.models.initialise import draw
from torch_ref.modules.block import TransformerBlock
from torch_ref.modules.embedding import Embedding
from torch_ref.modules.linear import Linear
from torch_ref.modules.norm import LayerNorm, RMSNorm
from torch_ref.modules.typed import TypedModule

# One for each layer.
ModelCache = tuple[Cache, ...]


# As a class, so that type checkers follow options that pass through several methods.
class ModelOptions(TypedDict, total=False):
    """The keywords of a call; `LanguageModel.attend` describes them."""

    mask: Mask | Tensor | None
    positions: ArrayLike | None
    lengths: ArrayLike | int | None
    dropout_key: Tensor | None


C = TypeVar("C", bound=ModelConfig)


class LanguageModel(TypedModule, Generic[C]):
    """A decoder-only language model; a base class, see `GPT2` and `Llama`.

        logits = head(final_norm(block_L(... block_1(embed(tokens)))))

    A family defines `block` and `norm`, and `embed` and `create_embeddings` where it has more than
    a table of tokens.

    Shapes:
        tokens `(b, t)` or `(t,)` to logits `(b, t, vocab_size)` or `(t, vocab_size)`.
    """

    config: C
    tok_emb: Embedding
    # A ModuleList of TransformerBlock.
    trf_blocks: Any
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
        check_config(config, ModelConfig)
        self.config = config
        self.remat = remat
        self.create_embeddings()
        self.trf_blocks = Blocks(self.block(i, backend) for i in range(config.num_layers))
        self.final_norm = self.norm()
        # Where it is tied, the table of tokens is the head: no second copy is held.
        self.out_head = (
            None if config.tied else Linear(config.d_model, config.vocab_size, bias=False)
        )
        initialise(self)

    def create_embeddings(self) -> None:
        """Set `tok_emb`, and what else `embed` reads."""
        self.tok_emb = Embedding(self.config.vocab_size, self.config.d_model)

    def block(self, layer: int, backend: str) -> TransformerBlock:
        """Return the block of a layer, the first being 0."""
        raise NotImplementedError

    def norm(self) -> LayerNorm | RMSNorm:
        """Return a norm of the family."""
        raise NotImplementedError

    def embed(
        self, tokens: Integer[Tensor, "*b t"], positions: Tensor, dropout_key: Tensor | None
    ) -> Tokens:
        """Return the vectors of tokens at these positions."""
        return self.tok_emb(tokens)

    def attend(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: ModelCache | None = None,
        dropout_key: Tensor | None = None,
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
            dropout_key: key of the dropout in train mode; None draws keys from torch's generator.
        """
        options: ModelOptions = {
            "mask": mask,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        decoded = self.decode(tokens, cache=cache, **options)
        return replace(decoded, output=self.logits(decoded.output))

    def forward(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Return the logits `(b, t, vocab_size)`; `attend` describes the arguments."""
        options: ModelOptions = {
            "mask": mask,
            "positions": positions,
            "lengths": lengths,
            "dropout_key": dropout_key,
        }
        return self.attend(tokens, **options).output

    def hidden(self, tokens: Integer[Tensor, "*b t"], **options: Unpack[ModelOptions]) -> Tokens:
        """Return the input of the head, `(b, t, d_model)`; the arguments are those of a call."""
        return self.decode(tokens, **options).output

    def decode(
        self,
        tokens: Integer[Tensor, "*b t"],
        *,
        mask: Mask | Tensor | None = None,
        positions: ArrayLike | None = None,
        lengths: ArrayLike | int | None = None,
        cache: ModelCache | None = None,
        dropout_key: Tensor | None = None,
    ) -> Outputs[ModelCache]:
        """Return the input of the head, and the cache if one is given.

        The arguments are those of `attend`, which computes the logits of all tokens.
        """
        check_token_ids("tokens", tokens)
        t = tokens.shape[-1]
        tokens = without_padding(tokens, tuple(tokens.shape), lengths)
        # Positions of padding could lie beyond a table, and are 0 then.
        if positions is not None:
            positions = as_positions(positions, tuple(tokens.shape))
            positions = without_padding(positions, tuple(tokens.shape), lengths)
        if cache is None:
            order = torch.arange(t, device=tokens.device)
        else:
            order = self.trf_blocks.positions(cache, tokens.shape, lengths)
        x = self.embed(tokens, order if positions is None else positions, fold_in(dropout_key, 0))
        ran = self.trf_blocks.run(
            x,
            cache=cache,
            key=dropout_key,
            remat=self.remat,
            mask=mask,
            positions=positions,
            lengths=lengths,
        )
        return replace(ran, output=self.final_norm(ran.output))

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocab"]:
        """Return the logits of what `hidden` returned."""
        return self.tok_emb.attend(hidden) if self.out_head is None else self.out_head(hidden)

    def init_cache(
        self, b: int | None, capacity: int, dtype: torch.dtype | None = None
    ) -> ModelCache:
        """Return an empty cache for `b` sequences of up to `capacity` tokens.

        If `b` is None, it has no batch axis. The cache of a layer with a window is a ring buffer,
        which holds the window at least.

        Example:
            >>> import torch
            >>> from torch_ref.models import GPT2, GPT2Config
            >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11)).eval()
            >>> tokens = torch.ones((4, 5), dtype=torch.long)
            >>> prompt = model.attend(tokens, cache=model.init_cache(4, 8))
            >>> step = model.attend(torch.ones((4, 1), dtype=torch.long), cache=prompt.cache)
            >>> step.output.shape, step.cache[0].length.tolist()
            (torch.Size([4, 1, 11]), [6, 6, 6, 6])
        """
        return self.trf_blocks.init_cache(b, capacity, dtype)


def initialise(model: LanguageModel) -> None:
    """Draw the parameters of a model as GPT-2's were.

    Weights and tables are normal with a deviation of 0.02, that of the last layer on each residual
    path divided by `sqrt(2 * num_layers)`; biases are 0. Norms keep 1 and 0.
    """
    # A model of embedding and head alone has none.
    layers = max(1, len(model.trf_blocks))
    # Each layer adds two terms to the residual path: their sum keeps its variance.
    last = 0.02 * (2 * layers) ** -0.5
    draw(model, lambda name: last if _ends_a_residual_path(name) else 0.02)


def _ends_a_residual_path(name: str) -> bool:
    # What is added to the residual path, by the names that all families share.
    return name.endswith(("out_proj.weight", "W_down.weight", "layers.2.weight"))
