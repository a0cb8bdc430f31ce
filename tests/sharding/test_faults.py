"""Faults of context parallel attention that were shipped elsewhere, or nearly.

The comparison must see each.
"""

from functools import partial

import jax
import numpy as np
import pytest

from flax_attn.parity import tolerance
from flax_attn.proof.faults.mesh import FAULTS
from flax_attn.sharding import context_parallel

from ..backends.conformance import FAST
from .cases import Case

CASE = Case("causal", "", "ring", "", 2, "everything")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
    jax.clear_caches()  # of programs that were traced with a fault


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return jax.jit(partial(CASE.both, backend="reference"), compiler_options=FAST)(
            CASE.arrays()
        )


def apart(mesh, balance, expected):
    """Return the names of what differs on a mesh."""
    with jax.set_mesh(mesh), context_parallel("ring", balance):
        found = jax.jit(CASE.both, compiler_options=FAST)(CASE.arrays())
    return {name for name in found if not _equal(found[name], expected[name])}


def _equal(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return np.abs(ours - theirs).max() <= tolerance.GRADIENT * np.abs(theirs).max()


@pytest.mark.parametrize("balance", sorted({fault.balance for fault in FAULTS}))
def test_nothing_differs_without_a_fault(balance, mesh_like, expected):
    assert not apart(mesh_like(context=4), balance, expected)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_seen(fault, monkeypatch, mesh_like, expected):
    monkeypatch.setattr(fault.target, fault.attribute, fault.replacement)
    assert fault.wrong <= apart(mesh_like(context=4), fault.balance, expected)
