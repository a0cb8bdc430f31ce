"""Run each norm of a model by itself on features with a large mean.

A residual connection hides the error of such a norm in the outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import RecordingAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import jax_hooks
from flax_attn.parity.trace.alignment import IMAGES
from flax_attn.parity.trace.hooks import ROOT, floats, numpy64
from flax_attn.parity.trace.pairing import pair_paths
from flax_attn.parity.trace.substitute import Evidence, Target, relative

OFFSET = 1e3


def norms_at_an_offset(pair: Pair) -> list[tuple[Evidence, float]]:
    """Return the evidence on each norm for inputs with a mean of 1e3, and PyTorch's rounding.

    The rounding is the error of PyTorch's norm in float32. Norms are submodules that PyTorch calls
    so, `LayerNorm` or `LlamaRMSNorm`; their counterparts are found where the Flax side is of NNX or
    Equinox, whose modules can be called one by one.
    """
    torch = pair.torch.adapter if isinstance(pair.torch, RecordingAdapter) else pair.torch
    theirs = getattr(torch, "module", None)
    if not isinstance(pair.flax, JaxAdapter) or not hasattr(theirs, "named_modules"):
        return []
    built = pair.flax.built()
    ours = {ROOT: built, **jax_hooks.submodules(built)}
    norms = _norms(theirs)
    names = {
        path: name for path, name in pair_paths(pair.entries, ours, norms).items() if name in norms
    }
    given = _inputs_of(pair, torch, set(names.values())) if names else {}
    found = (
        _evidence(ours[path], theirs, name, given[name])
        for path, name in names.items()
        if name in given
    )
    return [evidence for evidence in found if evidence is not None]


def _norms(module: Any) -> list[str]:
    return [
        path or ROOT
        for path, inner in module.named_modules()
        if "norm" in type(inner).__name__.lower()
    ]


def _within(module: Any, name: str) -> Any:
    return module if name == ROOT else module.get_submodule(name)


def _inputs_of(pair: Pair, adapter: Any, wanted: set[str]) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the floating inputs of each norm's first call, the first input with the offset."""
    module, found = copy.deepcopy(adapter.module).eval(), {}

    def keep(name: str, _: Any, args: tuple, kwargs: dict) -> None:
        first, *others = (numpy64(x) for x in floats((args, kwargs)))
        found.setdefault(name, (first + OFFSET, *others))

    for name in wanted:
        _within(module, name).register_forward_pre_hook(partial(keep, name), with_kwargs=True)
    adapter.call(module, adapter.arrays(pair.inputs), adapter.arrays(pair.extras))
    return found


def _evidence(
    ours: Any, theirs: Any, name: str, given: tuple[np.ndarray, ...]
) -> tuple[Evidence, float] | None:
    import torch  # where both sides are run

    norm = copy.deepcopy(_within(theirs, name)).eval()
    with torch.no_grad():
        expected = numpy64(norm(*map(torch.from_numpy, given)))
        single = numpy64(norm.float()(*(torch.from_numpy(x).float() for x in given)))
    for flax in _calls(ours, given):
        if flax.shape == expected.shape:
            evidence = Evidence(
                name, "module", [Target("output", flax, expected)], {"input": given[0]}
            )
            return evidence, relative(single, expected)
    return None


def _calls(norm: Any, given: tuple[np.ndarray, ...]) -> Iterator[np.ndarray]:
    """Yield what the Flax norm returns, of the axes as they are and of channels last."""
    orders = [(lambda x: x, lambda y: y)]
    orders += [(IMAGES.to_flax, IMAGES.to_torch)] if given[0].ndim > 2 else []
    for there, back in orders:
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                yield back(
                    numpy64(norm(*(jnp.asarray(np.ascontiguousarray(there(x))) for x in given)))
                )
        except (
            Exception
        ):  # it takes other arguments, or other axes: then it is judged by outputs alone
            continue


def offset_errors(pair: Pair) -> dict[str, float]:
    """Return the error of each norm within a model over the allowed one, by name."""
    found = [
        (evidence, rounding)
        for evidence, rounding in norms_at_an_offset(pair)
        if evidence.name != ROOT
    ]
    errors = {f"{evidence.name} by itself": evidence.error for evidence, _ in found}
    rounding = {f"{evidence.name} by itself": rounding for evidence, rounding in found}
    return tolerance.conditioned(errors, rounding, tolerance.FORWARD)
