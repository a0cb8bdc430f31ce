"""The operations that a model asks for, whatever program computes them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flax import nnx

from flax_attn.models.language_model import LanguageModel
from flax_attn.models.stack import Stack
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.plan.job import Job


@dataclass(frozen=True)
class Work:
    """Operations of all devices together: of products with parameters, and of queries with keys and values."""

    parameters: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.parameters + self.attention


def training(job: Job, model: LanguageModel) -> Work:
    """Return the operations of a training step: forward, and twice that for the gradients.

    What is recomputed under `remat` is not asked for by the model, and is left out.
    """
    forward = prefill(job, model)
    return Work(3 * forward.parameters, 3 * forward.attention)


def prefill(job: Job, model: LanguageModel) -> Work:
    """Return the operations of a forward pass over all tokens."""
    seen = sum(_pairs(job.tokens, att.window) * _width(att) for att in _attentions(model))
    return Work(2 * job.batch * job.tokens * _weights(model), job.batch * seen)


def decoding(job: Job, model: LanguageModel) -> Work:
    """Return the operations of one more token for each sequence, behind a cache of all tokens."""
    seen = sum(min(job.tokens, att.window or job.tokens) * _width(att) for att in _attentions(model))
    return Work(2 * job.batch * _weights(model), job.batch * seen)


def _weights(model: LanguageModel) -> int:
    """Return how many numbers a token is multiplied by: all matrices, and the table where it is the head."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    kernels = sum(prod(param.shape) for path, param in params if path[-1] == "kernel")
    return kernels + (prod(model.tok_emb.embedding.shape) if model.out_head is None else 0)


def _width(att: MultiHeadAttention) -> int:
    """Return the operations for a pair of a query and a key in all heads: two products of the width of a head."""
    return 4 * att.num_heads * att.head_dim


def _pairs(t: int, window: int | None) -> int:
    """Return how many keys the queries see together."""
    seen = min(t, window or t)
    return seen * (seen + 1) // 2 + (t - seen) * seen


def _attentions(model: LanguageModel) -> list[MultiHeadAttention]:
    blocks = model.trf_blocks
    return [blocks.block.att] * len(blocks) if isinstance(blocks, Stack) else [block.att for block in blocks]
