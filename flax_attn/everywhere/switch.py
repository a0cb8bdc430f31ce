"""`everywhere`: computes the attention of other libraries here, in a block or in a program."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from attn_spec.checks import check_choice, check_type
from flax_attn.everywhere import reports
from flax_attn.everywhere.context import CONTEXT, OFF, Settings
from flax_attn.everywhere.install import Installation
from flax_attn.everywhere.reports import CallReport
from flax_attn.everywhere.targets import NAMES, load

INSTALLATION = Installation([load(name) for name in NAMES])


class Block:
    """What `everywhere` returns: a context manager, which gives the report of its block.

    Args:
        settings: options inside the block.
        program: whether they are those of the program already.
    """

    def __init__(self, settings: Settings, program: bool):
        self._settings = settings
        self._entered = []
        self._before = None
        if program:
            self._before = _set_program(settings)

    def __repr__(self) -> str:
        if self._before is not None:
            return f"everywhere, on for the program with {self._settings}"
        entered = "entered" if self._entered else "not entered: use it with `with`"
        return f"everywhere, a block with {self._settings}, {entered}"

    def __enter__(self) -> CallReport:
        if self._before is not None:
            # What was on for the whole program is for this block alone.
            _set_program(self._before)
            self._before = None
        _check_no_trace()
        _check_same(CONTEXT.value, self._settings)
        if self._settings.targets:
            INSTALLATION.enter()
        report, context = CallReport(), CONTEXT(self._settings)
        reports.open_reports().append(report)
        context.__enter__()
        # A stack: a block that was kept in a variable may be entered inside itself.
        self._entered.append(context)
        return report

    def __exit__(self, *error: object) -> None:
        context = self._entered.pop()
        context.__exit__(*error)
        reports.open_reports().pop()
        if self._settings.targets:
            INSTALLATION.leave()


class Everywhere(ModuleType):
    """The folder itself, `flax_attn.everywhere`, which is called and asked for its report."""

    def __call__(
        self,
        on: bool | None = None,
        *,
        targets: Sequence[str] | None = None,
        strict: bool = False,
    ) -> Block:
        """Return a block, in which attention is computed here; with `on` set it for the program."""
        return Block(settings_of(on, targets, strict), program=on is not None)

    def report(self) -> CallReport:
        """Return the calls of all blocks and threads since the program began."""
        return reports.PROGRAM


def settings_of(on: Any, targets: Any, strict: Any) -> Settings:
    """Return the options of `everywhere` after all checks."""
    check_type("on", on, bool | None, "True or False, or nothing for a block")
    check_type("strict", strict, bool, "True or False")
    return OFF if on is False else Settings(_chosen(targets), strict)


def _chosen(targets: Any) -> tuple[str, ...]:
    if targets is None:
        return NAMES
    check_type("targets", targets, list | tuple, f"a list of names out of {list(NAMES)}")
    if not targets:
        raise ValueError(
            f"targets must name at least one of {list(NAMES)}; got none. For all pass None, and for"
            " none everywhere(False)"
        )
    for name in targets:
        check_choice("a target", name, NAMES)
        target = load(name)
        if not target.installed:
            raise ValueError(
                f"target {name!r} is not installed: there is no package {target.package!r}. Install"
                " it, or leave it out of the targets"
            )
    # In one order: settings of the same targets are equal, and share what JAX has compiled.
    return tuple(name for name in NAMES if name in targets)


def _check_no_trace() -> None:
    # What is computed inside a trace is an array of that trace.
    if isinstance(jnp.zeros(()), Tracer):
        raise ValueError(
            "everywhere() must be entered outside of functions that JAX traces, as its options are"
            " part of what is compiled; it was called inside a trace. Enter it, or"
            " everywhere(False), around the call of the compiled function, or pass an adapter of"
            " flax_attn.adapters to a part of a model"
        )


def _check_same(now: Settings, wanted: Settings) -> None:
    if now.targets and wanted.targets and now != wanted:
        raise ValueError(
            f"everywhere is on with {now}; got {wanted}. Pass the same options, leave the block"
            " first, or turn it off with everywhere(False)"
        )


def _set_program(settings: Settings) -> Settings:
    """Set the options of the program, and return those that it had."""
    _check_no_trace()
    before = CONTEXT.get_global()
    _check_same(before, settings)
    # One is entered before the other is left: what both need is never undone in between.
    if settings.targets:
        INSTALLATION.enter()
    CONTEXT.set_global(settings)
    if before.targets:
        INSTALLATION.leave()
    return before
