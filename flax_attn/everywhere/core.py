"""The call of attention that all replacements and adapters make."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Array

from flax_attn.attention import attend as attend_here
from flax_attn.backends.platform import varying
from flax_attn.everywhere import reports
from flax_attn.everywhere.context import in_use
from flax_attn.everywhere.dispatch import PLACE
from flax_attn.everywhere.dropout import SharedDropout, say_what_differs
from flax_attn.everywhere.empty_rows import with_means
from flax_attn.everywhere.known_masks import with_known
from flax_attn.everywhere.target import LeftAlone
from flax_attn.functional.cache_base import Cache
from flax_attn.functional.masks import Mask, as_mask
from flax_attn.functional.outputs import Outputs
from flax_attn.sharding.explain import Explanation, explain


@contextmanager
def refusals() -> Iterator[None]:
    """Leave a call alone where this library, or `jnp.asarray`, refuses an argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise LeftAlone(str(error)) from error


def arguments(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names in the original, which refuses wrong ones."""
    with refusals():
        return inspect.signature(original).bind(*args, **kwargs).arguments


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    *,
    asked: str = "",
    return_weights: bool = False,
    counted: bool = True,
    **options: Any,
) -> Outputs[Cache]:
    """Return `flax_attn.attend` of a call, and count it.

    Other libraries hide keys by a large negative score, so that a row that sees no key gives the
    mean of all values, and weights of `1 / s`: so it is here, with their gradients.

    Args:
        query: query, as for `flax_attn.attend`, whose other arguments are those that are not named
            here.
        key: key.
        value: value.
        bias: bias.
        mask: mask.
        asked: what the call is, in a few words, for the report.
        return_weights: whether to return the weights, after dropout.
        counted: whether to count it; False for a call that computes a part of another.
        **options: options of `flax_attn.attend`.

    Raises:
        LeftAlone: if this library refuses the call, before any work.
    """
    dropout = options.get("dropout")
    with refusals():
        mask = with_known(as_mask(mask), query.shape[-3], key.shape[-3])
        # It checks the arguments and chooses the backend without computing anything.
        found = explain(query, key, value, bias, mask, **options)
    if found.division is not None and isinstance(dropout, SharedDropout):
        # What drops the weights of a part of a call counts all rows and heads.
        raise LeftAlone("dropout that is shared over rows and heads, on a mesh that divides them")
    # The formula is what the original computes, too.
    if varying(query) and found.backend == "reference":
        raise LeftAlone("inside jax.shard_map, where most kernels need check_vma=False")
    # Adapters, which are passed by hand, have no run before that this one could differ from.
    if dropout is not None and in_use().targets:
        say_what_differs()
    outputs = attend_here(query, key, value, bias, mask, return_weights=return_weights, **options)
    if counted:
        _count(query, key, found, asked)
    return with_means(outputs, value, mask)


def _count(query: Array, key: Array, found: Explanation, asked: str) -> None:
    shapes = f"q{list(query.shape)} k{list(key.shape)} {query.dtype}"
    entry = reports.ReportedCall(
        line=reports.user_place(),
        place=PLACE.get(),
        asked=f"{shapes}, {asked}" if asked else shapes,
        backend=found.backend,
        before=found.memory["reference"],
        after=found.memory[found.backend or "reference"],
    )
    reports.add(entry)
