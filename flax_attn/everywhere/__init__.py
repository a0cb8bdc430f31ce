"""Attention of other libraries, computed by this one: one line, and no change of their models."""

import sys
from types import ModuleType

from flax_attn.everywhere.switch import everywhere

__all__ = ["everywhere"]


class _Callable(ModuleType):
    """This folder, which is called and asked for its report as the object that it is named for.

    Whoever imports a file of the folder first finds the folder as `flax_attn.everywhere`.
    """

    __call__ = staticmethod(everywhere)
    report = staticmethod(everywhere.report)


sys.modules[__name__].__class__ = _Callable
