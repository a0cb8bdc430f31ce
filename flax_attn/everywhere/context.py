"""The options in use in this thread: a context of JAX, and so a part of the keys of its caches."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Settings:
    """What is on.

    Args:
        targets: names of the targets whose attention is computed here; none where it is off.
        strict: whether a call that is left alone is an error.
    """

    targets: tuple[str, ...] = ()
    strict: bool = False

    def __str__(self) -> str:
        return f"targets={list(self.targets)}, strict={self.strict}"


OFF = Settings()
# What is compiled under one value is not found under another. JAX looks at a new context in all
# that it keeps: what was compiled before this file is imported is traced once more.
CONTEXT = jax.make_user_context(OFF)


def in_use() -> Settings:
    """Return the options of the innermost block of this thread, or else of the program."""
    return CONTEXT.value
