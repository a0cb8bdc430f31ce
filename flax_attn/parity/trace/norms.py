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
from flax_attn.parity.adapters.adapter import float64
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import RecordingAdapter
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.pairing import pair_paths
from flax_attn.parity.trace.scopes import submodules

OFFSET = 1e3


def offset_errors(pair: Pair) -> dict[str, float]:
    """Return the error of each norm within a model over the allowed one, by name.

    Norms are submodules that PyTorch calls so, `LayerNorm` or `LlamaRMSNorm`; their counterparts
    are found where the JAX side is of NNX or Equinox, whose modules can be called one by one. What
    rounding moves in PyTorch's norm is allowed.
    """
    torch = pair.torch.adapter if isinstance(pair.torch, RecordingAdapter) else pair.torch
    theirs: Any = getattr(torch, "module", None)
    if not isinstance(pair.flax, JaxAdapter) or not hasattr(theirs, "named_modules"):
        return {}
    ours = submodules(pair.flax.built())
    norms = [name for name, inner in theirs.named_modules() if name and _is_norm(inner)]
    names = pair_paths(pair.entries, ours, norms)
    names = {path: name for path, name in names.items() if name in norms and path in ours}
    given = _inputs_of(pair, torch, set(names.values())) if names else {}
    errors: dict[str, float] = {}
    rounding: dict[str, float] = {}
    for path, name in names.items():
        measured = _errors(ours[path], theirs, name, given[name]) if name in given else None
        if measured is not None:
            errors[f"{name} by itself"], rounding[f"{name} by itself"] = measured
    return tolerance.amplified(errors, [rounding], tolerance.FORWARD, tolerance.MOST_FORWARD)


def _is_norm(module: Any) -> bool:
    return "norm" in type(module).__name__.lower()


def _inputs_of(pair: Pair, adapter: Any, wanted: set[str]) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the floating inputs of each norm's first call, the first input with the offset."""
    module = copy.deepcopy(adapter.module).eval()
    found: dict[str, tuple[np.ndarray, ...]] = {}

    def keep(name: str, _: Any, args: tuple, kwargs: dict) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if hasattr(x, "is_floating_point")]
        first, *others = (_numpy64(x) for x in tensors if x.is_floating_point())
        found.setdefault(name, (first + OFFSET, *others))

    for name in wanted:
        module.get_submodule(name).register_forward_pre_hook(partial(keep, name), with_kwargs=True)
    adapter.call(module, adapter.arrays(pair.inputs), adapter.arrays(pair.extras))
    return found


def _errors(
    ours: Any, theirs: Any, name: str, given: tuple[np.ndarray, ...]
) -> tuple[float, float] | None:
    """Return the error of a norm, and what rounding moves; None if it cannot be called."""
    import torch  # where both sides are run

    from flax_attn.parity.adapters.torch_rounding import MoreRounding

    norm = copy.deepcopy(theirs.get_submodule(name)).eval()
    with torch.no_grad():
        tensors = [torch.from_numpy(x) for x in given]
        expected = _numpy64(norm(*tensors))
        with MoreRounding(seed=1):
            # A clone of what was not made inside is rounded, too.
            moved = _numpy64(norm(*(x.clone() for x in tensors)))
    for flax in _calls(ours, given):
        if flax.shape == expected.shape:
            return _relative(flax, expected), _relative(moved, expected)
    return None


def _calls(norm: Any, given: tuple[np.ndarray, ...]) -> Iterator[np.ndarray]:
    """Yield what the JAX norm returns, of the axes as they are and of channels last."""
    for last in (False, True):
        if last and given[0].ndim < 3:
            return
        moved = [np.moveaxis(x, 1, -1) if last and x.ndim > 2 else x for x in given]
        arrays = [jnp.asarray(np.ascontiguousarray(x)) for x in moved]
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                result = _numpy64(norm(*arrays))
        # It takes other arguments, or other axes: then it is judged by outputs alone.
        except Exception:
            continue
        yield np.moveaxis(result, -1, 1) if last else result


def _numpy64(array: Any) -> np.ndarray:
    return np.array(float64({"": array})[""])


def _relative(flax: np.ndarray, torch: np.ndarray) -> float:
    return tolerance.relative({"": flax}, {"": torch})[""]
