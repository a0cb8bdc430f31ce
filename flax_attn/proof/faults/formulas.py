"""Rows for the faults that no module of the table can show: calls of the functional core, without parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from einops import pack

import flax_attn
import torch_ref
from flax_attn.parity.adapters.adapter import Adapter
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.pair import Pair
from flax_attn.proof.variants import Shape

SOFT_CAP = 1.5
FIRST_CHUNK = 3  # of 5 tokens


@dataclass(frozen=True)
class Formula:
    """A row that is a function of arrays.

    Args:
        name: of the row.
        inputs: shapes by name.
        call: `call(package, **inputs)`, `package` being `flax_attn` or `torch_ref`.
        cached: the same, computed in steps.
    """

    name: str
    inputs: Mapping[str, Shape]
    call: Callable[..., Any]
    cached: Callable[..., Any] | None = None

    def pair(self, seed: int = 0) -> Pair:
        """Return both sides, with inputs drawn at random. JAX must have x64 enabled."""
        random = np.random.default_rng(seed)
        inputs = {name: random.normal(size=shape) for name, shape in self.inputs.items()}
        return Pair(self._side(JaxAdapter, flax_attn), self._side(TorchAdapter, torch_ref), inputs, seed=seed)

    def _side(self, side: Callable[..., Adapter], package: ModuleType) -> Adapter:
        cached = None if self.cached is None else partial(_called, partial(self.cached, package))
        return side(lambda **inputs: self.call(package, **inputs), None, cached, positional=False)


def _called(call: Callable, function: Callable, **inputs: Any) -> Any:
    return call(**inputs)


def _soft_cap_and_sinks(package, query, key, value, bias, sinks):
    options = {"soft_cap": SOFT_CAP, "sinks": sinks, "return_weights": True}
    return _named(package.dot_product_attention(query, key, value, bias, package.Mask.causal(), **options))


def _t5(package, query, key, value, table):
    positions = np.arange(query.shape[1])
    bias = package.t5_bias(table, positions, positions, max_distance=8)
    return _named(package.dot_product_attention(query, key, value, bias, scale=1.0, return_weights=True))


def _rope(package, query, key, value):
    query, key = package.RoPE()(query), package.RoPE()(key)
    return {"output": package.dot_product_attention(query, key, value, mask=package.Mask.causal())}


def _rope_in_chunks(package, query, key, value):
    chunks = []
    for start, stop in ((0, FIRST_CHUNK), (FIRST_CHUNK, query.shape[1])):
        asking = package.RoPE()(query[:, start:stop], np.arange(start, stop))
        seen = package.RoPE()(key[:, :stop], np.arange(stop))
        mask = package.Mask.causal(offset=start)
        chunks.append(package.dot_product_attention(asking, seen, value[:, :stop], mask=mask))
    return {"output": pack(chunks, "b * n v")[0]}


def _named(result):
    return dict(zip(("output", "weights"), result, strict=True))


_GROUPED = {"query": (3, 5, 4, 6), "key": (3, 5, 2, 6), "value": (3, 5, 2, 7)}

SINKS = Formula("soft_cap_and_sinks", {**_GROUPED, "bias": (4, 5, 5), "sinks": (4,)}, _soft_cap_and_sinks)
T5 = Formula("t5_bias", {**_GROUPED, "table": (8, 4)}, _t5)
ROPE_CHUNKS = Formula("rope_in_chunks", _GROUPED, _rope, _rope_in_chunks)
