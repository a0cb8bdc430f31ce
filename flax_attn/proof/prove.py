"""Each variant of the table as a pair of modules, and the report on it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import pack, rearrange
from flax import nnx

import flax_attn
from flax_attn import convert
from flax_attn.parity.adapters.adapter import Adapter, Arrays
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter, file_name
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.compare import report_on
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.pair import Pair
from flax_attn.parity.report.report import Report
from flax_attn.parity.weight_map import weight_map
from flax_attn.proof.build import drawn
from flax_attn.proof.many_rows import many_rows, takes_many_rows
from flax_attn.proof.placement import placement
from flax_attn.proof.variants import Variant

Chunks = list[tuple[np.ndarray, np.ndarray]]
QUICK_CHECKS = ("forward", "gradients", "float32", "dropout", "unbatched", "cache = full")
# The last two take as long as all the others together.
FULL_CHECKS = (*QUICK_CHECKS, "jit = eager", "training")


def pair_of(variant: Variant, seed: int = 0, *, record: bool = False) -> Pair:
    """Return both modules of a variant, with parameters and inputs drawn at random.

    JAX must have x64 enabled.

    Args:
        variant: row of the table.
        seed: seed of the weights and inputs.
        record: whether to keep the PyTorch results for an export.
    """
    inputs = variant.draw(np.random.default_rng(seed))
    torch = _torch_adapter(variant)
    return _paired(variant, RecordingAdapter(torch) if record else torch, inputs, seed)


def pair_with(variant: Variant, recording: Recording, device: Any = None) -> Pair:
    """Return the Flax module of a variant with a recording of the PyTorch one.

    Lower dtypes run on `device`.
    """
    return _paired(variant, recording, recording.inputs, recording.about["seed"], device)


def pair_from(
    variant: Variant, seed: int, export: str | None, against: str | None, device: Any = None
) -> Pair:
    """Return the pair of a variant with PyTorch or with an export.

    PyTorch is recorded if there is a folder to export to.
    """
    if against:
        file = Path(against, f"{file_name(variant.name)}.safetensors")
        return pair_with(variant, Recording(file), device)
    return pair_of(variant, seed, record=bool(export))


def _paired(
    variant: Variant, torch: Adapter, inputs: Arrays, seed: int, device: Any = None
) -> Pair:
    module = _flax_module(variant)
    layout = convert.LAYOUTS["torch_ref"]
    calls = _call(variant, flax_attn, module), _cached_call(variant, flax_attn, jnp)
    flax = JaxAdapter(module, *calls, device=device, place=placement(variant, module))
    if flax.shapes:
        entries = weight_map(module, flax.shapes, torch.shapes, layout, flax.statistics)
        flax.share(entries)
    return Pair(
        flax,
        torch,
        inputs,
        flax.entries,
        seed,
        redraw=not isinstance(torch, Recording),
        layout=layout,
    )


def prove(
    variant: Variant,
    seed: int = 0,
    checks: Sequence[str] | None = None,
    *,
    full: bool = False,
    pair: Pair | None = None,
) -> Report:
    """Return the report of a variant.

    Args:
        variant: row of the table.
        seed: seed of the weights and inputs.
        checks: names of checks; None is those of the variant, or `QUICK_CHECKS`, all layouts of the
            weights and `many_rows`.
        full: whether None is `FULL_CHECKS` instead.
        pair: pair of the variant, if there is one already.
    """
    with on_cpu():
        pair = pair_of(variant, seed) if pair is None else pair
        wanted = checks is not None
        names = checks if wanted else variant.checks or (FULL_CHECKS if full else QUICK_CHECKS)
        report = report_on(
            pair, variant.name, names, wanted=wanted, locate=wanted, call_first=False
        )
        # Rows of real sizes have the layouts of the small ones.
        if not wanted and not variant.checks and pair.has_parameters:
            report.checks.append(layouts(_flax_module(variant)))
        if checks is None and not variant.checks and takes_many_rows(variant):
            report.checks.append(many_rows(pair))
        return report


def layouts(module: nnx.Module) -> Check:
    """Round trip, bit for bit, and an index probe of every layout that can represent the module."""
    errors = {}
    names = []
    for layout in convert.LAYOUTS:
        try:
            weights = convert.state_dict(module, layout)
        except convert.ConversionError:
            # This layout cannot represent the module: the note lists those that can.
            continue
        names.append(layout)
        for name, wrong in _probe(module, layout, weights):
            errors[f"{layout}: {name}"] = wrong
    return worst_of("layouts", errors, 0.0, ", ".join(names))


def _probe(
    module: nnx.Module, layout: str, weights: dict[str, np.ndarray]
) -> Iterator[tuple[str, float]]:
    # Every element of every entry has a number of its own.
    numbers = {}
    start = 1
    for name, array in weights.items():
        end = start + array.size
        numbers[name] = np.arange(start, end, dtype=array.dtype).reshape(array.shape)
        start = end
    copy = nnx.clone(module)
    # Loaded and stored again, a lost, doubled or moved element comes back changed.
    for entries in (weights, numbers):
        convert.load_state_dict(copy, entries, layout)
        again = convert.state_dict(copy, layout)
        for name, array in entries.items():
            yield name, float((again[name] != array).sum())
    # Inside the module each number must be there once.
    loaded = [np.ravel(tensor[...]) for tensor in convert.tensors(copy).values()]
    found = np.sort(np.concatenate(loaded))
    yield "every element once", float((found != np.arange(1, start)).sum())


def _flax_module(variant: Variant) -> nnx.Module:
    return drawn(lambda: variant.build(flax_attn, param_dtype=jnp.float64, rngs=nnx.Rngs(0)))


def _torch_adapter(variant: Variant) -> Adapter:
    import torch

    import torch_ref
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter

    module = variant.build(torch_ref)
    calls = _call(variant, torch_ref, module), _cached_call(variant, torch_ref, torch)
    return TorchAdapter(module, *calls)


def _call(variant: Variant, package: ModuleType, module: Any) -> Callable:
    accepted = _parameters(module)
    function = variant.function and variant.function(package)

    def call(module, *inputs, lengths=None, dropout_key=None):
        options = dict(variant.call(package))
        if dropout_key is not None and "dropout_key" in accepted:
            options["dropout_key"] = dropout_key
        if lengths is not None:
            padding = package.Mask.lengths(query=lengths, key=lengths)
            options["mask"] = padding & options.get("mask", package.Mask())
        if function is not None:
            return {"output": function(module, *inputs, **options)}
        if not weighs(module):
            return {"output": module(*inputs, **options)}
        attended = module.attend(*inputs, return_weights=True, **options)
        return {"output": attended.output, "weights": attended.weights}

    def without_lengths(module, *inputs, dropout_key=None):
        return call(module, *inputs, dropout_key=dropout_key)

    # What a call takes is read from its signature.
    return call if "mask" in accepted else without_lengths


def _parameters(module: Any) -> Any:
    return inspect.signature(getattr(module, "forward", module.__call__)).parameters


def _cached_call(variant: Variant, package: ModuleType, arrays: Any) -> Callable | None:
    """Return the call that computes a variant with a cache, in chunks.

    `arrays` is the package's array library.
    """
    if not variant.chunks:
        return None

    def call(module, x):
        total = x.shape[1]
        chunks = _chunks(variant, *x.shape[:2])
        options = dict(variant.call(package))
        if weighs(module):
            options["return_weights"] = True
        outputs, weights = [], []
        for attended, before in _steps(module, x, chunks, variant.capacity or total, options):
            outputs.append(attended.output)
            if attended.weights is not None:
                in_order = _in_order(attended.weights, before, attended.cache, total, arrays)
                weights.append(in_order)
        places = _places(chunks, total)
        found = {"output": arrays.concatenate(outputs, 1)[places]}
        if weights:
            placed = arrays.concatenate(weights, 1)[places]
            found["weights"] = rearrange(placed, "b t n s -> b n t s")
        return found

    return call


def _places(chunks: Chunks, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each token in what all chunks return, one behind the other."""
    # Rows may be at different tokens in one step, and padding comes behind all of them.
    tokens = np.concatenate([tokens for tokens, _ in chunks], axis=1)
    order = np.argsort(tokens, stable=True)
    return np.arange(len(tokens))[:, None], order[:, :total]


def _steps(
    module: Any, x: Any, chunks: Chunks, capacity: int, options: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield what the module returns for each chunk, and the cache before it."""
    rows = np.arange(len(x))[:, None]
    positions = options.pop("positions", None)
    cache = module.init_cache(len(x), capacity)
    for tokens, lengths in chunks:
        before = cache
        # The last token stands in for padding, which `lengths` tells from it.
        now = rows, np.minimum(tokens, x.shape[1] - 1)
        own = {} if positions is None else {"positions": positions[now]}
        if np.any(tokens == x.shape[1]):
            own["lengths"] = lengths
        attended = module.attend(x[now], cache=cache, **options, **own)
        cache = attended.cache
        yield attended, before


def _chunks(variant: Variant, b: int, total: int) -> Chunks:
    """Return the indices `(b, t)` of the tokens of each step, and how many tokens each row has.

    The index of padding is `total`.
    """
    chunks = []
    start = np.zeros((b, 1), int)
    for size in variant.chunks:
        lengths = np.full(b, size)
        steps = np.arange(lengths.max())
        real = steps < lengths[:, None]
        chunks.append((np.where(real, start + steps, total), lengths))
        start = start + lengths[:, None]
    return chunks


def _in_order(weights: Any, before: Any, after: Any, total: int, arrays: Any) -> Any:
    positions = after.key_positions
    # The keys of a ring buffer are in any order; new ones that do not fit are beside them.
    if weights.shape[-1] != after.capacity:
        positions = _beside(before, weights.shape[-2])
    tokens = arrays.arange(total, dtype=positions.dtype)
    here = rearrange(positions, "b s -> b 1 1 s 1") == rearrange(tokens, "t -> 1 1 1 1 t")
    return rearrange(arrays.where(here, weights[..., None], 0).sum(-2), "b n t s -> b t n s")


def _beside(cache: Any, count: int) -> Any:
    """Return the positions of cached keys and, behind them, those of new ones."""
    positions, _ = pack([cache.key_positions, cache.positions(count)], "b *")
    return positions


def weighs(module: Any) -> bool:
    """Return whether a module has a method `attend`, a call that also returns attention weights."""
    method = getattr(module, "attend", None)
    return method is not None and "return_weights" in inspect.signature(method).parameters
