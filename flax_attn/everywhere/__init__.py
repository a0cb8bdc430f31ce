"""Attention of other libraries, computed by `dot_product_attention` of this one.

    with flax_attn.everywhere() as report:
        loss, gradients = train_step(model, batch)
    print(report)

Calls mean what they mean in their libraries, and a call that cannot be computed here runs as
before and is counted with its reason. Nothing is changed before a block is entered, and all is
as before when the last one is left, also after an exception.

A block is for its thread, as those of `jax.default_matmul_precision`; `everywhere(True)` is for
the whole program, all threads included, and `everywhere(False)` ends it. With an argument it
can also be the block of a `with`: `with everywhere(False):` leaves out a part of a program.
What `jax.jit` compiles inside stays so, and is not found outside, nor the reverse. What was
compiled, exported or traced by hand is not changed by a block: `jax.jit(f).lower(x).compile()`,
a jaxpr, the pullback of `jax.vjp`.

Every call has derivatives in reverse and in forward mode on one device; those in forward mode hold
all scores, as the original does.

Dropout has the rate and the distribution of the original's and draws from the layer's own key or
stream, but drops other weights for the same key; a warning says so once.

Targets are `jax.nn` (`dot_product_attention`), `nnx` and `linen` (their attention functions,
and so the modules that call them), `keras`, `equinox` and `haiku` (modules and functions). None
is imported: one that is imported later is changed when it is. One of a version that is not
known is left alone, with a warning.

Args:
    on: None for a block; True or False for the whole program.
    targets: names of the targets, or None for all that are installed.
    strict: whether a call that would be left alone is an error.

Raises:
    ValueError: if a target is unknown or not installed, if it is on with other options, or
        inside a function that JAX traces; under `strict` for each call that is left alone.

Example:
    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((2, 64, 4, 8))
    >>> with everywhere() as report:
    ...     output = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    >>> [(entry.place, entry.asked) for entry in report.taken]
    [('jax.nn.dot_product_attention', 'q[2, 64, 4, 8] k[2, 64, 4, 8] float32, causal')]
"""

import sys
from typing import cast

from flax_attn.everywhere.switch import Everywhere

__all__ = ["everywhere"]

sys.modules[__name__].__class__ = Everywhere
everywhere = cast("Everywhere", sys.modules[__name__])
