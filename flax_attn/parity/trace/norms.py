"""Run each norm of a model by itself on features with a large mean.

A residual connection hides the error of such a norm in the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    names = _pairs_of_norms(pair, ours, theirs)
    measured = _measured(pair, torch, names.values()) if names else {}
    errors: dict[str, float] = {}
    rounding: dict[str, float] = {}
    for path, name in names.items():
        if name not in measured:
            continue
        found = measured[name]
        flax = _result(ours[path], found)
        if flax is not None:
            shown = f"{name} by itself"
            errors[shown] = _relative(flax, found.output)
            rounding[shown] = _relative(found.moved, found.output)
    return tolerance.amplified(errors, [rounding], tolerance.FORWARD, tolerance.MOST_FORWARD)


def _pairs_of_norms(pair: Pair, ours: Mapping[str, Any], theirs: Any) -> dict[str, str]:
    """Return the name of each norm of PyTorch by the path of its counterpart in JAX."""
    norms = [name for name, inner in theirs.named_modules() if name and _is_norm(inner)]
    pairs = pair_paths(pair.entries, ours, norms)
    # The whole module pairs as well, and is no norm.
    return {path: name for path, name in pairs.items() if name in norms and path in ours}


def _is_norm(module: Any) -> bool:
    return "norm" in type(module).__name__.lower()


class _Measured(NamedTuple):
    """A norm of PyTorch: its inputs with the offset, its output, and that with more rounding."""

    given: tuple[np.ndarray, ...]
    output: np.ndarray
    moved: np.ndarray


def _measured(pair: Pair, adapter: Any, wanted: Iterable[str]) -> dict[str, _Measured]:
    """Return what each norm gives for the floating inputs of its first call, with the offset."""
    module = adapter.copied_module().eval()
    found: dict[str, _Measured] = {}

    def measure(name: str, norm: Any, args: tuple, kwargs: dict) -> None:
        if name in found:
            return
        given = [*args, *kwargs.values()]
        floating = [x for x in given if _is_floating(x)]
        found[name] = _measure(norm, floating)

    for name in wanted:
        norm = module.get_submodule(name)
        norm.register_forward_pre_hook(partial(measure, name), with_kwargs=True)
    inputs, extras = adapter.arrays(pair.inputs), adapter.arrays(pair.extras)
    # Inside the call of the model, which may set what its norms compute in.
    adapter.call(module, inputs, extras)
    return found


def _is_floating(x: Any) -> bool:
    return hasattr(x, "is_floating_point") and x.is_floating_point()


def _measure(norm: Any, floating: list[Any]) -> _Measured:
    import torch  # where both sides are run

    from flax_attn.parity.adapters.torch_rounding import MoreRounding

    first, *others = (_numpy64(x) for x in floating)
    given = (first + OFFSET, *others)
    tensors = [torch.from_numpy(x) for x in given]
    # Not the module itself, whose hooks would call this again.
    with torch.no_grad():
        output = _numpy64(norm.forward(*tensors))
        with MoreRounding(seed=1):
            # A clone of what was not made inside is rounded, too.
            moved = _numpy64(norm.forward(*(x.clone() for x in tensors)))
    return _Measured(given, output, moved)


def _result(norm: Any, found: _Measured) -> np.ndarray | None:
    """Return what the JAX norm returns in the shape of PyTorch's; None where it has another."""
    results = _calls(norm, found.given)
    return next((flax for flax in results if flax.shape == found.output.shape), None)


def _calls(norm: Any, given: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield what the JAX norm returns, of the axes as they are and of channels last."""
    for last in (False, True):
        if last and given[0].ndim < 3:
            return
        moved = map(_channels_last, given) if last else given
        try:
            result = _call(norm, moved)
        # It takes other arguments, or other axes: then it is judged by outputs alone.
        except Exception:
            continue
        yield _channels_first(result) if last else result


def _channels_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1) if x.ndim > 2 else x


def _channels_first(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, -1, 1)


def _call(norm: Any, given: Iterable[np.ndarray]) -> np.ndarray:
    arrays = [jnp.asarray(np.ascontiguousarray(x)) for x in given]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _numpy64(norm(*arrays))


def _numpy64(array: Any) -> np.ndarray:
    return np.array(float64({"": array})[""])


def _relative(flax: np.ndarray, torch: np.ndarray) -> float:
    return tolerance.relative({"": flax}, {"": torch})[""]
