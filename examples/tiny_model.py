"""A small language model, once in Flax and once in PyTorch, and one step of training for each.

    embeddings of tokens and positions; blocks of attention and feed-forward; a norm; a linear head

`twins` makes both with the same weights. `train_flax` and `train_torch` are the loops that a user
of each framework would write; given the same batches, each with its dropout key, they do the same
step by step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import torch
from einops import rearrange
from flax import nnx
from torch.nn.functional import cross_entropy

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.functional.dropout import fold_in
from flax_attn.parity import Recipe
from torch_ref.functional.dropout import fold_in as torch_fold_in

LAYOUT = convert.Layout(
    (convert.Rule(("embedding",), "weight"), *convert.LAYOUTS["torch_ref"].rules)
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    vocab_size: int
    context_length: int
    d_model: int = 48
    num_heads: int = 4
    num_layers: int = 2
    dropout: float = 0.0


class Batch(NamedTuple):
    """Data of a step.

    Tokens `(b, t)`, targets of the last `u` of them `(b, u)`, and a dropout key.
    """

    tokens: np.ndarray
    targets: np.ndarray
    key: np.ndarray


class FlaxModel(nnx.Module):
    """Tokens `(b, t)` to logits of the next ones `(b, t, v)`."""

    def __init__(self, sizes: Sizes, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        numerics = {"param_dtype": param_dtype, "rngs": rngs}
        self.tokens = nnx.Embed(sizes.vocab_size, sizes.d_model, **numerics)
        self.positions = nnx.Embed(sizes.context_length, sizes.d_model, **numerics)
        self.blocks = nnx.List(_flax_block(sizes, numerics) for _ in range(sizes.num_layers))
        self.norm = flax_attn.LayerNorm(sizes.d_model, **numerics)
        self.head = flax_attn.Linear(sizes.d_model, sizes.vocab_size, bias=False, **numerics)

    def __call__(self, tokens, *, dropout_key=None):
        """Return the logits. Child i of the key is that of block i."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        for i, block in enumerate(self.blocks):
            x = block(x, dropout_key=fold_in(dropout_key, i))
        return self.head(self.norm(x))


def _flax_block(sizes: Sizes, numerics: dict[str, Any]) -> flax_attn.TransformerBlock:
    d, length, dropout = sizes.d_model, sizes.context_length, sizes.dropout
    return flax_attn.TransformerBlock(
        flax_attn.MultiHeadAttention(d, d, length, dropout, sizes.num_heads, **numerics),
        flax_attn.FeedForward(d, **numerics),
        flax_attn.LayerNorm(d, **numerics),
        flax_attn.LayerNorm(d, **numerics),
        drop_shortcut=flax_attn.Dropout(dropout, rngs=numerics["rngs"]),
    )


class TorchModel(torch.nn.Module):
    """Tokens `(b, t)` to logits of the next ones `(b, t, v)`."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tokens = torch.nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = torch.nn.Embedding(sizes.context_length, sizes.d_model)
        self.blocks = torch.nn.ModuleList(_torch_block(sizes) for _ in range(sizes.num_layers))
        self.norm = torch_ref.LayerNorm(sizes.d_model)
        self.head = torch.nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)

    def forward(self, tokens, *, dropout_key=None):
        """Return the logits. Child i of the key is that of block i."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])[None])
        for i, block in enumerate(self.blocks):
            x = block(x, dropout_key=torch_fold_in(dropout_key, i))
        return self.head(self.norm(x))


def _torch_block(sizes: Sizes) -> torch_ref.TransformerBlock:
    d, length, dropout = sizes.d_model, sizes.context_length, sizes.dropout
    return torch_ref.TransformerBlock(
        torch_ref.MultiHeadAttention(d, d, length, dropout, sizes.num_heads),
        torch_ref.FeedForward(d),
        torch_ref.LayerNorm(d),
        torch_ref.LayerNorm(d),
        drop_shortcut=torch_ref.Dropout(dropout),
    )


def twins(sizes: Sizes, seed: int = 0) -> tuple[FlaxModel, TorchModel]:
    """Return both models in float64 and in train mode, with the initial weights of PyTorch."""
    # PyTorch draws from a generator of the process.
    torch.manual_seed(seed)
    theirs = TorchModel(sizes).double()
    ours = FlaxModel(sizes, param_dtype=jnp.float64, rngs=nnx.Rngs(seed))
    convert.load_state_dict(ours, theirs.state_dict(), LAYOUT)
    return ours, theirs


def train_flax(
    model: FlaxModel, recipe: Recipe, batches: Iterable[Batch]
) -> Iterator[tuple[float, np.ndarray]]:
    """Train on each batch; yield its loss before the step and the logits of its targets."""

    def mean_loss(model, batch):
        # The targets are those of the last tokens.
        logits = model(batch.tokens, dropout_key=batch.key)[:, -batch.targets.shape[1] :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return losses.mean(), logits

    @nnx.jit
    def step(model, optimizer, batch):
        differentiate = nnx.value_and_grad(mean_loss, has_aux=True)
        (loss, logits), gradients = differentiate(model, batch)
        optimizer.update(model, gradients)
        return loss, logits

    optimizer = nnx.Optimizer(model, recipe.optax(), wrt=nnx.Param)
    for batch in batches:
        # A key has two words of 32 bits in JAX; PyTorch has no such dtype to compute with.
        batch = batch._replace(key=batch.key.astype(np.uint32))
        loss, logits = step(model, optimizer, batch)
        yield float(loss), np.asarray(logits)


def train_torch(
    model: TorchModel, recipe: Recipe, batches: Iterable[Batch]
) -> Iterator[tuple[float, np.ndarray]]:
    """Train on each batch; yield its loss before the step and the logits of its targets."""
    optimizer, schedule = recipe.torch(model.parameters())
    for batch in batches:
        tokens, targets, key = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        logits = model(tokens, dropout_key=key)[:, -targets.shape[1] :]
        # PyTorch wants one axis of examples.
        flat, wanted = rearrange(logits, "b u v -> (b u) v"), rearrange(targets, "b u -> (b u)")
        loss = cross_entropy(flat, wanted)
        loss.backward()
        recipe.clip(model.parameters())
        optimizer.step()
        schedule.step()
        yield loss.item(), logits.detach().numpy()
