"""Embeddings: of tokens, and of positions where they are learned."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.checks import check_positive
from attn_spec.generation_checks import check_ids
from flax_attn.functional.dtypes import dtype_name
from flax_attn.functional.integers import clipped
from flax_attn.functional.parameter_sums import lookup
from flax_attn.modules.initialisation import check_dtypes, next_key, normal, redrawn
from flax_attn.modules.matrix_product import dot_general
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.parameters import named
from flax_attn.sharding.products import sharding_of_rows


class Embedding(nnx.Module):
    """A table of learned vectors: `embedding[ids]`.

    The table is drawn from a standard normal distribution, as in `torch.nn.Embedding`. An id
    outside `0 ... size - 1` gives NaN: ids are not read on the host, so that a call does not wait
    for the device.

    Args:
        size: number of vectors.
        d_model: width of a vector.
        dtype: dtype of the result; None is that of the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the product in `attend`, as in `jax.lax.dot_general`.
        axes: names of the axes of the table, by which a mesh splits them.
        rngs: random streams; parameters are drawn from `params`.

    Shapes:
        integers `(...)` to `(..., d_model)`; embedding `(size, d_model)`.

    Raises:
        ValueError: if a size is not positive, or if ids are not integers.

    Example:
        >>> Embedding(5, 3, rngs=nnx.Rngs(0))(jnp.array([[0, 4]])).shape
        (1, 2, 3)
    """

    def __init__(
        self,
        size: int,
        d_model: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        axes: tuple[str | None, str | None] = ("vocab", "embed"),
        rngs: nnx.Rngs,
    ):
        check_positive(size=size, d_model=d_model)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        self.dtype, self.precision = dtype, precision
        self.dot_general = dot_general
        table = redrawn(normal())(next_key(rngs.params), (size, d_model), param_dtype)
        self.embedding = nnx.Param(table, **named(*axes))

    def __call__(self, ids: Integer[Array, "*shape"]) -> Float[Array, "*shape d"]:
        table = self.embedding[...]
        # A float that is rounded down would look up a row without a word.
        check_ids(dtype_name(ids.dtype))
        ids = clipped(ids, table.shape[0])
        # XLA would gather more than the table is wide.
        table = constrain(table, self.embedding.out_sharding[0], None)
        found = lookup(
            table,
            ids,
            mode="fill",
            fill_value=jnp.nan,
            wrap_negative_indices=False,
            out_sharding=sharding_of_rows(ids, table),
        )
        return found if self.dtype is None else found.astype(self.dtype)

    def attend(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape size"]:
        """Return `x @ embedding^T`: the table as an output head, with tied weights."""
        table = self.embedding[...]
        dtype = jnp.result_type(x, table) if self.dtype is None else self.dtype
        contract_last = (((x.ndim - 1,), (1,)), ((), ()))
        return self.dot_general(
            x.astype(dtype), table.astype(dtype), contract_last, precision=self.precision
        )
