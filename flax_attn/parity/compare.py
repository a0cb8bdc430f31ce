"""`compare` and `assert_parity`: any JAX module against any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn import convert
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Adapter, Call, PairingError
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recording, RecordingAdapter
from flax_attn.parity.check import Check
from flax_attn.parity.checks import run_checks
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.inputs import Inputs, named_inputs
from flax_attn.parity.one_pass import note_on_variance
from flax_attn.parity.pair import Pair, weight_map
from flax_attn.parity.report.report import Report, environment
from flax_attn.parity.training import Recipe, check_choice

if TYPE_CHECKING:
    from flax_attn.parity.trace.divergence import Divergence

Layout = convert.LayoutLike | None  # or "auto"


class ParityError(AssertionError):
    """Two modules that are not the same function. The message says where they differ.

    Attributes:
        report: the full report.
    """

    def __init__(self, report: Report):
        super().__init__(report.explain())
        self.report = report


def compare(
    flax_module: Any,
    torch_module: Any,
    inputs: Inputs,
    *,
    layout: Layout = "auto",
    checks: Sequence[str] | None = None,
    flax_call: Callable | None = None,
    torch_call: Callable | None = None,
    flax_cached: Callable | None = None,
    torch_cached: Callable | None = None,
    extras: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    redraw: bool = True,
    seed: int = 0,
    name: str = "",
    locate: bool = True,
    record: bool = False,
    device: Any = None,
) -> Report:
    """Return a report on two modules, check by check: whether they are the same function.

    Both are copied, get the same random weights (so that none is 0 or 1), and are compared in
    float64 on the CPU under fixed rules. The PyTorch module is the reference.

    Args:
        flax_module: an NNX module, a bound Linen module, an Equinox module or a function of arrays.
        torch_module: an `nn.Module` in eval mode, a function of tensors, or the `Recording` of one.
        inputs: arrays in a list by position or in a mapping by name; for a recording, its `inputs`.
            Floating ones are cast to the dtype of each run. A tuple of integers is a shape: an
            array is drawn from the normal distribution.
        layout: pairs of parameters. `"auto"` pairs them by the layers of both modules, see
            `convert.auto`; a name from `convert.LAYOUTS`, a `Layout` or a list of `Rule` defines
            them; None means that the weights already agree: they are kept, and checks that need the
            pairs do not run.
        checks: names from `CHECKS`; None is all. One that is requested by name and cannot run is a
            failure.
        flax_call: function that calls the JAX module, `flax_call(module, *inputs)`; None is
            `module(*inputs)`. If it has a parameter named `lengths` or `dropout_key`, it gets
            sequence lengths `(b,)`, or the two uint32 of a dropout key. It returns an array, or a
            tuple or mapping of arrays.
        torch_call: function that calls the PyTorch module, like `flax_call`.
        flax_cached: function that computes the same outputs of the JAX module in steps, with a
            cache.
        torch_cached: function that does so with the PyTorch module.
        extras: arguments of every call beside the inputs, such as `lengths`.
        recipe: recipe of the training check; None is 100 steps of AdamW.
        redraw: whether parameters are drawn at random; False keeps those of the PyTorch module.
        seed: seed of everything that is drawn.
        name: name of the comparison; the default is the class of the JAX module.
        locate: whether to find out where the modules differ, if they do.
        record: whether the PyTorch results are kept, for `Report.export`.
        device: JAX device that runs dtypes below float64; None is the CPU.

    Raises:
        PairingError: if the modules cannot be paired or called: parameters that are missing,
            unexpected, mis-shaped, claimed twice, or that `"auto"` cannot tell apart; outputs that
            are no arrays; a PyTorch module that was left in train mode, and returns something else
            there.
        ValueError: if a check or a layout is unknown.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> report = compare(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2), [(4, 3)])
        >>> report.passed, report.check("forward").passed
        (True, True)
    """
    pair = pair_modules(
        *(flax_module, torch_module, inputs),
        layout=layout,
        calls={"flax": (flax_call, flax_cached), "torch": (torch_call, torch_cached)},
        extras=extras or {},
        recipe=recipe or Recipe(),
        redraw=redraw,
        seed=seed,
        record=record,
        device=device,
    )
    return report_on(pair, name or type(flax_module).__name__, checks, locate=locate)


def assert_parity(flax_module: Any, torch_module: Any, inputs: Inputs, **options: Any) -> Report:
    """Return the report of `compare`, with the same arguments.

    Raises:
        ParityError: an `AssertionError`, if any check fails: the worst tensor, its error, the rule.
        PairingError: as `compare` does.

    Example:
        >>> import torch
        >>> import jax.numpy as jnp
        >>> assert_parity(jnp.sin, torch.cos, [(3, 5)], checks=["forward"], locate=False)
        Traceback (most recent call last):
        ...
        flax_attn.parity.compare.ParityError: ...
    """
    report = compare(flax_module, torch_module, inputs, **options)
    if not report.passed:
        raise ParityError(report)
    return report


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
    positional = not isinstance(inputs, Mapping) or all(
        name.startswith("input ") for name in inputs
    )
    with on_cpu():
        flax = JaxAdapter(flax_module, *calls["flax"], positional, device=device)
        torch = (
            torch_module if recorded else _torch_adapter(torch_module, *calls["torch"], positional)
        )
        layout = _layout(layout, flax_module, torch_module) if flax.shapes or torch.shapes else None
        if layout is not None:
            entries = weight_map(flax_module, flax.shapes, torch.shapes, layout, flax.statistics)
            frozen = getattr(torch, "frozen", set())
            flax.entries = [
                replace(e, trainable=e.trainable and e.theirs not in frozen) for e in entries
            ]
        options["extras"] = {
            key: np.asarray(value) for key, value in options.get("extras", {}).items()
        }
        options["redraw"] = options.get("redraw", True) and not recorded
        torch = RecordingAdapter(torch) if record else torch
        pair = Pair(flax, torch, values, flax.entries, layout=layout, **options)
        _check_extras(pair)
        _refuse_train_mode(torch_module, pair)
    return pair


def _layout(layout: Layout, flax_module: Any, torch_module: Any) -> convert.Layout | None:
    if isinstance(layout, str):
        check_choice("layout", layout, ("auto", *convert.LAYOUTS))
    if layout != "auto":
        return None if layout is None else convert.as_layout(layout)
    if isinstance(torch_module, Recording):
        return torch_module.layout
    try:
        return convert.auto(flax_module, torch_module)
    except convert.ConversionError as error:
        raise PairingError(
            f"{error}\nPair these yourself, and the rest as before:"
            " layout=convert.auto(flax_module, torch_module, rules=[Rule(...)]), or --rules"
            " pkg.mod:RULES from a shell. If the weights already agree, pass layout=None"
        ) from error


def report_on(
    pair: Pair,
    name: str,
    checks: Sequence[str] | None = None,
    *,
    wanted: bool = True,
    command: str = "",
    locate: bool = True,
    call_first: bool = True,
    watch: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return the report of the checks of these names on a pair.

    Args:
        pair: pair of modules to check.
        name: name of the comparison.
        checks: names from `CHECKS`; None is all.
        wanted: whether a check in `checks` that does not apply is a failure.
        command: shell command that repeats the comparison.
        locate: whether to find out where the modules differ, if they do.
        call_first: whether to call both before any check, and raise if one cannot be called;
            without it, each check that needs the call fails. In JAX this call is not compiled,
            which takes longer than a check.
        watch: function called with the name of each check before it runs.
    """
    with on_cpu():
        running = run_checks(pair, checks, wanted, watch)
        if call_first:
            _check_callable(pair)
        found, notes = list(running), _notes(pair)
        differs = any(check.ran and not check.passed for check in found)
        divergence = _located(pair, notes, found) if locate and differs else None
        return Report(
            name,
            found,
            list(pair.entries),
            notes,
            pair.seed,
            environment(),
            command,
            divergence,
            pair,
        )


def _located(pair: Pair, notes: list[str], checks: Sequence[Check]) -> Divergence | None:
    if isinstance(pair.torch, Recording):
        notes.append(
            "a recording holds no intermediate values: where the modules differ was not located"
        )
        return None
    from flax_attn.parity.trace.localise import localise

    offset = any(check.name == "mean offset" and not check.passed for check in checks)
    try:
        located = (
            pair.with_torch(pair.torch.adapter)
            if isinstance(pair.torch, RecordingAdapter)
            else pair
        )
        return localise(located, norms=offset)
    except (
        Exception
    ) as error:  # hooks in other people's modules: the verdict does not depend on them
        notes.append(
            f"where the modules differ could not be located: {type(error).__name__}: {error}"
        )
        return None


def _check_callable(pair: Pair) -> None:
    # A module that cannot be run at all is an error of the call, raised before any check.
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


def _check_extras(pair: Pair) -> None:
    for name in pair.extras:
        if not pair.takes(name):
            raise PairingError(
                f"extras are {' and '.join(Call.EXTRAS)}, where both calls take them by name; got"
                f" {name!r}, flax takes {sorted(pair.flax.accepts)}, torch takes"
                f" {sorted(pair.torch.accepts)}"
            )


def _refuse_train_mode(torch_module: Any, pair: Pair) -> None:
    if not getattr(torch_module, "training", False):
        return
    _check_callable(pair)
    train = pair.run("torch", pair.run_spec("left in train mode", train=True)).outputs
    for name, error in tolerance.relative(train, pair.plain.outputs).items():
        if error:
            raise PairingError(
                f"the PyTorch module was left in train mode, where {name} differs from that in eval"
                f" mode by a relative {error:.3g}: call .eval() on it. The check 'dropout' compares"
                " train mode, with one key for both"
            )


def _torch_adapter(*arguments: Any) -> Adapter:
    from flax_attn.parity.adapters.torch_adapter import (
        TorchAdapter,
    )  # torch is imported where it is used

    return TorchAdapter(*arguments)


def _notes(pair: Pair) -> list[str]:
    recorded = isinstance(pair.torch, Recording)  # perhaps where torch is not
    notes = pair.recipe.notes() if pair.has_parameters and not recorded else []
    if pair.has_parameters and not pair.entries:
        notes.append(
            "layout=None: both modules keep their weights, and one that is 0 or 1 may hide a"
            " difference"
        )
    return notes + note_on_variance(getattr(pair.flax, "module", None))
