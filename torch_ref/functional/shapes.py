"""The tensor types of the packages, spelled with the letters of `attn_spec.axes`."""

import numpy as np
from jaxtyping import Bool, Float, Integer
from torch import Tensor

# `*b` is one batch axis, or none for one sequence; `#b` is a batch or 1.
Heads = Float[Tensor, "*b t n h"]
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
# How many tokens of each row are real; None is all.
RowLengths = ArrayLike | int | None
