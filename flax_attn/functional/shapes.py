"""The axis legend, and the array types spelled with it.

Every shape in this package, in a docstring, an einops string or an annotation, uses these letters.
"""

import numpy as np
from jaxtyping import Array, Bool, Float, Integer

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
Query = Float[Array, "*b t n h"]
Key = Float[Array, "*b s k h"]
Value = Float[Array, "*b s k v"]
Context = Float[Array, "*b t n v"]
Weights = Float[Array, "b n t s"]
Bias = Float[Array, "#b #n #t #s"]
Visible = Bool[Array, "#b #n #t #s"]
Tokens = Float[Array, "*b t d"]
ArrayLike = Array | np.ndarray | list
Positions = Integer[Array, "*b t"]
Index = Integer[Array, "..."]
RowLengths = ArrayLike | int | None  # how many tokens of each row are real; None is all
