"""Faults of attention over tokens split among devices, each patched into `flax_attn.sharding`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn.backends.softmax import Softmax
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.token_runs import Places
from flax_attn.sharding import attention, ring_schedule, shards, strategies, zigzag_order


@dataclass(frozen=True)
class MeshFault:
    """A fault of attention in a ring of devices.

    Args:
        what: what goes wrong, in one sentence.
        target: class or file that is patched.
        attribute: attribute of the target.
        replacement: new value of the attribute.
        wrong: output and gradients that then differ from those of one device.
        balance: balance of the causal work under which the fault shows.
    """

    what: str
    target: Any
    attribute: str
    replacement: Callable[..., Any]
    wrong: frozenset[str]
    balance: str = "none"


def _twice(with_sinks: Callable, self: Softmax, sinks: Any) -> Softmax:
    return with_sinks(with_sinks(self, sinks), sinks)


def _in_each_shard(division: Any, size: int) -> Places:
    return Places(jnp.zeros(1, jnp.int32), size)


def _without_maximum(one: Softmax, other: Softmax) -> Softmax:
    total = one.total + other.total
    safe = jnp.where(total == 0, 1, total)
    output = one.output * (one.total / safe).swapaxes(1, 2)
    output += other.output * (other.total / safe).swapaxes(1, 2)
    return Softmax(output, jnp.maximum(one.top, other.top), total)


def _by_shard(rate: float, key: Any, places: Any) -> KeyedDropout:
    return KeyedDropout(rate, key)


def _stays_abroad(send: Callable, self: Any, pieces: Any, hops: int, last: Any = None) -> Any:
    return pieces if hops < -1 else send(self, pieces, hops, last)


def _of_last_piece(self: Places, array: Any, part: Any, axis: int) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(
        jnp.zeros_like(array), part.astype(array.dtype), self.starts[0], axis
    )


def _wraps(function: Callable, replacement: Callable) -> Callable:
    return lambda *arguments, **options: replacement(function, *arguments, **options)


# What most faults change, beside the output.
_INPUTS = frozenset({"query", "key", "value"})
FAULTS = (
    MeshFault("A sink is counted twice.", Softmax, "with_sinks", _wraps(Softmax.with_sinks, _twice),
              _INPUTS | {"output", "bias", "sinks"}),
    MeshFault("Positions are counted in each shard.", attention, "_token_places", _in_each_shard,
              _INPUTS | {"output", "bias"}),
    MeshFault("Two parts of a softmax are added without their maxima.",
              Softmax, "fold", _without_maximum, _INPUTS | {"output"}),
    MeshFault("The inverse of the zigzag order is the order itself.",
              strategies, "exchange_back", zigzag_order.exchange, frozenset({"output", "query"}),
              "zigzag"),
    MeshFault("Dropout goes by the index in a shard.",
              shards, "PlacedDropout", _by_shard, _INPUTS | {"output"}),
    MeshFault("Gradients of keys and values stay where they were computed.",
              ring_schedule.Route, "send",
              _wraps(ring_schedule.Route.send, _stays_abroad), frozenset({"key", "value"})),
    MeshFault("The gradient of a bias is that of the last piece alone.",
              Places, "put", _of_last_piece, frozenset({"bias"})),
)  # fmt: skip
