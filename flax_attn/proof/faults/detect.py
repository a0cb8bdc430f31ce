"""The tests are tested: every known fault is planted, one at a time, and must be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text

import torch_ref
from flax_attn.parity import checks
from flax_attn.parity.adapters.adapter import Arrays, RunSpec, float64
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.check import Check
from flax_attn.parity.compare import on_cpu
from flax_attn.parity.pair import NotRun
from flax_attn.proof.faults import FAULTS, Fault
from flax_attn.proof.faults.formulas import Formula
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import Variant

# From the cheapest to the dearest. A lower dtype is not among them: PyTorch's own error is its rule, so that a fault
# of the PyTorch side widens it. Faults of the Flax side are left to the tests.
ORDER = (
    *("forward", "gradients", "dropout", "cache = full"),
    *("huge logits", "padded rows", "poisoned padding", "training"),
)
FIXED = (1e-4, 1e-2, 4e-2)  # tolerances that test suites of ports are seen with; none of ours


class UnsoundError(ValueError):
    """A check that fails without any fault: what it says about a fault means nothing."""


@dataclass(frozen=True)
class Kill:
    """What became of a fault.

    Args:
        fault: that was planted.
        check: the first that fails, or None.
        fixed: whether the outputs pass, in float32 and with default weights, by fixed tolerance.
    """

    fault: Fault
    check: Check | None
    fixed: dict[float, bool]

    @property
    def survived(self) -> bool:
        """Whether no check sees the fault."""
        return self.check is None


def run(
    faults: Sequence[Fault] = FAULTS, seed: int = 0, watch: Callable[[str], None] = lambda name: None
) -> list[Kill]:
    """Plant each fault and return which check sees it first.

    Args:
        faults: to be planted.
        seed: of the weights and inputs.
        watch: is told the name of each fault before it is planted.

    Raises:
        UnsoundError: if a check fails where nothing is planted.
    """
    rows = {fault.row.name: fault.row for fault in faults}
    with on_cpu():
        grounds = {name: Ground(row, seed) for name, row in rows.items()}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Ground.prepare, grounds.values()))
        return [_kill(grounds[fault.row.name], fault, watch) for fault in faults]


def _kill(ground: Ground, fault: Fault, watch: Callable[[str], None]) -> Kill:
    watch(fault.name)
    failed = (check for check in ground.climb(fault) if not check.passed)
    return Kill(fault, next(failed, None), ground.fixed(fault))


class Ground:
    """A row that faults are planted in. What holds without a fault, and all that Flax results, is found out once."""

    def __init__(self, row: Variant | Formula, seed: int = 0):
        self.name = row.name
        if isinstance(row, Formula):
            self.pair, self.defaults = row.pair(seed), {}
        else:
            self.pair, self.defaults = pair_of(row, seed), _default_weights(row, seed)
        self._runs: dict[str, bool] = {}

    def prepare(self) -> None:
        """Compile what every fault needs; grounds may do so side by side, as long as nothing is planted."""
        with on_cpu():
            self.runs(ORDER[0])
            self._flax_outputs = self._with_default_weights()

    def runs(self, name: str) -> bool:
        """Whether a check says anything about this row.

        Raises:
            UnsoundError: if it fails without a fault.
        """
        if name not in self._runs:
            try:
                check = checks.CHECKS[name](self.pair)
            except NotRun:
                check = None
            if check is not None and not check.passed:
                raise UnsoundError(
                    f"nothing is planted in {self.name}, and still {check.explain()}. What is planted there cannot be "
                    "judged: mend that first"
                )
            self._runs[name] = check is not None
        return self._runs[name]

    def climb(self, fault: Fault) -> Iterator[Check]:
        """Yield the checks of a fault, in order."""
        for name in filter(self.runs, ORDER):
            with fault.planted(self._torch, self.pair.weights) as faulty:
                (check,) = checks.run_checks(self.pair.with_torch(faulty), [name])
            yield check  # with nothing planted any more: who asks may stop here

    def fixed(self, fault: Fault) -> dict[float, bool]:
        """Return whether fixed tolerances let a fault pass."""
        with fault.planted(self._torch, self.defaults) as faulty:
            theirs = faulty.run(self._question).outputs["output"]
        return {tol: bool(np.allclose(self._flax_outputs, theirs, rtol=tol, atol=tol)) for tol in FIXED}

    @property
    def _torch(self) -> TorchAdapter:
        assert isinstance(self.pair.torch, TorchAdapter), "faults are planted in a module, not in a recorded side"
        return self.pair.torch

    @property
    def _question(self) -> RunSpec:
        return self.pair.run_spec("as others ask", dtype="float32")

    def _with_default_weights(self) -> np.ndarray:
        self.pair.flax.load(self.defaults)
        try:
            return self.pair.flax.run(self._question).outputs["output"]
        finally:
            self.pair.flax.load(self.pair.weights)


def _default_weights(variant: Variant, seed: int) -> Arrays:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return float64(dict(variant.build(torch_ref).named_parameters()))


# The table, for a terminal and for a page.

LEGEND = """\
planted, one at a time, into the PyTorch side; error and rule are those of the first check that fails
1e-04 ... np.allclose of float32 outputs, default weights, eval mode, at this rtol and atol: 'passes' sees nothing"""

_COLUMNS = ("fault", "planted in", "first caught by", "error", "rule", *(f"{tol:.0e}" for tol in FIXED))


def table(kills: Sequence[Kill]) -> Table:
    """Return one row a fault."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(_COLUMNS):
        rows.add_column(column, justify="left" if i < 3 else "right", no_wrap=i > 0)
    for kill in kills:
        style = "bold red" if kill.survived else ""
        rows.add_row(*(Text(cell, style=style) for cell in _cells(kill)))
    return rows


def markdown(kills: Sequence[Kill]) -> str:
    """Return the table in Markdown."""
    lines = [_COLUMNS, ("---", "---", "---", *("---:" for _ in _COLUMNS[3:])), *map(_cells, kills)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(kills: Sequence[Kill]) -> str:
    """Return how many faults each way of testing sees."""
    seen = [f"{sum(not kill.fixed[tol] for kill in kills)} at {tol:.0e}" for tol in FIXED]
    caught = sum(not kill.survived for kill in kills)
    return f"{caught} of {len(kills)} faults are caught; a fixed tolerance sees {', '.join(seen)}"


def _cells(kill: Kill) -> tuple[str, ...]:
    check = kill.check
    verdict = ("SURVIVED", "", "") if check is None else (check.name, "not run", "")
    if check is not None and check.ran:
        verdict = (check.name, f"{check.error:.1e}", f"{check.limit:.0e}")
    fixed = ("passes" if passes else "fails" for passes in kill.fixed.values())
    return (kill.fault.what.removesuffix("."), kill.fault.row.name, *verdict, *fixed)
