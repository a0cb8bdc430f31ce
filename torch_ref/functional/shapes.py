"""The axis legend, and the tensor types spelled with it.

Every shape in this package, in a docstring, an einops string or an annotation, uses these letters.
"""

import numpy as np
from jaxtyping import Bool, Float, Integer
from torch import Tensor

AXES = {
    "b": "batch",
    "t": "query tokens",
    "s": "key tokens",
    "n": "query heads",
    "k": "key/value heads",
    "g": "query heads per key/value head, n // k",
    "h": "head width of queries and keys",
    "v": "head width of values (equal to h unless said)",
    "d": "model width",
}

# `*b` is one batch axis, or none for one sequence; `#b` is a batch or 1.
Query = Float[Tensor, "*b t n h"]
Key = Float[Tensor, "*b s k h"]
Value = Float[Tensor, "*b s k v"]
Context = Float[Tensor, "*b t n v"]
Weights = Float[Tensor, "b n t s"]
Bias = Float[Tensor, "#b #n #t #s"]
Visible = Bool[Tensor, "#b #n #t #s"]
Tokens = Float[Tensor, "*b t d"]
ArrayLike = Tensor | np.ndarray | list
Positions = Integer[Tensor, "*b t"]
Index = Integer[Tensor, "..."]
RowLengths = ArrayLike | int | None  # how many tokens of each row are real; None is all
