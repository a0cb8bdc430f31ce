"""`everywhere`: computes the attention of other libraries here, in a block or in a program."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.core import Tracer

from attn_spec.checks import check_choice, check_type
from flax_attn.everywhere import report as reports
from flax_attn.everywhere.context import CONTEXT, OFF, Settings
from flax_attn.everywhere.install import Installation
from flax_attn.everywhere.report import Report
from flax_attn.everywhere.targets import NAMES, load

_INSTALLATION = Installation()


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

    def __enter__(self) -> Report:
        if self._before is not None:
            # What was on for the whole program is for this block alone.
            _set_program(self._before)
            self._before = None
        _check_no_trace()
        _check_same(CONTEXT.value, self._settings)
        if self._settings.targets:
            _INSTALLATION.enter()
        report, context = Report(), CONTEXT(self._settings)
        reports.open_reports().append(report)
        context.__enter__()
        self._entered.append((report, context))
        return report

    def __exit__(self, *error: object) -> None:
        _, context = self._entered.pop()
        context.__exit__(*error)
        reports.open_reports().pop()
        if self._settings.targets:
            _INSTALLATION.leave()


class Everywhere:
    """Attention of other libraries, computed by `dot_product_attention` of this one.

        with flax_attn.everywhere() as report:
            loss, gradients = train_step(model, batch)
        print(report)

    Calls mean what they mean in their libraries, and a call that cannot be computed here runs as
    before and is counted with its reason. Nothing is changed before a block is entered, and all is
    as before when the last one is left, also after an exception.

    A block is for its thread, as those of `jax.default_matmul_precision`; `everywhere(True)` is for
    the whole program, all threads included, and `everywhere(False)` ends it. With an argument it
    can also be the block of a `with`: `with everywhere(False):` leaves out a part of a program.
    What `jax.jit` compiles inside stays so, and is not found outside, nor the reverse. What was
    compiled, exported or traced by hand is not changed by a block: `jax.jit(f).lower(x).compile()`,
    a jaxpr, the pullback of `jax.vjp`.

    Targets are `jax.nn` (`dot_product_attention`), `nnx` and `linen` (their attention functions,
    and so the modules that call them), `keras`, `equinox` and `haiku` (modules and functions). None
    is imported: one that is imported later is changed when it is. One of a version that is not
    known is left alone, with a warning.

    Args:
        on: None for a block; True or False for the whole program.
        targets: names of the targets, or None for all that are installed.
        strict: whether a call that would be left alone is an error.

    Raises:
        ValueError: if a target is unknown or not installed, if it is on with other options, or
            inside a function that JAX traces; under `strict` for each call that is left alone.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((2, 64, 4, 8))
        >>> with everywhere() as report:
        ...     output = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> [(entry.place, entry.asked) for entry in report.taken]
        [('jax.nn.dot_product_attention', 'q[2, 64, 4, 8] k[2, 64, 4, 8] float32, causal')]
    """

    def __call__(
        self,
        on: bool | None = None,
        *,
        targets: Sequence[str] | None = None,
        strict: bool = False,
    ) -> Block:
        check_type("on", on, bool | None, "True or False, or nothing for a block")
        check_type("strict", strict, bool, "True or False")
        settings = OFF if on is False else Settings(_chosen(targets), strict)
        return Block(settings, program=on is not None)

    def report(self) -> Report:
        """Return the calls of all blocks and threads since the program began."""
        return reports.PROGRAM


def _chosen(targets: Sequence[str] | None) -> tuple[str, ...]:
    if targets is None:
        return NAMES
    check_type("targets", targets, list | tuple, f"names out of {list(NAMES)}")
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
    return tuple(name for name in NAMES if name in targets)


def _check_no_trace() -> None:
    # What is computed inside a trace is an array of that trace.
    if isinstance(jnp.zeros(()), Tracer):
        raise ValueError(
            "everywhere() must be entered outside of functions that JAX traces, as its options are"
            " part of what is compiled; it was called inside a trace. Enter it around the call of"
            " the compiled function, or pass an adapter of flax_attn.adapters to a part of a model"
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
    if settings.targets:
        _INSTALLATION.enter()
    CONTEXT.set_global(settings)
    if before.targets:
        _INSTALLATION.leave()
    return before


everywhere = Everywhere()
