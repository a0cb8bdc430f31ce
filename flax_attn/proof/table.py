"""The rows of the table of variants, as pairs and reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import pack
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.parity.adapters.adapter import Adapter, Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recorder, Recording
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.compare import on_cpu, report_on
from flax_attn.parity.pair import Pair, weight_map
from flax_attn.parity.report.report import Report
from flax_attn.proof.variants import Variant

# What `make parity` climbs: the rest of the ladder is tested on some rows.
DEFAULT_CHECKS = ("forward", "gradients", "float32", "jit = eager", "dropout", "unbatched", "cache = full", "training")


def pair_of(variant: Variant, seed: int = 0, *, record: bool = False) -> Pair:
    """Return both sides of a row, with parameters and inputs drawn at random. JAX must have x64 enabled.

    Args:
        variant: the row.
        seed: of the weights and inputs.
        record: whether what the PyTorch side results is kept, to be exported.
    """
    inputs, torch = variant.draw(np.random.default_rng(seed)), _torch_side(variant)
    return _paired(variant, Recorder(torch) if record else torch, inputs, seed)


def replayed(variant: Variant, recording: Recording, device: Any = None) -> Pair:
    """Return the Flax side of a row beside what was recorded of its PyTorch side; lower dtypes run on `device`."""
    return _paired(variant, recording, recording.inputs, recording.about["seed"], device)


def _paired(variant: Variant, torch: Adapter, inputs: Arrays, seed: int, device: Any = None) -> Pair:
    module = _flax_module(variant)
    flax = JaxAdapter(module, _call(variant, flax_attn, module), _in_steps(variant, flax_attn, jnp), device=device)
    if flax.shapes:
        flax.entries = weight_map(module, flax.shapes, torch.shapes, convert.LAYOUTS["torch_ref"])
    return Pair(flax, torch, inputs, flax.entries, seed, redraw=not isinstance(torch, Recording))


def climb(variant: Variant, seed: int = 0, checks: Sequence[str] | None = None, pair: Pair | None = None) -> Report:
    """Return the report of a row: the checks of these names, or the rungs of the table and every layout of weights."""
    with on_cpu():
        pair = pair_of(variant, seed) if pair is None else pair
        rungs = DEFAULT_CHECKS if checks is None else checks
        report = report_on(pair, variant.name, rungs, wanted=checks is not None, locate=checks is not None)
        if checks is None and pair.has_parameters:
            report.checks.insert(-1, layouts(_flax_module(variant)))
        return report


def layouts(module: nnx.Module) -> Check:
    """Round trip, bit for bit, and an index probe of every layout that can hold the module."""
    errors, held = {}, []
    for layout in convert.LAYOUTS:
        try:
            weights = convert.state_dict(module, layout)
        except convert.ConversionError:
            continue  # this layout says that it cannot hold the module: the note lists those that can
        held.append(layout)
        errors |= {f"{layout}: {name}": wrong for name, wrong in _probe(module, layout, weights)}
    return worst_of("layouts", errors, 0.0, ", ".join(held))


def _probe(module: nnx.Module, layout: str, weights: dict[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    # Number every element of every entry, load, and store again: a lost, doubled or moved element comes back changed.
    # Then the numbers inside the module: each must be there once.
    numbers, start = {}, 1
    for name, array in weights.items():
        numbers[name] = np.arange(start, start + array.size, dtype=array.dtype).reshape(array.shape)
        start += array.size
    copy = nnx.clone(module)
    for entries in (weights, numbers):
        convert.load_state_dict(copy, entries, layout)
        again = convert.state_dict(copy, layout)
        for name, array in entries.items():
            yield name, float((again[name] != array).sum())
    held = np.sort(np.concatenate([np.ravel(p) for p in jax.tree.leaves(nnx.state(copy, nnx.Param))]))
    yield "every element once", float((held != np.arange(1, start)).sum())


def _flax_module(variant: Variant) -> nnx.Module:
    rngs = nnx.Rngs(jax.random.key(0, impl="unsafe_rbg"))  # quick to compile, and overwritten anyway
    return variant.build(flax_attn, param_dtype=jnp.float64, rngs=rngs)


def _torch_side(variant: Variant) -> Adapter:
    import torch

    import torch_ref
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter

    module = variant.build(torch_ref)
    return TorchAdapter(module, _call(variant, torch_ref, module), _in_steps(variant, torch_ref, torch))


def _call(variant: Variant, package: Any, module: Any) -> Callable:
    accepted = _accepted(module)

    def call(module, *inputs, lengths=None, dropout_key=None):
        options = _weigh(module) | dict(variant.call(package))
        if dropout_key is not None and "dropout_key" in accepted:
            options["dropout_key"] = dropout_key
        if lengths is not None:
            options["mask"] = package.Mask.lengths(query=lengths, key=lengths) & options.get("mask", package.Mask())
        result = module(*inputs, **options)
        return dict(zip(("output", "weights"), result if isinstance(result, tuple) else (result,), strict=False))

    def without_lengths(module, *inputs, dropout_key=None):
        return call(module, *inputs, dropout_key=dropout_key)

    return call if "mask" in accepted else without_lengths


def _accepted(module: Any) -> Any:
    return inspect.signature(getattr(module, "forward", module.__call__)).parameters


def _weigh(module: Any) -> dict[str, bool]:
    return {"return_weights": True} if "return_weights" in _accepted(module) else {}


def _in_steps(variant: Variant, package: Any, arrays: Any) -> Callable | None:
    """Return the call that computes a row with a cache, chunk by chunk; `arrays` is the library of the package's."""
    if not variant.chunks:
        return None

    def call(module, x):
        options, total, start, found = dict(variant.call(package)), x.shape[1], 0, []
        positions = options.pop("positions", None)
        cache = module.init_cache(len(x), total if variant.capacity is None else variant.capacity)
        for size in variant.chunks:
            now, before, start = slice(start, start + size), cache, start + size
            placed = {} if positions is None else {"positions": positions[:, now]}
            *outputs, cache = module(x[:, now], cache=cache, **options, **placed, **_weigh(module))
            found.append((outputs[0], *(_in_order(w, before, cache, total, arrays) for w in outputs[1:])))
        joined = (pack(parts, shape)[0] for parts, shape in zip(zip(*found, strict=True), _PACKED, strict=False))
        return dict(zip(("output", "weights"), joined, strict=False))

    return call


_PACKED = ("b * d", "b n * s")


def _in_order(weights: Any, before: Any, after: Any, total: int, arrays: Any) -> Any:
    # The keys of a cache that rolls stand in any order, beside the new ones where these do not fit in.
    places = after.key_positions
    if weights.shape[-1] != after.capacity:
        places = pack([before.key_positions, before.positions(weights.shape[-2])], "b *")[0]
    here = places[:, None, None, :, None] == arrays.arange(total, dtype=places.dtype)[None, None, None, None]
    return arrays.where(here, weights[..., None], 0).sum(-2)
