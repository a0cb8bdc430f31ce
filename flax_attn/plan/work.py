"""The operations that a model asks for, whatever program computes them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flax import nnx

from flax_attn.models.language_model import LanguageModel
from flax_attn.modules.calls import Attention
from flax_attn.modules.delta_attention import DeltaAttention
from flax_attn.modules.differential import DifferentialAttention
from flax_attn.modules.latent_attention import MultiHeadLatentAttention
from flax_attn.modules.mixture import MixtureOfExperts
from flax_attn.modules.multi_head import MultiHeadAttention
from flax_attn.plan.job import Job


@dataclass(frozen=True)
class Work:
    """Operations of all devices: products with parameters, and queries with keys and values."""

    parameters: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.parameters + self.attention


@dataclass(frozen=True)
class Each:
    """The operations of all heads of an attention, apart from its parameters.

    Args:
        pair: operations for a query and a key that it sees, with both products.
        step: the same in a step of decoding, which may compute another form.
        token: operations for each token, whatever it sees.
    """

    pair: int = 0
    step: int = 0
    token: int = 0


def training(job: Job, model: LanguageModel) -> Work:
    """Return the operations of a training step: forward, and twice that for the gradients.

    What is recomputed under `remat` is not asked for by the model, and is left out.
    """
    forward = prefill(job, model)
    return Work(3 * forward.parameters, 3 * forward.attention)


def prefill(job: Job, model: LanguageModel) -> Work:
    """Return the operations of a forward pass over all tokens."""
    counts = [(att, each(att)) for att in _attentions(model)]
    seen = sum(
        _pairs(job.tokens, att.window) * one.pair + job.tokens * one.token for att, one in counts
    )
    return Work(2 * job.batch * job.tokens * _weights(model), job.batch * seen)


def decoding(job: Job, model: LanguageModel) -> Work:
    """Return the operations of one more token for each sequence, behind a cache of all tokens."""
    counts = [(att, each(att)) for att in _attentions(model)]
    seen = sum(
        min(job.tokens, att.window or job.tokens) * one.step + one.token for att, one in counts
    )
    return Work(2 * job.batch * _weights(model), job.batch * seen)


def each(att: Attention) -> Each:
    """Return the operations of an attention.

    Raises:
        ValueError: if it is of a kind whose operations are not known.

    Example:
        >>> from flax_attn import GatedDeltaNet
        >>> each(GatedDeltaNet(6, 6, num_heads=4, head_dim=3, value_dim=5, rngs=nnx.Rngs(0)))
        Each(pair=0, step=0, token=360)
    """
    if isinstance(
        att, DeltaAttention
    ):  # reads the state for what it knows of a key, adds the rest, and reads it again
        return Each(token=3 * 2 * att.num_heads * att.head_dim * att.value_dim)
    if isinstance(att, MultiHeadLatentAttention):
        value = att.out_proj.kernel.shape[-2] // att.num_heads
        latent = (
            2 * att.kv_lora_rank + att.qk_rope_head_dim
        )  # absorbed: queries meet latents, and weights do
        return Each(2 * att.num_heads * (att.head_dim + value), 2 * att.num_heads * latent)
    if isinstance(
        att, MultiHeadAttention
    ):  # of differential attention the values are those of two heads
        both = (
            2 * att.num_heads * (3 if isinstance(att, DifferentialAttention) else 2) * att.head_dim
        )
        return Each(both, both)
    raise ValueError(
        "the operations of MultiHeadAttention, MultiHeadLatentAttention, DifferentialAttention and"
        f" DeltaAttention are known; got a model with {type(att).__name__}. Plan a model without it"
    )


def _weights(model: LanguageModel) -> int:
    """Return how many numbers multiply a token: matrices, and the table where it is the head.

    Of the experts of a mixture it is those that a token is given to.
    """
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    kernels = sum(prod(param.shape) for path, param in params if path[-1] == "kernel")
    idle = sum(
        _idle(module)
        for _, module in nnx.iter_modules(model)
        if isinstance(module, MixtureOfExperts)
    )
    return kernels - idle + (prod(model.tok_emb.embedding.shape) if model.out_head is None else 0)


def _idle(mixture: MixtureOfExperts) -> int:
    """Return how many numbers of the experts a token is not multiplied by."""
    experts, router = mixture.experts, mixture.router
    kernels = sum(
        prod(layer.kernel.shape) for layer in (experts.W_gate, experts.W_up, experts.W_down)
    )
    return kernels * (router.num_experts - router.top_k) // router.num_experts


def _pairs(t: int, window: int | None) -> int:
    """Return how many keys the queries see together."""
    seen = min(t, window or t)
    return seen * (seen + 1) // 2 + (t - seen) * seen


def _attentions(model: LanguageModel) -> list[Attention]:
    return [block.att for block in model.trf_blocks.of_layers]
