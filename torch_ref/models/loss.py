"""The loss of a language model: the mean cross entropy of the next tokens."""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn import functional

from attn_spec.generation_checks import check_language_model, check_token_ids
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.functional.integers import clipped
from torch_ref.functional.masks import Mask
from torch_ref.functional.padding import real_tokens
from torch_ref.functional.positions import segment_positions
from torch_ref.functional.shapes import ArrayLike
from torch_ref.models.language_model import LanguageModel


def next_token_loss(
    model: LanguageModel,
    tokens: Integer[Tensor, "*b t"],
    *,
    lengths: ArrayLike | int | None = None,
    segments: ArrayLike | None = None,
    dropout_key: Tensor | None = None,
) -> Float[Tensor, ""]:
    """Return the mean cross entropy of each next token, given those before it.

        mean over i of -log softmax(logits_i)[token_{i + 1}]

    Sums are taken in at least float32.

    Args:
        model: the language model; in train mode with dropout, which `model.eval()` switches off.
        tokens: token ids `(b, t)` or `(t,)`, integers of any dtype. A real token outside the
            vocabulary makes the loss NaN.
        lengths: number of real tokens of each row, `(b,)`; the rest is padding and does not count,
            whatever its ids. None is all.
        segments: ids of packed documents, `(b, t)` or `(t,)`, a run of equal ids each. A token sees
            its own document alone, positions start again in each, and the first token of a document
            is no target. None is one.
        dropout_key: key of the dropout in train mode; None draws keys from torch's generator.

    Shapes:
        Returns one number; 0 where there is no target.

    Example:
        >>> from torch_ref.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(6, 2, 3, context_length=8, vocab_size=11))
        >>> loss = next_token_loss(model, torch.ones((4, 5), dtype=torch.long))
        >>> loss.backward()
        >>> abs(loss.item() - torch.tensor(11.0).log().item()) < 0.5
        True
    """
    check_language_model(model, LanguageModel)
    # Before the model runs: a float that is rounded down would be another token.
    check_token_ids("tokens", tokens)
    shape = tuple(tokens.shape)
    # The mean of no token is no number.
    if shape[-1] < 2:
        raise ValueError(
            "the loss is that of the tokens after the first, so there must be two; got shape"
            f" {shape}. Leave out rows of one token"
        )
    tokens = clipped(tokens, model.config.vocab_size)
    options = _packed(segments, shape)
    options |= {"lengths": lengths, "dropout_key": dropout_key}
    logits = model(tokens, **options)
    counted = _targets(tokens, lengths, segments)
    logits = rearrange(logits.to(accumulation_dtype(logits.dtype)), "... t v -> (... t) v")
    # What rolls around to the last place does not count.
    targets = tokens.roll(-1, dims=-1).flatten()
    # Where torch would raise, a loss on a GPU under JAX cannot: both give NaN.
    inside = (targets >= 0) & (targets < logits.shape[-1])
    losses = functional.cross_entropy(logits, torch.where(inside, targets, 0), reduction="none")
    # What does not count is 0, and not left out, so that a NaN in it does no harm.
    losses = torch.where(counted.flatten(), torch.where(inside, losses, torch.nan), 0)
    return losses.sum() / counted.sum().clamp(min=1)


def _packed(segments: ArrayLike | None, tokens: tuple[int, ...]) -> dict:
    if segments is None:
        return {}
    positions = segment_positions(segments)
    of_one_row = tokens[-1:]
    if tuple(positions.shape) not in (tokens, of_one_row):
        raise ValueError(
            f"segments must have one id a token, shape {tokens} or {of_one_row}; got shape"
            f" {tuple(positions.shape)}. Pack them as the tokens are"
        )
    return {"mask": Mask.segments(segments), "positions": positions}


def _targets(
    tokens: Tensor, lengths: ArrayLike | int | None, segments: ArrayLike | None
) -> Bool[Tensor, "*b t"]:
    """Return which tokens are followed by a target."""
    *batch, t = tokens.shape
    # A sequence is a batch of one.
    b = batch[0] if batch else 1
    real = real_tokens(b, t, lengths, tokens.device)
    real = real.reshape(tokens.shape)
    # The last token has no next one.
    counted = real.roll(-1, dims=-1)
    counted[..., -1] = False
    if segments is None:
        return counted
    # Nor has that of a document: what follows is another one.
    ids = torch.as_tensor(segments).expand(tokens.shape)
    following = ids.roll(-1, dims=-1)
    return counted & (ids == following)
