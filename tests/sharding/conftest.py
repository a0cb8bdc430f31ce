"""Meshes of 8 simulated devices, and the small models that lie on them."""

import jax
import pytest
from jax.sharding import AxisType

KINDS = {
    "auto": (AxisType.Auto,) * 3,
    "explicit": (AxisType.Explicit,) * 3,
    "both": (AxisType.Explicit, AxisType.Auto, AxisType.Explicit),
}


def make_mesh(kind="auto", **sizes):
    """Return a mesh with up to three axes of these names and sizes, on the first devices."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=KINDS[kind][: len(sizes)])


@pytest.fixture
def mesh_like():
    return make_mesh
