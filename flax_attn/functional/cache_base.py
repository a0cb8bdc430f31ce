"""The base class of caches: how many tokens each row has, and the positions of new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from attn_spec.cache_checks import Shapes, check_cache_dtype, check_cache_shapes
from flax_attn.functional.mask_part import Count
from flax_attn.functional.shapes import ArrayLike

C = TypeVar("C", bound="Cache")


class Cache:
    """Base class of caches: what a layer keeps of the tokens so far.

    Each row of the batch has its own number of tokens.

    A kind of cache is a frozen dataclass. It is a pytree of fixed shapes: its fields are arrays,
    but for those that `static` names and for a length that is an integer.

    Attributes:
        length: how many tokens of each row were cached, `(b,)`; -1 in a row that is invalid. An
            integer is for all rows, and stays static.
        static: names of the fields that are no arrays.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class LastToken(Cache):
        ...     token: Any
        ...     length: Any
        ...     @property
        ...     def batch(self):
        ...         return self.token.shape[:-1]
        >>> LastToken(jnp.zeros((2, 4)), jnp.array([3, 5])).positions(2).tolist()
        [[3, 4], [5, 6]]
    """

    length: Count
    static: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(
            cls, _flatten, lambda names, children: _unflatten(cls, names, children)
        )

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch: `(b,)`, or `()` of one sequence."""
        raise NotImplementedError

    @property
    def arrays(self) -> Mapping[str, Any]:
        """What is stored, by the names of the fields: all but the length and what is static."""
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {name: getattr(self, name) for name in names if name not in ("length", *self.static)}

    def replace(self: C, **changes: Any) -> C:
        """Return the cache with other values of some fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def check_shapes(self, wanted: Shapes) -> None:
        """Raise unless the arrays are floating point and have these shapes, by field name."""
        for array in self.arrays.values():
            check_cache_dtype(array.dtype.name)
        check_cache_shapes({name: array.shape for name, array in self.arrays.items()}, wanted)

    @property
    def row_lengths(self) -> Integer[Array, "*b"]:
        """The length of each row."""
        return jnp.broadcast_to(jnp.asarray(self.length, jnp.int32), self.batch)

    @property
    def invalid(self) -> Bool[Array, "*b"]:
        """The rows that were given tokens that do not fit, or impossible lengths."""
        return self.row_lengths < 0

    def positions(self, t: int, lengths: ArrayLike | int | None = None) -> Integer[Array, "*b t"]:
        """Return the positions of the next `t` tokens in their sequences; 0 for padding.

        The first `lengths` tokens of a row are real, and the rest is padding.
        """
        cached = self.row_lengths
        new = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (*cached.shape, t))
        if lengths is None:
            return cached[..., None] + new
        # Positions of padding could lie beyond a table of positions that is large enough for the
        # tokens.
        real = new < jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), cached.shape)[..., None]
        return jnp.where(real, cached[..., None] + new, 0)


def _flatten(cache: Any):
    values = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    fixed = (*cache.static, "length") if isinstance(cache.length, int) else cache.static
    static = tuple((name, values.pop(name)) for name in fixed)
    return tuple(values.values()), (tuple(values), static)


def _unflatten(cls: type, names: Any, children: Any) -> Any:
    cache = object.__new__(cls)  # children may be placeholders: nothing is checked
    for name, value in (*zip(names[0], children, strict=True), *names[1]):
        object.__setattr__(cache, name, value)
    return cache
