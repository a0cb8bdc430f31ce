"""What a call asks for, in a few words."""

from typing import Any

from jaxtyping import Array


def asked_for(query: Array, key: Array, **options: Any) -> str:
    """Return the options that a call has, by name, and whether heads share keys.

    Example:
        >>> import jax.numpy as jnp
        >>> asked_for(jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8)), causal=True, bias=None)
        'GQA, causal'
    """
    words = ["GQA"] if query.shape[-2] != key.shape[-2] else []
    for name, value in options.items():
        # An array has no truth value, and one of a single 0 is there all the same.
        is_array = hasattr(value, "shape")
        if is_array or value not in (None, False, {}):
            words.append(name)
    return ", ".join(words)
