"""`compare` and `assert_parity`: any JAX module against any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax

from flax_attn.convert.match.pairing import Pairing
from flax_attn.convert.match.tree import RECURRENT
from flax_attn.parity.adapters.adapter import Float32, error_text
from flax_attn.parity.adapters.recording import Recording
from flax_attn.parity.adapters.users_code import returning
from flax_attn.parity.ahead import compile_ahead
from flax_attn.parity.check import Check
from flax_attn.parity.checks import CHECKS, run_checks
from flax_attn.parity.coverage import coverage_of
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.inputs import Inputs
from flax_attn.parity.journal import LOCATING, Journal
from flax_attn.parity.loaded import loaded
from flax_attn.parity.loosened import loosened
from flax_attn.parity.mutants import Mutants, check_count, plant
from flax_attn.parity.no_fault import set_aside
from flax_attn.parity.one_pass import note_on_variance
from flax_attn.parity.pair import Pair
from flax_attn.parity.pair_modules import Layout, check_callable, pair_modules
from flax_attn.parity.report.report import Report, environment
from flax_attn.parity.training import Recipe

if TYPE_CHECKING:
    from flax_attn.parity.trace.difference import Difference


# What the runs in float64 read in another way than it is written.
FLOAT32 = {
    ("torch", Float32.BY_LIBRARY): "in float64, tensors of PyTorch that name no dtype are float64",
    ("torch", Float32.NAMED): "in float64, what PyTorch makes in float32 is float64, also by name",
    ("flax", Float32.BY_LIBRARY): "in float64, JAX's attention takes its softmax in float64",
    ("flax", Float32.NAMED): "in float64, what JAX makes in float32 is float64, also by name",
}


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
    mutants: int = 0,
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
            `convert.auto`, and where names leave several pairings, by the outputs; a name from
            `convert.LAYOUTS`, a `Layout` or a list of `Rule` defines them; None means that the
            weights already agree: they are kept, and checks that need the pairs do not run.
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
        mutants: number of edits that are planted in the JAX side one by one, if all checks hold;
            `Report.mutants` says which of them the checks detect.

    Raises:
        PairingError: if the modules cannot be paired or called: parameters that are missing,
            unexpected, mis-shaped, claimed twice, or that `"auto"` cannot tell apart; outputs that
            are no arrays; a PyTorch module that was left in train mode, and returns something else
            there.
        ValueError: if a check or a layout is unknown, or `mutants` is negative.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> report = compare(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2), [(4, 3)])
        >>> report.passed, report.check("forward").passed
        (True, True)
    """
    # Before anything is copied or drawn.
    check_count(mutants)
    calls = {"flax": (flax_call, flax_cached), "torch": (torch_call, torch_cached)}
    pair = pair_modules(
        flax_module,
        torch_module,
        inputs,
        layout=layout,
        calls=calls,
        extras=extras or {},
        recipe=recipe or Recipe(),
        redraw=redraw,
        seed=seed,
        record=record,
        device=device,
    )
    return report_on(
        pair, name or type(flax_module).__name__, checks, locate=locate, mutants=mutants
    )


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
    # Not proven is not equal.
    if not report.passed:
        raise ParityError(report)
    return report


@returning()
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
    journal: Journal | None = None,
    mutants: int = 0,
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
        journal: journal of the checks, which leaves out those that have ended the process.
        mutants: number of edits of the JAX side that are planted if all checks hold.
    """
    with on_cpu():
        left_out = {}
        if journal is not None:
            left_out = dict.fromkeys(journal.left_out, journal.reason())
            # A check is noted before it runs, as it may end the process.
            watch = _both(watch, journal.begin)
        # An unknown name is refused before anything is run.
        running = run_checks(pair, checks, wanted, watch, left_out)
        if call_first:
            check_callable(pair)
        # Where a check has ended the process, each compiles what it runs, so that its name is told.
        if not left_out:
            compile_ahead(pair, CHECKS if checks is None else checks)
        found = []
        for check in running:
            found.append(check)
            if journal is not None:
                journal.end(check)
        notes = _notes(pair, checks)
        differs = any(check.failed for check in found)
        difference = None
        if LOCATING in left_out:
            notes.append(f"{LOCATING}: {left_out[LOCATING]}")
        elif locate and differs:
            notes += _note_on_gates(pair.layout)
            watch(LOCATING)
            with _promotion(pair):
                difference = _located(pair, notes, found)
        with _promotion(pair):
            found = set_aside(pair, found, difference)
            planted = _planted(pair, checks, found, notes, mutants)
        return Report(
            name=name,
            checks=found,
            entries=list(pair.entries),
            notes=notes,
            seed=pair.seed,
            environment=environment(),
            command=command,
            difference=difference,
            pair=pair,
            loosened=loosened(pair, checks) if wanted else (),
            coverage=coverage_of(pair, found),
            mutants=planted,
        )


def _planted(
    pair: Pair, names: Sequence[str] | None, found: list[Check], notes: list[str], count: int
) -> Mutants | None:
    if not count:
        return None
    # What fails already would seem to detect every edit.
    if not all(check.passed for check in found):
        notes.append("no mutants were planted: a check fails on the modules as they are")
        return None
    return plant(pair, names, count)


def _promotion(pair: Pair) -> AbstractContextManager[Any]:
    """Return the promotion of dtypes that the JAX module has been judged with."""
    if getattr(pair.flax, "mixes_dtypes", False):
        return jax.numpy_dtype_promotion("standard")
    return nullcontext()


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def both(name: str) -> None:
        first(name)
        second(name)

    return both


def _located(pair: Pair, notes: list[str], checks: Sequence[Check]) -> Difference | None:
    torch = pair.own_torch
    if torch is None:
        notes.append(
            "a recording holds no intermediate values: where the modules differ was not located"
        )
        return None
    from flax_attn.parity.trace.difference import difference

    if torch is not pair.torch:
        pair = pair.with_torch(torch)
    try:
        found = difference(pair)
        failed = [check for check in checks if check.failed]
        # What agrees on the inputs of the pair may differ on those of a check that fails.
        for situation in [check.seen for check in failed if check.seen]:
            if found.hypotheses or found.remaining or found.miscompiled:
                break
            with loaded(pair, situation.weights or pair.weights):
                found = difference(pair.with_inputs(situation.inputs, situation.extras))
        return found
    # Hooks in other people's modules may fail in any way: the verdict does not depend on them.
    except Exception as error:
        notes.append(f"where the modules differ could not be located: {error_text(error)}")
        return None


def _note_on_gates(layout: Any) -> list[str]:
    """Return what was taken for granted of linear layers that hold the gates of a recurrent one."""
    rows = layout.rows if isinstance(layout, Pairing) else ()
    # Where gates are apart, their names say which is which.
    packed = []
    for row in rows:
        if row.kind in RECURRENT and len(row.ours) == 1 and row.pattern:
            packed.append(row.ours[0])
    if not packed:
        return []
    names = ", ".join(packed)
    return [
        f"{names}: taken to hold the gates in PyTorch's order. If yours is another one, pass"
        " layout=None with weights that agree"
    ]


def _notes(pair: Pair, names: Sequence[str] | None) -> list[str]:
    # A recording may be compared where torch is not installed.
    recorded = isinstance(pair.torch, Recording)
    trains = pair.has_parameters and not recorded and (names is None or "training" in names)
    notes = pair.recipe.notes() if trains else []
    if pair.has_parameters and not pair.entries:
        notes.append(
            "layout=None: both modules keep their weights, and one that is 0 or 1 may hide a"
            " difference"
        )
    if getattr(pair.flax, "mixes_dtypes", False):
        setting = jax.config.values["jax_numpy_dtype_promotion"]
        notes.append(
            f"the JAX module mixes dtypes, which jax_numpy_dtype_promotion={setting} refuses:"
            " judged with JAX's default, standard"
        )
    for framework, adapter in (("torch", pair.own_torch), ("flax", pair.flax)):
        kind = getattr(adapter, "float32", Float32.AS_WRITTEN)
        if kind is not Float32.AS_WRITTEN:
            notes.append(FLOAT32[framework, kind])
    return notes + pair.notes + note_on_variance(getattr(pair.flax, "module", None))
