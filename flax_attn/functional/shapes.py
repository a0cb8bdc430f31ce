"""The array types of the packages, spelled with the letters of `attn_spec.axes`."""

import numpy as np
from jaxtyping import Array, Bool, Float, Integer

# `*b` is one batch axis, or none for one sequence; `#b` is a batch or 1.
Heads = Float[Array, "*b t n h"]
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
# How many tokens of each row are real; None is all.
RowLengths = ArrayLike | int | None
