"""Two modules as a pair: with the same weights, and calls that take the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attn_spec.checks import check_choice
from flax_attn import convert
from flax_attn.convert.entry import Entry
from flax_attn.convert.match.auto import possible_pairings
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Adapter, PairingError
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.module_adapter import ModuleCall
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter
from flax_attn.parity.adapters.users_code import returning
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.float32 import choose_float32
from flax_attn.parity.inputs import Inputs, named_inputs
from flax_attn.parity.pair import Pair
from flax_attn.parity.pair_by_outputs import pair_by_outputs, settled_by_order
from flax_attn.parity.weight_map import weight_map

# Or "auto".
Layout = convert.LayoutLike | None


@returning()
def pair_modules(
    flax_module: Any,
    torch_module: Any,
    inputs: Inputs,
    *,
    layout: Layout,
    calls: Mapping[str, tuple[Callable | None, Callable | None]],
    record: bool = False,
    device: Any = None,
    **options: Any,
) -> Pair:
    """Return both modules as a pair with the same weights.

    Args:
        flax_module: an NNX module, a bound Linen module, an Equinox module or a function of arrays.
        torch_module: an `nn.Module` in eval mode, a function of tensors, or the `Recording` of one.
        inputs: arrays or shapes, by position in a list or by name in a mapping.
        layout: pairs of parameters, in any form that `compare` takes.
        calls: for `"flax"` and `"torch"`, the function that calls the module, and the function that
            calls it in steps with a cache.
        record: whether the PyTorch results are kept, for `Report.export`.
        device: JAX device that runs dtypes below float64; None is the CPU.
        options: the other arguments of `Pair`.
    """
    recorded = isinstance(torch_module, Recording)
    values = torch_module.inputs if recorded else named_inputs(inputs, options.get("seed", 0))
    positional = _are_positional(inputs)
    with on_cpu():
        flax = JaxAdapter(flax_module, *calls["flax"], positional, device=device)
        if recorded:
            torch = torch_module
        else:
            torch = _torch_adapter(torch_module, *calls["torch"], positional)
        has_weights = flax.shapes or torch.shapes
        layouts = _layouts(layout, flax_module, torch_module) if has_weights else [None]
        entries = [_entries(flax, torch, possible) for possible in layouts]
        flax.share(entries[0])
        extras = options.get("extras", {})
        options["extras"] = {key: np.asarray(value) for key, value in extras.items()}
        # A recording cannot be given other parameters.
        options["redraw"] = options.get("redraw", True) and not recorded
        torch = RecordingAdapter(torch) if record else torch
        pair = Pair(flax, torch, values, flax.entries, layout=layouts[0], **options)
        _check_extras(pair)
        # A layout that was passed, or recorded, stays as it is.
        is_guessed = layout == "auto" and not recorded and len(layouts) == 1
        if is_guessed and settled_by_order(pair):
            layouts = possible_pairings(flax_module, torch_module) or layouts
            entries = [_entries(flax, torch, possible) for possible in layouts]
        if len(layouts) > 1:
            pair_by_outputs(pair, list(zip(layouts, entries, strict=True)))
        choose_float32(pair)
        _refuse_train_mode(torch_module, pair)
    return pair


def _are_positional(inputs: Inputs) -> bool:
    # Those of a recording are named by their places, if they were a list.
    if not isinstance(inputs, Mapping):
        return True
    return all(name.startswith("input ") for name in inputs)


def _entries(flax: JaxAdapter, torch: Any, layout: convert.Layout | None) -> list[Entry]:
    """Return which parameter is which; what PyTorch does not train is not trained in JAX either."""
    if layout is None:
        return []
    frozen = getattr(torch, "frozen", set())
    entries = weight_map(flax.module, flax.whole_shapes, torch.shapes, layout, flax.statistics)
    return [_trained(entry, frozen) for entry in entries]


def _trained(entry: Entry, frozen: set[str]) -> Entry:
    trainable = entry.trainable and entry.theirs not in frozen
    return replace(entry, trainable=trainable)


def _layouts(
    layout: Layout, flax_module: Any, torch_module: Any
) -> Sequence[convert.Layout | None]:
    """Return the layout between two modules, or all that are possible if names leave several."""
    if isinstance(layout, str):
        check_choice("layout", layout, ("auto", *convert.LAYOUTS))
    if layout != "auto":
        return [None] if layout is None else [convert.as_layout(layout)]
    # It has the layout that it was recorded with, as there may be no torch.
    if isinstance(torch_module, Recording):
        return [torch_module.layout]
    try:
        return [convert.auto(flax_module, torch_module)]
    except convert.ConversionError as error:
        possible = possible_pairings(flax_module, torch_module)
        if possible:
            return possible
        raise PairingError(
            f"{error}\nPair these yourself, and the rest as before:"
            " layout=convert.auto(flax_module, torch_module, rules=[Rule(...)]), or --rules"
            " pkg.mod:RULES from a shell. If the weights already agree, pass layout=None"
        ) from error


def check_callable(pair: Pair) -> None:
    """Raise if a module cannot be run at all: an error of the call, which no check has to find.

    Raises:
        PairingError: with what the module raised, or with the line that JAX cannot compile.
    """
    for framework in ("torch", "flax"):
        try:
            result = pair.run(framework, pair.uncompiled)
        except RuntimeError as error:
            if isinstance(error.__cause__, PairingError):
                raise error.__cause__ from None
            raise PairingError(
                f"the inputs do not go through the {framework} module: {error}\nWhere it takes them"
                f" in another form, such as channels last, pass {framework}_call="
            ) from error
        if not result.outputs:
            raise PairingError(
                f"the {framework} module returns nothing to compare. Pass a call that returns its"
                " arrays"
            )
    _check_compilable(pair)


def _check_compilable(pair: Pair) -> None:
    if not isinstance(pair.flax, JaxAdapter):
        return
    # The program that checks run; it is not traced again.
    try:
        pair.flax.program(pair.float64)
    except PairingError:
        raise
    # Any other error is the result of a check.
    except Exception:
        return


def _check_extras(pair: Pair) -> None:
    for name in pair.extras:
        if pair.takes(name):
            continue
        known = " and ".join(ModuleCall.EXTRAS)
        flax, torch = sorted(pair.flax.accepts), sorted(pair.torch.accepts)
        raise PairingError(
            f"extras are {known}, where both calls take them by name; got {name!r}, flax takes"
            f" {flax}, torch takes {torch}"
        )


def _refuse_train_mode(torch_module: Any, pair: Pair) -> None:
    if not getattr(torch_module, "training", False):
        return
    check_callable(pair)
    # Without dropout and batch statistics both modes return the same.
    train = pair.run("torch", pair.run_spec("left in train mode", mode="train")).outputs
    for name, error in tolerance.relative(train, pair.plain.outputs).items():
        if error:
            raise PairingError(
                f"the PyTorch module was left in train mode, where {name} differs from that in eval"
                f" mode by a relative {error:.3g}: call .eval() on it. The check 'dropout' compares"
                " train mode, with one key for both"
            )


def _torch_adapter(*arguments: Any) -> Adapter:
    # torch is imported where it is used.
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter

    return TorchAdapter(*arguments)
