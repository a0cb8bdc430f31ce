"""Attention for JAX, every variant proven equal to PyTorch.

What this package exports is in `__init__.pyi`, and is imported where it is first used: a layer
costs no model.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
