"""What XLA computes wrongly: the smallest program that differs once it is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.quick_jit import DEFAULTS, quick_options
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace.equations import (
    Equation,
    Flattened,
    Values,
    Variable,
    evaluated,
    flattened,
    in_single,
    inputs_of,
    is_floating,
    needed,
)
from flax_attn.parity.trace.program import Place
from flax_attn.parity.trace.reproduction import UnwritableError, script

# Relative to the size of an array: no order of additions changes float64, or float32, by as much.
WRONG, WRONG_IN_SINGLE = 1e-6, 1e-3
# What may get around a fault of a compiler; a version that does not know one refuses it.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0},
    {"xla_llvm_disable_expensive_passes": True},
    {"xla_cpu_use_fusion_emitters": False},
    {"xla_cpu_experimental_ynn_fusion_type": ""},
    {"xla_cpu_experimental_xnn_fusion_type": ""},
    {"xla_cpu_enable_fast_math": False},
    {"xla_disable_hlo_passes": "fusion"},
    {"xla_disable_hlo_passes": "algsimp"},
    {"xla_disable_hlo_passes": "dot-library-rewriter"},
    {"xla_disable_all_hlo_passes": True},
)


@dataclass(frozen=True)
class Miscompiled:
    """A program that returns other numbers compiled than operation by operation.

    Args:
        error: relative error of the compiled program.
        jaxpr: smallest program that differs; empty where only the whole does.
        places: lines of source of its operations.
        helps: settings under which it is right.
        useless: settings under which it is wrong as well.
        script: program that shows the difference with JAX alone; empty where `note` says why.
        note: why there is no script, or no smaller program.
    """

    error: float
    jaxpr: str = ""
    places: tuple[Place, ...] = ()
    helps: tuple[str, ...] = ()
    useless: tuple[str, ...] = ()
    script: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        found = {**vars(self), "places": [str(place) for place in self.places]}
        return {**found, "error": float(min(self.error, np.finfo(float).max))}


def of_outputs(pair: Pair) -> Miscompiled | None:
    """Return what XLA computes wrongly where compiled outputs of JAX are not those of PyTorch.

    Operation by operation the two must be equal.
    """
    errors = [0.0]
    for found in (pair.flax64, pair.run("flax", pair.as_users_compile)):
        errors += tolerance.relative(found.outputs, pair.plain.outputs).values()
    largest = max(errors)
    if not _is_wrong(largest):
        return None
    note = "what differs is inside a loop, which JAX compiles whenever it runs"
    return miscompiled(pair) or Miscompiled(largest, note=note)


def miscompiled(pair: Pair) -> Miscompiled | None:
    """Return what XLA computes wrongly in float64; None where it is right.

    The end is cut first: the first operation whose value differs once it is compiled. Then the
    beginning: the fewest operations before it which still give the difference, on arrays that are
    computed one by one.
    """
    assert isinstance(pair.flax, JaxAdapter)
    for spec in (pair.as_users_compile, pair.float64):
        program = flattened(*pair.flax.traced(spec))
        values = evaluated(program.equations, program.given)
        for options in ({}, quick_options()):
            search = _Search(program, values, options)
            error = search.error(program.equations, program.outputs)
            if _is_wrong(error):
                return _reduced(search, error)
    return None


def _is_wrong(error: float, limit: float = WRONG) -> bool:
    # NaN is wrong, too.
    return not error <= limit


class _Search:
    """Compiles parts of a program.

    Args:
        program: whole program.
        values: values of its variables, computed one by one.
        options: options of the compiler.
    """

    def __init__(self, program: Flattened, values: Values, options: Mapping[str, Any]):
        self.program, self.values, self.options = program, values, dict(options)

    def error(
        self, equations: Sequence[Equation], wanted: Iterable[Variable], given: Values | None = None
    ) -> float:
        """Return the error of compiled equations, on inputs computed one by one or on others."""
        compared = self.floating(wanted)
        kept = needed(equations, compared)
        right = self.values if given is None else evaluated(kept, given)
        inputs = {variable: right[variable] for variable in inputs_of(kept)}
        return compiled_error(kept, compared, inputs, self.options)

    def floating(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return those of some variables whose values are floating."""
        return [variable for variable in variables if is_floating(self.values[variable])]

    def differs(
        self, equations: Sequence[Equation], end: Equation, given: Values | None = None
    ) -> bool:
        """Whether the results of an equation are wrong after some equations are compiled."""
        return _is_wrong(self.error(equations, end.results, given))

    def end(self, output: Variable) -> Equation:
        """Return the first equation whose results differ on the way to an output that does."""
        before = needed(self.program.equations, [output])
        low, high = 0, len(before) - 1
        while low < high:
            middle = (low + high) // 2
            if self.differs(before, before[middle]):
                high = middle
            else:
                low = middle + 1
        return self._earliest(before, before[high])

    def _earliest(self, before: Sequence[Equation], end: Equation) -> Equation:
        # What differs may become right again, which halving does not see.
        for equation in before:
            leads = set(equation.results).intersection(end.variables)
            if leads and self.differs(before, equation):
                return self._earliest(before, equation)
        return end

    def smallest(self, end: Equation) -> list[Equation]:
        """Return the fewest equations, up to one, which give the difference when compiled."""
        before = needed(self.program.equations, end.results)
        count = 1
        while count < len(before) and not self.differs(before[-count:], end):
            count *= 2
        kept = needed(before[-count:], end.results)
        for equation in kept[:-1]:
            # It may be gone with another that was left out.
            if equation not in kept:
                continue
            others = [other for other in kept if other is not equation]
            fewer = needed(others, end.results)
            if self.differs(fewer, end):
                kept = fewer
        return kept


def compiled_error(
    equations: Sequence[Equation],
    wanted: Sequence[Variable],
    given: Values,
    options: Mapping[str, Any],
    single: bool = False,
) -> float:
    """Return the largest relative error of compiled equations, against one by one.

    Args:
        equations: operations in order.
        wanted: variables that are compared.
        given: values of the inputs.
        options: options of the compiler beside its defaults.
        single: whether to compute in float32.
    """

    def results(given: Values) -> dict[str, Any]:
        known = evaluated(equations, given, single)
        return {str(variable): known[variable] for variable in wanted}

    compiled = jax.jit(results, compiler_options={**DEFAULTS, **options})
    actual = _numpy(compiled(given))
    right = _numpy(results(given))
    return max(tolerance.relative(actual, right).values())


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _reduced(search: _Search, error: float) -> Miscompiled:
    for output in search.floating(search.program.outputs):
        error_alone = search.error(search.program.equations, [output])
        if _is_wrong(error_alone):
            end = search.end(output)
            return _described(search, search.smallest(end), end)
    return Miscompiled(error, note="no output differs if it is compiled without the others")


def _described(search: _Search, equations: Sequence[Equation], end: Equation) -> Miscompiled:
    wanted = search.floating(end.results)
    given = {variable: search.values[variable] for variable in inputs_of(equations)}
    helps, useless = _settings(search, equations, wanted, given)
    # Each line once, in the order of the operations.
    found = dict.fromkeys(equation.place for equation in equations)
    shows = partial(search.differs, equations, end)
    text, note = "", ""
    try:
        text = script(equations, wanted[0], given, search.options, shows)
    except UnwritableError as reason:
        note = str(reason)

    def results(*arrays: Any) -> list[Any]:
        known = evaluated(equations, dict(zip(given, arrays, strict=True)))
        return [known[variable] for variable in wanted]

    return Miscompiled(
        error=compiled_error(equations, wanted, given, search.options),
        jaxpr=str(jax.make_jaxpr(results)(*given.values())),
        places=tuple(place for place in found if place),
        helps=helps,
        useless=useless,
        script=text,
        note=note,
    )


def _settings(
    search: _Search, equations: Sequence[Equation], wanted: Sequence[Variable], given: Values
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings under which equations are right, and those under which they are not."""
    right, wrong = [], []
    for setting in SETTINGS:
        options = {**search.options, **setting}
        try:
            error = compiled_error(equations, wanted, given, options)
        except jax.errors.JaxRuntimeError:
            # This version of XLA does not know the option, or cannot compile with it.
            continue
        text = ", ".join(f"{name}={value}" for name, value in setting.items())
        (wrong if _is_wrong(error) else right).append(text)
    with jax.enable_x64(False):
        singles = {variable: in_single(value) for variable, value in given.items()}
        error = compiled_error(equations, wanted, singles, search.options, single=True)
    in_single_too = _is_wrong(error, WRONG_IN_SINGLE)
    (wrong if in_single_too else right).append("jax_enable_x64=False")
    return tuple(right), tuple(wrong)
