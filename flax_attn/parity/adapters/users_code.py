"""The caller's code, where it ends the process or does what JAX cannot compile."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jax
from flax.errors import TraceContextError

from flax_attn.parity.adapters.adapter import PairingError
from flax_attn.parity.trace.program import Place, place_of

# What JAX raises where code needs the value of an array that it traces, and what to write.
_REMEDIES = {
    jax.errors.TracerBoolConversionError: (
        "Use jnp.where or jax.lax.cond for if, and jax.lax.while_loop for while"
    ),
    jax.errors.TracerArrayConversionError: "Use jnp in place of np",
    jax.errors.NonConcreteBooleanIndexError: "Use jnp.where in place of an index by a mask",
}
_REMEDY = "Take sizes from shapes, and leave arrays be arrays: no int(), float() or .item()"
_CAPTURED = (
    "Pass the module through the transform: nnx.jit, nnx.grad or nnx.vmap with it as an argument,"
    " or nnx.split before and nnx.merge inside"
)
_UNTRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class AtOnceExit(SystemExit):
    """What `os._exit` raises in `without_exit`; it would end the process without a report."""


@contextmanager
def users_code() -> Iterator[None]:
    """Run the caller's code in here.

    Raises:
        PairingError: if it ends the process, or JAX or Flax cannot trace it.
    """
    try:
        with returning():
            yield
    except _UNTRACED as error:
        raise PairingError(_untraced(error)) from error
    except TraceContextError as error:
        raise PairingError(_captured(error)) from error


@contextmanager
def returning() -> Iterator[None]:
    """Run the caller's code in here, which returns or raises.

    Raises:
        PairingError: if it ends the process.
    """
    try:
        with without_exit():
            yield
    except SystemExit as error:
        raise PairingError(ended(error)) from error


@contextmanager
def without_exit() -> Iterator[None]:
    """Let `os._exit` raise `AtOnceExit` in here: a code of 0 would be read as "equal"."""
    exit_at_once, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        # The children of a fork end by it.
        if os.getpid() != process:
            exit_at_once(status)
        raise AtOnceExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_at_once


def ended(error: SystemExit) -> str:
    """Return which line of the caller's ended the process, and what to do."""
    function, raised = "sys.exit", f"SystemExit {error.code}"
    if isinstance(error, AtOnceExit):
        function, raised = "os._exit", f"os._exit({error.code})"
    return (
        f"{_place(error)} ended the process ({raised}). What is compared must return: remove"
        f" {function} there, or what calls it"
    )


def _untraced(error: Exception) -> str:
    place, kind = _place(error), type(error)
    return (
        f"JAX cannot compile `{place.source}` at {place} ({kind.__name__})."
        f" {_REMEDIES.get(kind, _REMEDY)}"
    )


def _captured(error: Exception) -> str:
    place = _place(error)
    return (
        f"`{place.source}` at {place} changes a variable of a module that a transform of JAX has"
        f" captured, such as the count of a random stream (TraceContextError). {_CAPTURED}"
    )


def _place(error: BaseException) -> Place:
    """Return the line of the caller's that an error was raised from."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(raised)]
    # The function that stands in for `os._exit`.
    if isinstance(error, AtOnceExit):
        del frames[0]
    return place_of(frames) or Place(*frames[0])
