"""`compare` and `assert_parity`: any JAX module against any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from flax_attn import convert
from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Adapter, Arrays, Call, PairingError, is_floating
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.recording import Recorder, Recording
from flax_attn.parity.checks import run_checks
from flax_attn.parity.pair import Pair, weight_map
from flax_attn.parity.report.report import Report, environment
from flax_attn.parity.training import Recipe

Inputs = Any  # a list of arrays or shapes, a mapping of them by name, or one of them


class ParityError(AssertionError):
    """Two modules that are not the same function. The message says where; `report` holds everything.

    Attributes:
        report: what was found.
    """

    def __init__(self, report: Report):
        super().__init__(report.explain())
        self.report = report


def compare(
    flax_module: Any,
    torch_module: Any,
    inputs: Inputs,
    *,
    layout: convert.LayoutLike | None = None,
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
    command: str = "",
    locate: bool = True,
    record: bool = False,
    device: Any = None,
    watch: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return what a comparison of two modules finds, check by check.

    Both are copied, get the same weights (drawn at random, so that nothing stands at 0 or 1), and are judged in float64
    on the CPU against rules that have no knob. The PyTorch side is the reference.

    Args:
        flax_module: an NNX module, a bound Linen module, an equinox module or a function of arrays.
        torch_module: an `nn.Module` in eval mode, a function of tensors, or the `Recording` of one.
        inputs: arrays by position in a list, or by name in a mapping; of a recording its `inputs`. Floating ones are
            cast to the dtype of each run. Where a tuple of integers stands for an array, one of that shape is drawn
            from the normal distribution.
        layout: which parameter is which: a name from `convert.LAYOUTS`, a `Layout`, a list of `Rule`, or None where the
            weights already agree. They are then kept as they are, and checks of single parameters are not run.
        checks: names from `CHECKS`; None is all. One that is asked for by name and cannot be run is a failure.
        flax_call: how to call the Flax side, `flax_call(module, *inputs)`, if not as `module(*inputs)`. A parameter
            named `lengths` or `dropout_key` says that it takes sequence lengths `(b,)`, or two words that decide what
            dropout drops. It returns an array, or a tuple or mapping of arrays.
        torch_call: the same for the PyTorch side.
        flax_cached: a call of the Flax side that computes the same outputs in steps, with a cache.
        torch_cached: the same for the PyTorch side.
        extras: what every call is given beside the inputs, such as `lengths`.
        recipe: of the training check; None is 100 steps of AdamW.
        redraw: whether parameters are drawn at random; False keeps those of the PyTorch side.
        seed: of everything that is drawn.
        name: of the comparison; None is the name of the Flax side.
        command: that repeats it, for the report.
        locate: whether to find out where the sides part, if they do.
        record: whether what the PyTorch side results is kept, for `export.save`.
        device: that runs the Flax side in dtypes below float64; None is the CPU.
        watch: is told the name of each check before it runs.

    Raises:
        PairingError: if the modules cannot be paired or called: parameters that are missing, unexpected, mis-shaped or
            claimed twice, outputs that are no arrays, a PyTorch module left in train mode.
        ValueError: if a check or a layout is unknown.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> report = compare(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2), [(4, 3)], layout="torch")
        >>> report.passed, report.check("forward").passed
        (True, True)
    """
    recorded = isinstance(torch_module, Recording)
    values = torch_module.inputs if recorded else _inputs(inputs, seed)
    positional = not isinstance(inputs, Mapping) or all(name.startswith("input ") for name in inputs)
    with on_cpu():
        flax = JaxAdapter(flax_module, flax_call, flax_cached, positional, device=device)
        torch = torch_module if recorded else _torch_side(torch_module, torch_call, torch_cached, positional)
        torch, entries = Recorder(torch) if record else torch, []
        if layout is not None and (flax.shapes or torch.shapes):
            flax.entries = entries = weight_map(flax_module, flax.shapes, torch.shapes, convert.as_layout(layout))
        recipe = recipe or Recipe()
        given = {key: np.asarray(value) for key, value in (extras or {}).items()}
        pair = Pair(flax, torch, values, entries, seed, recipe, given, redraw and not recorded)
        _check_extras(pair)
        _refuse_train_mode(torch_module, pair)
        return report_on(pair, name or type(flax_module).__name__, checks, command=command, locate=locate, watch=watch)


def assert_parity(flax_module: Any, torch_module: Any, inputs: Inputs, **options: Any) -> Report:
    """Return the report of `compare`, with the same arguments.

    Raises:
        ParityError: an `AssertionError`, if any check fails: the guilty tensor, where, how far, the rule.
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


def report_on(
    pair: Pair,
    name: str,
    checks: Sequence[str] | None = None,
    *,
    wanted: bool = True,
    command: str = "",
    locate: bool = True,
    watch: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return what the checks of these names find about a pair; one that is `wanted` and does not apply fails."""
    with on_cpu():
        running = run_checks(pair, checks, wanted, watch)
        _callable(pair)
        found, notes = list(running), _notes(pair)
        divergence = _located(pair, notes) if locate else None
        return Report(name, found, list(pair.entries), notes, pair.seed, environment(), command, divergence, pair)


def _located(pair: Pair, notes: list[str]) -> Any:
    if isinstance(pair.torch, Recording):
        notes.append("of a recording there are no intermediate values: where the sides part was not looked for")
        return None
    from flax_attn.parity.trace.localise import localise

    try:
        return localise(pair.with_torch(pair.torch.side) if isinstance(pair.torch, Recorder) else pair)
    except Exception as error:  # hooks in other people's modules: the verdict stands without them
        notes.append(f"where the sides part could not be looked for: {type(error).__name__}: {error}")
        return None


@contextmanager
def on_cpu():
    """Compare in float64, on the CPU, where rounding is the only difference that is allowed."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _callable(pair: Pair) -> None:
    # A side that cannot be run at all is no failure of parity: it says so before any check.
    for side in ("torch", "flax"):
        try:
            result = pair.run(side, pair.uncompiled)
        except RuntimeError as error:
            if isinstance(error.__cause__, PairingError):
                raise error.__cause__ from None
            raise PairingError(f"the inputs do not go through the {side} side: {error}") from error
        if not result.outputs:
            raise PairingError(f"the {side} side returns nothing to compare. Pass a call that returns its arrays")


def _check_extras(pair: Pair) -> None:
    for name in pair.extras:
        if not pair.takes(name):
            raise PairingError(
                f"extras are {' and '.join(Call.EXTRAS)}, where the calls of both sides take them by name; "
                f"got {name!r}, flax takes {sorted(pair.flax.accepts)}, torch takes {sorted(pair.torch.accepts)}"
            )


def _refuse_train_mode(torch_module: Any, pair: Pair) -> None:
    if not getattr(torch_module, "training", False):
        return
    _callable(pair)
    train = pair.run("torch", pair.run_spec("left in train mode", train=True)).outputs
    for name, error in tolerance.relative(train, pair.plain.outputs).items():
        if error:
            raise PairingError(
                f"the PyTorch module was left in train mode, where {name} differs from that in eval mode by a "
                f"relative {error:.3g}: call .eval() on it. The check 'dropout' compares train mode, under one key "
                "for both sides"
            )


def _torch_side(*arguments: Any) -> Adapter:
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter  # torch is imported where it is used

    return TorchAdapter(*arguments)


def _inputs(inputs: Inputs, seed: int) -> Arrays:
    if hasattr(inputs, "shape") or (isinstance(inputs, tuple) and all(isinstance(size, int) for size in inputs)):
        inputs = [inputs]  # one array, or one shape
    if not isinstance(inputs, Mapping | Sequence) or isinstance(inputs, str) or not inputs:
        got = type(inputs).__name__ if inputs or not isinstance(inputs, Sequence) else f"an empty {inputs!r}"
        raise PairingError(
            f"inputs are a list of arrays or of shapes, or a mapping of them by name; got {got}. Pass [x] for one "
            "array x"
        )
    random = np.random.default_rng(seed + 1000)
    named = inputs.items() if isinstance(inputs, Mapping) else ((f"input {i}", x) for i, x in enumerate(inputs))
    return {name: _array(name, value, random) for name, value in named}


def _array(name: str, value: Any, random: np.random.Generator) -> np.ndarray:
    if isinstance(value, tuple):
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in value):
            raise PairingError(
                f"{name}: a tuple is a shape, of sizes from 0; got {value}. Pass other values as an array"
            )
        return random.normal(size=value)
    try:
        array = convert.to_numpy(value)
    except (TypeError, ValueError) as error:
        raise PairingError(f"{name} is no array of numbers: {error}. Pass an array, or a shape as a tuple") from error
    if is_floating(array):
        return array.astype(np.float64)
    if array.dtype.kind not in "biu":
        raise PairingError(
            f"{name} is no array of real numbers: its dtype is {array.dtype}. Pass an array, or a shape as a tuple"
        )
    return array


def _notes(pair: Pair) -> list[str]:
    recorded = isinstance(pair.torch, Recording)  # perhaps where torch is not
    notes = pair.recipe.notes() if pair.has_parameters and not recorded else []
    if pair.has_parameters and not pair.entries:
        notes.append(
            "no layout was given: both sides keep their weights, and those may stand at 0 or 1 and hide a fault"
        )
    return notes
