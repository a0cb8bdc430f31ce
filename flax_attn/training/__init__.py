"""Training of language models: a step, low-precision parameters, and exactly resumed checkpoints.

What this package exports is in `__init__.pyi`: Orbax is imported where checkpoints are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
