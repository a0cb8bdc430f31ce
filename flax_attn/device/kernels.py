"""Our backends, and beside them the kernels that they wrap or rival, called plainly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flax_attn.attention import dot_product_attention
from flax_attn.backends.band import has_lengths, is_band, sides
from flax_attn.backends.call import Call, prepare
from flax_attn.backends.tokamax import attend_with
from flax_attn.functional.mask_parts import Lengths


@dataclass(frozen=True)
class ComparedKernel:
    """One way to compute a call.

    Args:
        name: name of the backend, and of its implementation where there are several.
        ours: function that takes the arguments of `dot_product_attention`.
        plain: kernel of another library that ours wraps or rivals, called without us, with the
            same arguments; or None.
    """

    name: str
    ours: Callable[..., Array]
    plain: Callable[..., Array] | None = None


def kernel(name: str) -> ComparedKernel:
    """Return a backend and the kernel that it wraps or rivals, by name.

    `"tokamax triton"` is one of two implementations.

    Example:
        >>> kernel("blocked").plain is None
        True
    """
    backend, _, implementation = name.partition(" ")
    if implementation:
        ours = partial(_tokamax, implementation)
    else:
        ours = partial(dot_product_attention, backend=name)
    plain = {
        "cudnn": partial(_jax, "cudnn"),
        "reference": partial(_jax, "xla"),
        "tokamax": partial(_plain_tokamax, implementation or "mosaic_gpu"),
    }
    return ComparedKernel(name, ours, plain.get(backend))


def _tokamax(implementation: str, query, key, value, bias=None, mask=None, **options: Any) -> Array:
    return attend_with(prepare(query, key, value, bias, mask, **options), implementation)


def _jax(implementation: str, query, key, value, bias=None, mask=None, **options: Any) -> Array:
    check_parts("jax.nn", options, ("soft_cap", "sinks", "dropout", "score"))
    call = prepare(query, key, value, bias, mask, **options)
    return _call(jax.nn.dot_product_attention, implementation, call)


def _plain_tokamax(
    implementation: str, query, key, value, bias=None, mask=None, **options: Any
) -> Array:
    check_parts("tokamax", options, ("sinks", "dropout", "score"))
    call = prepare(query, key, value, bias, mask, **options)
    # It need not be installed.
    tokamax = import_module("tokamax")
    soft_cap = call.soft_cap
    attend = tokamax.dot_product_attention
    attend = partial(attend, logits_soft_cap=soft_cap)
    return _call(attend, implementation, call)


def check_parts(library: str, given: Mapping[str, Any], lacks: Sequence[str]) -> None:
    """Raise if a call is given a part that a library has not.

    Without it a kernel would be fast, and another function.

    Raises:
        ValueError: if so.
    """
    missing = [name for name in lacks if given.get(name) is not None]
    if missing:
        parts = ", ".join(missing)
        raise ValueError(f"{library} has no {parts}; got a call with one. Compare another kernel")


def _call(attend: Callable[..., Array], implementation: str, call: Call) -> Array:
    options = {"scale": call.scale, "bias": call.bias, "implementation": implementation}
    return attend(call.query, call.key, call.value, **options, **_mask(call))


def _mask(call: Call) -> dict[str, Any]:
    """Return the mask as a user would write it: what has a name there, else one array."""
    _, _, t, s = call.shape
    left, right = sides(call)
    # At t != s the named sides mean other keys there than our offset does.
    moved = t != s and (left, right) != (None, None)
    named = is_band(replace(call, bias=None))
    if moved or not named:
        return {"mask": _whole(call, t, s)}
    options: dict[str, Any] = {"is_causal": right == 0}
    if left is not None:
        # An open side of a window is written as one that reaches to the end.
        end = s if right is None else right
        options["local_window_size"] = left, end
    if has_lengths(call):
        options["key_value_seq_lengths"] = _key_lengths(call)
    return options


def _whole(call: Call, t: int, s: int) -> Array:
    block = call.mask.block(jnp.arange(t), jnp.arange(s))
    return jnp.broadcast_to(block, (*block.shape[:2], t, s))


def _key_lengths(call: Call) -> Any:
    return next(part.key for part in call.mask.parts if isinstance(part, Lengths))
