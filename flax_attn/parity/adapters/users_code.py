"""The caller's code, where it ends the process or does what JAX cannot compile."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import jax

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
_UNTRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


@contextmanager
def users_code() -> Iterator[None]:
    """Run the caller's code in here.

    Raises:
        PairingError: if it ends the process, or JAX cannot trace it.
    """
    try:
        yield
    except SystemExit as error:
        raise PairingError(ended(error)) from error
    except _UNTRACED as error:
        raise PairingError(_untraced(error)) from error


def ended(error: SystemExit) -> str:
    """Return which line of the caller's ended the process, and what to do."""
    return (
        f"{_place(error)} ended the process (SystemExit {error.code}). What is compared must"
        " return: remove sys.exit there, or what calls it"
    )


def _untraced(error: Exception) -> str:
    place, kind = _place(error), type(error)
    return (
        f"JAX cannot compile `{place.source}` at {place} ({kind.__name__})."
        f" {_REMEDIES.get(kind, _REMEDY)}"
    )


def _place(error: BaseException) -> Place:
    """Return the line of the caller's that an error was raised from."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(raised)]
    return place_of(frames) or Place(*frames[0])
