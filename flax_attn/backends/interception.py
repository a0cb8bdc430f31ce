"""What is done in the place of attention calls while a program is traced and never run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array

from flax_attn.backends.call import Call

# Takes a call and the backend that was asked for, and returns an output of its shape and dtype.
Interceptor = Callable[[Call, str], Array]

_INTERCEPTOR: ContextVar[Interceptor | None] = ContextVar("_INTERCEPTOR", default=None)
_NUMBERS = count()


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Let a function take the attention calls that are traced in this context."""
    token = _INTERCEPTOR.set(interceptor)
    try:
        # JAX keeps the traces of inner `jax.jit`, by what is set around them: so it takes none from
        # outside this context, and leaves none behind.
        with set_xla_metadata(intercepted=str(next(_NUMBERS))):
            yield
    finally:
        _INTERCEPTOR.reset(token)


def current_interceptor() -> Interceptor | None:
    """Return what takes the calls in this context, or None."""
    return _INTERCEPTOR.get()
