"""The array types of the packages, spelled with the letters of `attn_spec.axes`."""

import numpy as np
from jaxtyping import Array, Bool, Float, Integer

Query = Float[Array, "*b t n h"]
Key = Float[Array, "*b s k h"]
Value = Float[Array, "*b s k v"]
Context = Float[Array, "*b t n v"]
Weights = Float[Array, "b n t s"]
Visible = Bool[Array, "#b #n #t #s"]
Tokens = Float[Array, "*b t d"]
ArrayLike = Array | np.ndarray | list
Index = Integer[Array, "..."]
