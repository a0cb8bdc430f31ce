"""Functions that ask at each call who computes it, whatever name they are reached by.

A function is given other code and stays the object that it is: whoever imported it by name, or has
it as a default argument, reaches the new code too, and the old one again afterwards.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

_HOOK = "the function that is called instead"


@dataclass(frozen=True)
class Redirection:
    """A function whose calls go elsewhere, and the code that it had.

    Args:
        function: function that is redirected.
        code: code that it had.
        signature: signature that it gave instead of its own, or None.
    """

    function: Any
    code: CodeType
    signature: inspect.Signature | None

    def undo(self) -> None:
        """Give the function back what it had."""
        self.function.__code__ = self.code
        del self.function.__signature__
        if self.signature is not None:
            self.function.__signature__ = self.signature


def redirect(function: FunctionType, hook: Callable[..., Any]) -> Redirection:
    """Let calls of a function be `hook(original, *args, **kwargs)`."""
    original = _copy(function)
    found = Redirection(function, function.__code__, vars(function).get("__signature__"))
    # The signature of the old code, for who asks: the new code takes all arguments.
    function.__signature__ = inspect.signature(function)
    function.__code__ = _code(function, functools.partial(hook, original))
    return found


def plain_function(value: Any) -> FunctionType:
    """Return the function of Python inside all wrappers of a method, or raise `TypeError`."""
    while not isinstance(value, FunctionType):
        value = _wrapped(value)
    # Haiku's wrapper opens the scope that names what is made inside.
    return inspect.unwrap(value)


def _wrapped(value: Any) -> Any:
    # Not by `getattr`: a wrapper of a class may answer for what it wraps.
    attributes = getattr(value, "__dict__", {})
    for name in ("method", "__func__", "__wrapped__"):
        if name in attributes:
            return attributes[name]
    raise TypeError(f"no function of Python, whose code can be changed; got {value!r}")


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def _code(function: FunctionType, hook: Callable[..., Any]) -> CodeType:
    """Return code that calls `hook`, for a function with as many variables of outer functions.

    The hook is a constant of the code, so that a call that has begun in another thread finds it
    when the function has its own code again.
    """
    # Python refuses code that has another number of them than the old code.
    free = [f"free{i}" for i in range(len(function.__code__.co_freevars))]
    lines = [
        "def outer():",
        *(f"    {name} = None" for name in free),
        "    def inner(*args, **kwargs):",
        f"        hook = {_HOOK!r}",
        "        return hook(*args, **kwargs)",
        f"        return {', '.join(free) or None}",
        "    return inner",
    ]
    names = {}
    exec("\n".join(lines), names)
    code = names["outer"]().__code__
    constants = tuple(hook if one == _HOOK else one for one in code.co_consts)
    # Profiles and tracebacks name the function that was called.
    return code.replace(
        co_consts=constants,
        co_filename=function.__code__.co_filename,
        co_firstlineno=function.__code__.co_firstlineno,
        co_name=function.__code__.co_name,
        co_qualname=function.__code__.co_qualname,
    )
