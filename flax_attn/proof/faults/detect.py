"""The tests are tested: every known fault is patched in, one at a time, and must be detected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text

import torch_ref
from flax_attn.parity.adapters.adapter import Arrays, NotRun, float64
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.check import Check
from flax_attn.parity.checks import CHECKS, run_checks
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.trace.difference import Difference, difference
from flax_attn.proof.faults import FAULTS, Fault
from flax_attn.proof.faults.fault import patched
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import Variant, select

# From the cheapest to the most expensive. A lower dtype is not among them: its rule is PyTorch's
# own error, which a fault of the PyTorch module increases. Faults of the Flax module are left to
# the tests.
ORDER = (
    "forward",
    "gradients",
    "cache = full",
    "dropout",
    "huge logits",
    "padded rows",
    "non-finite padding",
    "training",
)
# What these detect is read out of the two programs; the others run them otherwise than once, in
# float64 and eval mode, and that is the kind of what they detect.
READ = ("forward", "gradients")
# Tolerances that are common in test suites of ports; none of ours.
FIXED = (1e-4, 1e-2, 4e-2)


class FailsWithoutFaultError(ValueError):
    """A check that fails without any fault, so that it cannot detect one."""


@dataclass(frozen=True)
class Detection:
    """Which check detects a fault.

    Args:
        fault: fault that was patched in.
        check: first check that fails, or None.
        fixed: whether the outputs pass, with default weights, each of the fixed tolerances.
        difference: what a report shows of it; None where that was not asked for, or where the
            check runs the two programs otherwise than once.
    """

    fault: Fault
    check: Check | None
    fixed: dict[float, bool]
    difference: Difference | None = None

    @property
    def detected(self) -> bool:
        """Whether any check fails."""
        return self.check is not None

    @property
    def located(self) -> str:
        """The first lines of both sides that explain the whole difference; empty without them."""
        if self.difference is None or not self.difference.repaired:
            return ""
        first = self.difference.hypotheses[0]
        if not first.flax.places or not first.torch.places:
            return ""
        return f"{first.flax.place} / {first.torch.place}"

    @property
    def shown(self) -> bool:
        """Whether a report shows it, unless that was not asked for."""
        return self.difference is None or bool(self.located)


def detect(
    faults: Sequence[Fault] = FAULTS,
    seed: int = 0,
    watch: Callable[[str], None] = lambda name: None,
    explain: bool = False,
) -> list[Detection]:
    """Patch in each fault and return which check detects it first.

    Args:
        faults: faults to patch in.
        seed: seed of the weights and inputs.
        watch: function called with the name of each fault before it is patched in.
        explain: whether to find the lines of both sides as well.

    Raises:
        FailsWithoutFaultError: if a check fails without any fault.
    """
    # How many of the checks each variant needs.
    needed: dict[str, int] = defaultdict(int)
    for fault in faults:
        needed[fault.row] = max(needed[fault.row], ORDER.index(fault.check) + 1)
    with on_cpu():
        prepared = {row: PreparedVariant(select([row])[0], seed) for row in needed}

        def prepare(row: str) -> None:
            prepared[row].prepare(ORDER[: needed[row]])

        # As long as nothing is patched, most of what is needed is compiled by two threads.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(prepare, prepared))
        found = []
        for fault in faults:
            watch(fault.name)
            found.append(_detected(prepared[fault.row], fault, explain))
        return found


def _detected(prepared: PreparedVariant, fault: Fault, explain: bool) -> Detection:
    failed = (check for check in prepared.checks(fault) if not check.passed)
    check = next(failed, None)
    explained = explain and check is not None and check.name in READ
    shown = prepared.difference(fault) if explained else None
    return Detection(fault, check, prepared.fixed(fault), shown)


class PreparedVariant:
    """A variant with what its faults share: the checks without a fault, and the results of Flax.

    Args:
        variant: row of the table.
        seed: seed of the weights and inputs.
    """

    def __init__(self, variant: Variant, seed: int = 0):
        self.variant, self.pair = variant, pair_of(variant, seed)
        assert isinstance(self.pair.torch, TorchAdapter)
        self._torch, self._defaults = self.pair.torch, _default_weights(variant, seed)
        self._applies: dict[str, bool] = {}

    def prepare(self, names: Sequence[str]) -> None:
        """Run Flax, and the checks of these names without a fault."""
        with on_cpu():
            for name in names:
                self.applies(name)
            self._flax_outputs = self._with_default_weights()

    def applies(self, name: str) -> bool:
        """Return whether a check says anything about this variant.

        Raises:
            FailsWithoutFaultError: if it fails without a fault.
        """
        if name not in self._applies:
            try:
                check = CHECKS[name](self.pair)
            except NotRun:
                check = None
            if check is not None and not check.passed:
                raise FailsWithoutFaultError(
                    f"a check must pass before a fault is patched in; got {self.variant.name},"
                    f" {check.explain()}. Repair the variant first: flax-attn parity --variant"
                    f" {self.variant.name}"
                )
            self._applies[name] = check is not None
        return self._applies[name]

    def checks(self, fault: Fault) -> Iterator[Check]:
        """Yield the checks of the variant with a fault, in order."""
        adapter = self._copy(self.pair.weights)
        pair = self.pair.with_torch(adapter)
        for name in filter(self.applies, ORDER):
            with patched(adapter.module, fault.patches):
                (check,) = run_checks(pair, [name])
            # With nothing patched: the caller may stop here.
            yield check

    def difference(self, fault: Fault) -> Difference:
        """Return where the two sides differ with a fault."""
        adapter = self._copy(self.pair.weights)
        with patched(adapter.module, fault.patches):
            return difference(self.pair.with_torch(adapter))

    def fixed(self, fault: Fault) -> dict[float, bool]:
        """Return whether the outputs with a fault pass the fixed tolerances."""
        adapter = self._copy(self._defaults)
        with patched(adapter.module, fault.patches):
            torch = adapter.run(self.pair.float64).outputs["output"]
        flax = self._flax_outputs
        return {tol: bool(np.allclose(flax, torch, rtol=tol, atol=tol)) for tol in FIXED}

    def _copy(self, weights: Arrays) -> TorchAdapter:
        adapter = copy(self._torch)
        adapter.module = deepcopy(self._torch.module)
        adapter.load(weights)
        return adapter

    def _with_default_weights(self) -> np.ndarray:
        self.pair.flax.load(self._defaults)
        try:
            return self.pair.flax.run(self.pair.float64).outputs["output"]
        finally:
            self.pair.flax.load(self.pair.weights)


def _default_weights(variant: Variant, seed: int) -> Arrays:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return float64(variant.build(torch_ref).state_dict())


# The table, for a terminal and for a page.

LEGEND = (
    "each fault is patched into the PyTorch module; "
    "error and rule are those of the first check that fails\n"
    "shown at ... the first lines that a report shows of JAX and of PyTorch; replacing them mends"
    " the outputs and gradients\n"
    "1e-04 ... np.allclose of the outputs, default weights, eval mode, at this rtol and atol: "
    "'passes' detects nothing"
)

_COLUMNS = (
    "fault",
    "variant",
    "first detected by",
    "error",
    "rule",
    "shown at",
    *(f"{tol:.0e}" for tol in FIXED),
)


def table(detections: Sequence[Detection]) -> Table:
    """Return the table with a row for each fault."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    what, *others = _COLUMNS
    rows.add_column(what)
    for column in others:
        justify = "left" if column in (*_COLUMNS[:3], "shown at") else "right"
        rows.add_column(column, justify=justify, no_wrap=True)
    for detection in detections:
        style = "" if detection.detected and detection.shown else "bold red"
        cells = [Text(cell, style) for cell in _cells(detection)]
        rows.add_row(*cells)
    return rows


def markdown(detections: Sequence[Detection]) -> str:
    """Return the table in Markdown."""
    aligned = ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * len(FIXED)
    lines = [_COLUMNS, aligned, *map(_cells, detections)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(detections: Sequence[Detection]) -> str:
    """Return how many faults the checks detect, and how many the fixed tolerances do."""
    detected = sum(detection.detected for detection in detections)
    found = ", ".join(f"{_failing(detections, tol)} at {tol:.0e}" for tol in FIXED)
    read = [detection for detection in detections if detection.difference is not None]
    shown = sum(detection.shown for detection in read)
    located = f", {shown} of {len(read)} shown by the lines of both sides" if read else ""
    return (
        f"{detected} of {len(detections)} faults are detected{located}; a fixed tolerance detects"
        f" {found}"
    )


def _failing(detections: Sequence[Detection], tol: float) -> int:
    return sum(not detection.fixed[tol] for detection in detections)


def _cells(detection: Detection) -> tuple[str, ...]:
    fault = detection.fault
    fixed = ["passes" if passes else "fails" for passes in detection.fixed.values()]
    named = fault.what.removesuffix("."), fault.row
    return *named, *_verdict(detection.check), _shown(detection), *fixed


def _shown(detection: Detection) -> str:
    if detection.located or detection.difference is None:
        return detection.located
    return "NOT SHOWN"


def _verdict(check: Check | None) -> tuple[str, str, str]:
    if check is None:
        return "UNDETECTED", "", ""
    if not check.ran:
        return check.name, "not run", ""
    return check.name, f"{check.error:.1e}", f"{check.limit:.0e}"
