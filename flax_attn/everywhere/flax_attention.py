"""Attention with the arguments and the shapes of Flax's functions, in nnx and in Linen."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array

from flax_attn.everywhere import reports
from flax_attn.everywhere.attention_fn import note
from flax_attn.everywhere.core import attend, refusals
from flax_attn.everywhere.dropout import SharedDropout
from flax_attn.everywhere.target import LeftAlone
from flax_attn.everywhere.words import asked_for
from flax_attn.functional.dropout import KeyedDropout, key_data
from flax_attn.functional.masks import Mask
from flax_attn.functional.outputs import Outputs


@dataclass(frozen=True)
class Flat:
    """Arrays of any number of batch axes as arrays of one.

    Args:
        batch: sizes of the batch axes, as they were.
    """

    batch: tuple[int, ...]

    def of(self, x: Array) -> Array:
        """Return an array whose last three axes stay; one that broadcasts may have fewer axes."""
        if (len(self.batch) < 2 and x.ndim <= 4) or x.ndim <= 3:
            return x
        leading, rest = x.shape[:-3], x.shape[-3:]
        # What all rows share is not copied for each.
        if prod(leading) == 1:
            return x.reshape(1, *rest)
        return jnp.broadcast_to(x, (*self.batch, *rest)).reshape(-1, *rest)

    def back(self, x: Array) -> Array:
        """Return an output, or weights, with the batch axes as they were."""
        return x.reshape(*self.batch, *x.shape[-3:])


def flax_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    *,
    promote_dtype: Callable = promote_dtype,
    force_fp32_for_softmax: bool = False,
    is_causal: bool = False,
) -> Array:
    """Return what the attention functions of Flax return for these arguments of theirs.

    The softmax is in float32 at least, and in float64 for float64. Dropout has the distribution of
    Flax's and drops other weights for the same key.

    Raises:
        LeftAlone: if the call is refused, before any work.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if force_fp32_for_softmax:
        # Its weights are in float32, and so is what they make of the values.
        widest = jnp.promote_types(query.dtype, jnp.float32)
        query, key, value = (x.astype(widest) for x in (query, key, value))
    with refusals():
        rate = 0.0 if deterministic else dropout_rate
        dropout = _keyed(rate, dropout_rng, shared=broadcast_dropout)
        flat = _flat(query, key, value)
        seen = Mask.causal(0) if is_causal else Mask()
        if mask is not None:
            # Flax takes numbers for masks, too: all but 0 may be seen.
            allowed = jnp.asarray(mask).astype(bool)
            seen = Mask.dense(flat.of(allowed)) & seen
    options = {"bias": bias, "mask": mask, "causal": is_causal, "dropout": dropout}
    words = asked_for(query, key, weights=module, **options)
    arrays = [None if x is None else flat.of(x) for x in (query, key, value, bias)]
    call = partial(attend, *arrays, seen, precision=precision, asked=words)
    if module is not None:
        # The weights that a module keeps are those before dropout: dropout asks for a second call.
        found = call(return_weights=True, counted=dropout is None)
        _keep_weights(module, flat, found)
        if dropout is None:
            return flat.back(found.output)
    return flat.back(call(dropout=dropout).output)


def _keyed(rate: float, key: Array | None, shared: bool) -> KeyedDropout | None:
    if rate == 0:
        return None
    if key is None:
        raise ValueError(f"dropout_rate={rate} needs a key; got dropout_rng=None")
    kind = SharedDropout if shared else KeyedDropout
    return kind(rate, key_data(key))


def _keep_weights(module: Any, flat: Flat, found: Outputs) -> None:
    """Save the weights in a module, as it asks for with `sow_weights=True`."""
    kind = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    assert found.weights is not None, "they were asked for"
    module.sow(kind, "attention_weights", flat.back(found.weights))


def _flat(query: Array, key: Array, value: Array) -> Flat:
    shapes = [x.shape for x in (query, key, value)]
    batches = {shape[:-3] for shape in shapes}
    if min(map(len, shapes)) < 3 or len(batches) > 1:
        raise ValueError(f"query, key and value must have the same batch axes; got {shapes}")
    return Flat(batches.pop())


def dot_product_attention_weights(original: Callable, *args: Any, **kwargs: Any) -> Array:
    """Leave alone what returns the weights: they are what others save."""
    raise LeftAlone("it returns all weights, so that there is nothing to save")


def multi_head_attention(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Array:
    """Call a module, and note an attention function that is not Flax's and calls none of Flax's."""
    with reports.opened() as inside:
        output = original(module, *args, **kwargs)
    if not inside.counts:
        note(module.attention_fn)
    return output
