"""How much a pass is worth: which edits of the user's own JAX program the checks detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import Arrays, Mode, RunSpec
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.jax_programs import Programs
from flax_attn.parity.adapters.quick_jit import compiled
from flax_attn.parity.checks import CHECKS, run_checks
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.fresh_runs import FreshRuns
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.edited import CALLED, Edit, Trace, traced
from flax_attn.parity.trace.edits import CATALOGUE
from flax_attn.parity.trace.program import Place
from flax_attn.parity.training import TrainingSpec

# Added to the seed of a pair.
DRAWN = 4
# The cheapest that see most; the others follow in their own order, as far as they are chosen.
FIRST = ("forward", "gradients")
# The steps of training show no more than one of its gradients does.
WITHOUT_EFFECT = ("training",)


@dataclass(frozen=True)
class Mutant:
    """An edit that was planted, and the check that detected it.

    Args:
        kind: kind of the edit, from the catalogue.
        place: line of source of the operation.
        sentence: what was edited.
        detected_by: name of the first check that detects it; empty if none does.
        equivalent: whether no check detects it, and neither outputs nor gradients show it on fresh
            inputs.
    """

    kind: str
    place: Place
    sentence: str
    detected_by: str = ""
    equivalent: bool = False

    def __str__(self) -> str:
        """Return the line of source, and what was edited."""
        return f"{self.place}  {self.sentence}"

    def as_dict(self) -> dict[str, Any]:
        """Return the mutant for JSON."""
        return {
            "kind": self.kind,
            "file": self.place.file,
            "line": self.place.line,
            "sentence": self.sentence,
            "detected_by": self.detected_by,
            "equivalent": self.equivalent,
        }


@dataclass(frozen=True)
class Mutants:
    """Edits that were planted one by one in the JAX side of a pair whose checks hold.

    Args:
        mutants: the edits, in the order in which they were planted.
    """

    mutants: tuple[Mutant, ...]

    @property
    def detected(self) -> dict[str, int]:
        """How many each check was the first to detect."""
        return dict(Counter(one.detected_by for one in self.mutants if one.detected_by))

    @property
    def equivalent(self) -> list[Mutant]:
        """Those that change nothing: no check could detect them."""
        return [one for one in self.mutants if one.equivalent]

    @property
    def undetected(self) -> list[Mutant]:
        """Those that no check detects although they change what is computed."""
        return [one for one in self.mutants if not (one.detected_by or one.equivalent)]

    def lines(self) -> Iterator[str]:
        """Yield how many were detected, then a line for each that was not."""
        if not self.mutants:
            yield "no operation of the JAX side can be edited"
            return
        detected, same = self.detected, len(self.equivalent)
        found = sum(detected.values())
        line = f"{found} of {len(self.mutants) - same} edits are detected"
        if detected:
            counts = ", ".join(f"{name} {count}" for name, count in detected.items())
            line += f" ({counts})"
        if same:
            line += f"; {same} more change nothing"
        yield line
        yield from (f"not detected: {one}" for one in self.undetected)

    def as_dict(self) -> dict[str, Any]:
        """Return all mutants for JSON."""
        return {
            "planted": len(self.mutants),
            "detected": self.detected,
            "equivalent": len(self.equivalent),
            "undetected": len(self.undetected),
            "mutants": [one.as_dict() for one in self.mutants],
        }


def _as_it_is(function: Callable, **options: Any) -> Callable:
    return function


class EditedAdapter(JaxAdapter):
    """The adapter of a JAX module whose program is edited.

    Args:
        adapter: adapter of the module.
        edit: edit of its program; None is none.
        compiler: function that compiles what is run; by default nothing is compiled.
    """

    def __init__(
        self, adapter: JaxAdapter, edit: Edit | None = None, compiler: Callable = _as_it_is
    ):
        vars(self).update(vars(adapter))
        # What was compiled is of another program. Most runs take place once, and are not compiled.
        self.programs = Programs(self._stepped, compiler)
        self._edit = edit
        # Shared by all edits: they are traced once for each shape and dtype.
        self._traces: dict[Any, Trace] = vars(adapter).get("_traces", {})

    def trace(self, spec: RunSpec) -> Trace:
        """Return the program of a run, as it is without the edit."""
        return self._traced(self.arguments(spec), spec.mode, spec.cached)

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy, with compiled steps."""
        steps = EditedAdapter(self, self._edit, compiled)
        return JaxAdapter.train(steps, spec)

    def _traced(self, arguments: tuple[Any, ...], mode: Mode, cached: bool) -> Trace:
        leaves, tree = jax.tree.flatten(arguments)
        key = tree, tuple(str(jax.typeof(leaf)) for leaf in leaves), mode, cached
        if key not in self._traces:
            call = partial(super()._stepped, mode=mode, cached=cached)
            self._traces[key] = traced(call, arguments)
        return self._traces[key]

    def call(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the outputs by name, of operations in the scope of those that may be edited."""
        with jax.named_scope(CALLED):
            return super().call(*arguments, **options)

    def _stepped(
        self, params, inputs, state, extras, mode: Mode, cached: bool = False, before: Any = None
    ) -> tuple[dict[str, Any], Any]:
        # An edit leaves no state behind for a second call.
        del before
        arguments = params, inputs, state, extras
        trace = self._traced(arguments, mode, cached)
        return trace.run(jax.tree.leaves(arguments), self._edit)


def plant(pair: Pair, checks: Sequence[str] | None = None, count: int = 50) -> Mutants:
    """Return which of `count` edits at random places the checks of these names detect.

    Args:
        pair: pair of modules whose checks hold; its PyTorch results are used again.
        checks: names from `CHECKS`; None is all.
        count: number of edits.

    Raises:
        ValueError: if `count` is negative, or the JAX side is no module.
    """
    check_count(count)
    if not isinstance(pair.flax, JaxAdapter):
        raise ValueError(
            f"mutants are edits of a JAX module; got a {type(pair.flax).__name__}. Pass the pair"
            " of the module itself"
        )
    chosen = list(CHECKS) if checks is None else list(checks)
    chosen.sort(key=lambda name: name not in FIRST)
    mutants = []
    with on_cpu():
        right = EditedAdapter(pair.flax)
        fresh = FreshRuns(pair, right)
        trace = right.trace(pair.uncompiled)
        for edit in _drawn(trace, count, pair.seed):
            edited = pair.with_flax(EditedAdapter(right, edit))
            mutant = _judged(edited, edit, chosen, fresh)
            mutants.append(mutant)
    return Mutants(tuple(mutants))


def check_count(count: int) -> None:
    """Raise unless this can be a number of mutants.

    Raises:
        ValueError: if it is negative.
    """
    if count < 0:
        raise ValueError(f"mutants must be 0 or more; got {count}. Pass mutants=50")


def _drawn(trace: Trace, count: int, seed: int) -> Iterator[Edit]:
    """Yield edits at random places, those of each kind in turn."""
    random = np.random.default_rng(seed + DRAWN)
    waiting = _by_kind(trace)
    for edits in waiting:
        random.shuffle(edits)
    left = count
    while left and any(waiting):
        for edits in waiting:
            # Those that do not fit are dropped, so that each kind has its turn.
            while edits and left:
                edit = edits.pop()
                if trace.fits(edit):
                    left -= 1
                    yield edit
                    break


def _by_kind(trace: Trace) -> list[list[Edit]]:
    """Return the edits of each kind, in the order of the catalogue."""
    found: dict[str, list[Edit]] = {kind: [] for kind in CATALOGUE}
    for edit in trace.edits():
        found[edit.kind].append(edit)
    return list(found.values())


def _judged(pair: Pair, edit: Edit, checks: Sequence[str], fresh: FreshRuns) -> Mutant:
    mutant = Mutant(edit.kind, edit.key.place, edit.sentence)
    # The outputs alone are cheaper than the check, which computes gradients beside them.
    if "forward" in checks and _outputs_differ(pair):
        return replace(mutant, detected_by="forward")
    # Not known before the first check that costs more than to find out.
    equivalent = None
    for name in checks:
        if equivalent is None and name not in FIRST:
            equivalent = fresh.equivalent(pair.flax)
        if equivalent and name in WITHOUT_EFFECT:
            continue
        (check,) = run_checks(pair, [name], wanted=False)
        if check.failed:
            return replace(mutant, detected_by=name)
    if equivalent is None:
        equivalent = fresh.equivalent(pair.flax)
    return replace(mutant, equivalent=equivalent)


def _outputs_differ(pair: Pair) -> bool:
    """Whether the outputs break the rule of the check."""
    ours = pair.run("flax", pair.uncompiled).outputs
    errors = tolerance.relative(ours, pair.plain.outputs)
    return not tolerance.within(errors, tolerance.FORWARD)
