"""jaxtyping's checks at a lower price, for functions whose annotations have no shapes.

jaxtyping binds the arguments of each call twice and checks them twice, so that a result can be
compared with the shapes of the arguments. Without shapes there is nothing to compare: arguments are
checked once, before the call, and the result by itself.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from jaxtyping import _decorator

UNCHECKED = (Any, inspect.Signature.empty)


def jaxtyped(function: Any = None, *, typechecker: Callable) -> Any:
    """Return what `jaxtyping.jaxtyped` does, or a function that checks the same and is faster."""
    if function is None:
        return partial(jaxtyped, typechecker=typechecker)
    # Classes and descriptors call jaxtyping's own for their functions.
    if not isinstance(function, FunctionType):
        return _decorator.jaxtyped(function, typechecker=typechecker)
    signature = _with_hints(function)
    hints = [x.annotation for x in signature.parameters.values()]
    result = signature.return_annotation
    if any(map(has_shapes, [*hints, result])):
        return _decorator.jaxtyped(function, typechecker=typechecker)
    names = function.__name__, function.__qualname__, function.__module__
    with_arguments = signature.replace(return_annotation=Any)
    check = typechecker(_decorator._make_fn_with_signature(*names, with_arguments, output=False))

    @wraps(function)
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        check(*args, **kwargs)
        return give(function(*args, **kwargs))

    def give(value):
        return value

    give.__annotations__ = {"return": result}
    give = give if result in UNCHECKED else typechecker(give)
    # Whoever looks for the user's lines passes over those of jaxtyping.
    checked.__code__ = checked.__code__.replace(co_filename=_decorator.__file__)
    return checked


def has_shapes(hint: Any) -> bool:
    """Return whether a type, or one that it is made of, is one of jaxtyping."""
    if isinstance(hint, list):
        return any(map(has_shapes, hint))
    if getattr(hint, "__module__", None) == "jaxtyping":
        return True
    return any(map(has_shapes, get_args(hint)))


def _with_hints(function: FunctionType) -> inspect.Signature:
    """Return the signature with types for the text that annotations are, as jaxtyping reads it."""
    signature = inspect.signature(function)
    read = partial(_decorator._destring_annotation, ns=function.__globals__)
    parameters = [x.replace(annotation=read(x.annotation)) for x in signature.parameters.values()]
    result = read(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=result)
