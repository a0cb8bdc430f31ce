"""Rows on a mesh: what it cannot split is not compared."""

import jax
import pytest
from jax.sharding import AxisType

from flax_attn.parity.cpu import on_cpu
from flax_attn.proof.on_mesh import axes_of, prove_on_mesh
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import select, sizes_for, table


@pytest.fixture
def mesh():
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)), on_cpu():
        yield


@pytest.mark.usefixtures("mesh")
def test_rows_that_do_not_divide_are_refused_with_the_remedy():
    (variant,) = select(["multi_head_causal"])  # of 3 rows
    report = prove_on_mesh(variant, pair_of(variant))
    (check,) = report.checks
    assert check.skipped.startswith(
        "the mesh splits batch over data=2, which must divide the 3 rows. Pass a batch of"
    )
    assert not report.passed


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
    ("name", "axes"),
    [("self_attention", ["data"]), ("embedding", ["data", "tensor"]), ("layer_norm", ["data"])],
)
def test_the_axes_are_those_that_arrays_are_split_over(name, axes):
    (variant,) = select([name], table(sizes_for({"data": 2, "tensor": 2})))
    assert axes_of(pair_of(variant)) == axes
