"""The tensor types of the packages, spelled with the letters of `attn_spec.axes`."""

import numpy as np
from jaxtyping import Bool, Float, Integer
from torch import Tensor

Query = Float[Tensor, "*b t n h"]
Key = Float[Tensor, "*b s k h"]
Value = Float[Tensor, "*b s k v"]
Context = Float[Tensor, "*b t n v"]
Weights = Float[Tensor, "b n t s"]
Visible = Bool[Tensor, "#b #n #t #s"]
Tokens = Float[Tensor, "*b t d"]
ArrayLike = Tensor | np.ndarray | list
Index = Integer[Tensor, "..."]
