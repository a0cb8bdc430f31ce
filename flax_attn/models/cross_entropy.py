"""The weighted sum of cross entropies of hidden states.

It is computed a few tokens at a time; under a mesh each device computes its own part.

Only in flax_attn: PyTorch's own is one call.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.sharding.axes import axes_in, free_axes, mesh_in_use, place, place_like, spec
from flax_attn.sharding.parameter_axes import specs

# Tokens whose logits are in memory at a time.
_ROWS = 512


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(
    logits: Callable,
    head: Any,
    hidden: Float[Array, "b t d"],
    targets: Int32[Array, "b t"],
    weights: Float[Array, "b t"],
) -> Float[Array, ""]:
    """Return the sum of `weights * -log softmax(logits(head, hidden))[targets]`.

    Under a mesh each device computes its tokens, for its part of the vocabulary. What else the
    parameters of the head are split over is gathered once, and their gradients are summed over the
    devices once.

    Args:
        logits: function from the parameters of the head and hidden states to logits.
        head: parameters of the head, Flax variables with the names of their axes.
        hidden: input of the head.
        targets: the tokens that follow. One outside the vocabulary makes the loss NaN, unless its
            weight is 0.
        weights: weights of the losses; sums are taken in their dtype.
    """
    return _on_mesh(False, logits, head, hidden, targets, weights)


def _forward(logits: Callable, head: Any, hidden: Array, targets: Array, weights: Array):
    # The gradients are taken here, from the logits of this chunk: to recompute these would cost a
    # third more.
    loss, *gradients = _on_mesh(True, logits, head, hidden, targets, weights)
    return loss, tuple(gradients)


def _backward(logits: Callable, gradients: tuple, cotangent: Array):
    of_head, of_hidden = jax.tree.map(lambda x: cotangent.astype(x.dtype) * x, gradients)
    return of_head, of_hidden, None, None


cross_entropy.defvjp(_forward, _backward)


class _LossAxes(NamedTuple):
    """The mesh axes that tokens are split over, and those that the vocabulary is."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


def _on_mesh(
    gradients: bool, logits: Callable, head: Any, hidden: Array, targets: Array, weights: Array
) -> Any:
    """Return the loss and, if asked for, the gradients; each device computes its part."""
    compute = _loss_and_gradients if gradients else _loss
    mesh = mesh_in_use(hidden)
    if mesh is None:
        return compute(logits, _LossAxes(), head, hidden, targets, weights)
    rows = spec(("batch", "tokens"), mesh, targets.shape)
    split, of_head = _split(head, rows, mesh)
    of_hidden = PartitionSpec(*rows, None)
    where = of_head, of_hidden, rows, rows
    # The loss is a sum over all devices, and on each of them.
    whole = PartitionSpec()
    local = jax.shard_map(
        partial(compute, logits, split),
        mesh=mesh,
        in_specs=where,
        out_specs=(whole, of_head, of_hidden) if gradients else whole,
        axis_names=free_axes(mesh),
        check_vma=False,  # sums over devices are taken by hand
    )
    arrays = head, hidden, targets, weights
    placed = jax.tree.map(lambda x, to: place(x, mesh, to), arrays, where)
    results = local(*placed)
    if not gradients:
        return results
    loss, *found = results
    # Gradients lie as what they are gradients of did, and not as it was split here.
    found = jax.tree.map(place_like, tuple(found), (head, hidden))
    return loss, *found


def _split(head: Any, rows: PartitionSpec, mesh: Any) -> tuple[_LossAxes, Any]:
    """Return the mesh axes, and the specs of a head that is split along the vocabulary alone."""
    tokens = tuple(chain.from_iterable(map(axes_in, rows)))
    of_head = specs(head, mesh, only="vocab", but=tokens)
    # Of all parameters of a head the vocabulary is one axis: there is one entry, or none.
    entries = chain.from_iterable(jax.tree.leaves(of_head))
    vocab = set(map(axes_in, entries)) - {()}
    return _LossAxes(tokens, *vocab), of_head


def _loss(logits: Callable, split: _LossAxes, head: Any, *rows: Array) -> Float[Array, ""]:
    """Return the loss of all chunks."""

    def add(total, chunk):
        hidden, targets, weights = chunk
        scores = logits(head, hidden)
        loss, _ = _of_chunk(scores, targets, weights, split.vocab)
        return total + loss, None

    chunks = _chunks(*rows)
    nothing = jnp.zeros((), chunks[-1].dtype)
    total, _ = jax.lax.scan(add, nothing, chunks)
    return _sum(total, split.tokens)


def _loss_and_gradients(
    logits: Callable, split: _LossAxes, head: Any, *rows: Array
) -> tuple[Array, Any, Array]:
    """Return the loss of all chunks, and the gradients of the head and of the hidden states."""

    def add(sums, chunk):
        hidden, targets, weights = chunk
        scores, pull = jax.vjp(logits, head, hidden)
        loss, slope = _of_chunk(scores, targets, weights, split.vocab)
        of_head, of_hidden = pull(slope)
        sums = jax.tree.map(_add, sums, (loss, of_head))
        return sums, of_hidden

    chunks = _chunks(*rows)
    nothing = jnp.zeros((), chunks[-1].dtype)
    zeros = jax.tree.map(_zeros, head)
    sums, of_hidden = jax.lax.scan(add, (nothing, zeros), chunks)
    loss, of_head = _sum(sums, split.tokens)
    of_head = jax.tree.map(lambda total, x: total.astype(x.dtype), of_head, head)
    of_hidden = rearrange(of_hidden, "count b chunk d -> b (count chunk) d")
    # The last chunk may reach beyond the tokens.
    t = rows[0].shape[1]
    of_hidden = _sum(of_hidden[:, :t], split.vocab)
    return loss, of_head, of_hidden


def _zeros(x: Array) -> Array:
    # In float32 for lower dtypes: each chunk adds to the gradient of the head.
    return jnp.zeros(x.shape, accumulation_dtype(x.dtype))


def _add(total: Array, x: Array) -> Array:
    return total + x.astype(total.dtype)


def _chunks(*arrays: Array) -> list[Array]:
    """Return arrays `(b, t, ...)` in chunks `(count, b, chunk, ...)`, padded with zeros.

    A chunk has about `_ROWS` tokens.
    """
    b, t = arrays[0].shape[:2]
    # At least one chunk, also of no rows.
    count = max(1, -(-b * t // _ROWS))
    chunk = -(-t // count)
    return [_in_chunks(x, chunk) for x in arrays]


def _in_chunks(x: Array, chunk: int) -> Array:
    fill = -x.shape[1] % chunk
    widths = [(0, 0), (0, fill), *[(0, 0)] * (x.ndim - 2)]
    padded = jnp.pad(x, widths)
    return rearrange(padded, "b (count chunk) ... -> count b chunk ...", chunk=chunk)


def _of_chunk(
    scores: Array, targets: Array, weights: Array, vocab: tuple[str, ...]
) -> tuple[Array, Array]:
    """Return the loss and its gradient with respect to the scores.

    Each device has a part of the vocabulary.
    """
    wide = scores.astype(weights.dtype)
    normaliser = _normaliser(wide, vocab)
    size = scores.shape[-1]
    hit = _hits(targets, size, vocab)
    chosen = jnp.where(hit, wide, 0).sum(axis=-1)
    chosen = _sum(chosen, vocab)
    # A target that is no word makes the loss NaN, unless it does not count.
    end = _sum(1, vocab) * size
    inside = (targets >= 0) & (targets < end)
    ignored = weights == 0
    chosen = jnp.where(inside | ignored, chosen, jnp.nan)
    losses = normaliser[..., 0] - chosen
    # The softmax, less 1 at the target.
    probabilities = jnp.exp(wide - normaliser)
    slope = probabilities - hit.astype(wide.dtype)
    slope = slope * weights[..., None]
    return (losses * weights).sum(), slope.astype(scores.dtype)


def _hits(targets: Array, size: int, vocab: tuple[str, ...]) -> Array:
    """Return which of a device's `size` words is the target, `(b, chunk, size)`."""
    first = 0
    if vocab:
        # A device has the scores of its own words.
        first = jax.lax.axis_index(vocab) * size
        first = first.astype(targets.dtype)
    words = jnp.arange(size, dtype=targets.dtype)
    return (targets - first)[..., None] == words[None, None]


def _normaliser(scores: Array, vocab: tuple[str, ...]) -> Array:
    """Return the logarithm of the sum of exponentials over the whole vocabulary."""
    # The largest score, whose exponential is 1: none is infinite.
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    top = _sum(top, vocab, jax.lax.pmax)
    total = jnp.exp(scores - top).sum(axis=-1, keepdims=True)
    return top + jnp.log(_sum(total, vocab))


def _sum(tree: Any, axes: tuple[str, ...], reduce: Callable = jax.lax.psum) -> Any:
    """Return the sums over mesh axes."""
    return reduce(tree, axes) if axes else tree
