"""Whole models, by family: their checkpoints, and text from them.

What this package exports is in `__init__.pyi`: a family is imported where it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
