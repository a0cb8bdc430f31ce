"""Meshes of 8 simulated devices, and the small models that lie on them."""

from contextlib import contextmanager
from functools import partial

import jax
import pytest
from jax.sharding import AxisType

from flax_attn.modules import multi_head
from flax_attn.sharding.axes import mesh_in_use, place, spec

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def make_mesh(kind="auto", **sizes):
    """Return a mesh with axes of these names and sizes, on the first devices."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(KINDS[kind],) * len(sizes))


@pytest.fixture
def mesh_like():
    return make_mesh


@pytest.fixture
def attention_under(monkeypatch):
    """Compute the attention of modules on each device's part where axes are Explicit."""

    @contextmanager
    def under(kind):
        with monkeypatch.context() as patch:
            if kind == "explicit":
                patch.setattr(multi_head, "dot_product_attention", partial(_on_parts, multi_head.dot_product_attention))
            yield

    return under


def _on_parts(attend, query, key, value, bias, mask, **options):
    mesh = mesh_in_use(query)
    where = [spec(("batch", None, "heads", None), mesh, x.shape) for x in (query, key, value)]
    parts = [place(x, mesh, to) for x, to in zip((query, key, value), where, strict=True)]
    call = jax.shard_map(lambda *x: attend(*x, bias, mask, **options), in_specs=tuple(where), out_specs=where[0])
    return call(*parts)
