"""Kernels are tested as one device runs them; what is divided has meshes in `tests/sharding`."""

import jax
import pytest


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Let kernels see a machine with one device, not the several that are simulated."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
