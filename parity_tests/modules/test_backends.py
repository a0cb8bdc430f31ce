"""Modules set to another backend against their PyTorch twins.

The rules are the same, and the tiles have a few tokens.
"""

import pytest

import flax_attn
from flax_attn.backends.registry import load
from flax_attn.proof import prove as proof
from flax_attn.proof.variants import select


@pytest.fixture
def calls(monkeypatch):
    """Use small tiles, and keep the calls that reach the backend."""
    blocked, found = load("blocked"), []
    attend = blocked.attend
    monkeypatch.setattr(blocked, "block", 4)
    monkeypatch.setattr(blocked, "edge", 2)
    monkeypatch.setattr(blocked, "attend", lambda call: (found.append(call), attend(call))[1])
    return found


@pytest.fixture
def blocked_modules(monkeypatch):
    """Set all modules that are proven to the backend."""
    build = proof._flax_module

    def build_blocked(case):
        module = build(case)
        flax_attn.set_backend(module, "blocked")
        return module

    monkeypatch.setattr(proof, "_flax_module", build_blocked)


# What modules hand on: a mask and positions; the key of dropout, through a block. The backend
# itself is proven to compute the formula elsewhere.
ROWS = ["multi_head_rope_yarn_packed", "block_gpt2"]


@pytest.mark.usefixtures("blocked_modules")
@pytest.mark.parametrize("case", select(ROWS), ids=lambda case: case.name)
def test_blocked_equals_torch(case, calls):
    report = proof.prove(case, checks=["shapes", "forward", "gradients", "dropout"])
    assert report.passed, report.explain()
    assert {call.dropout is None for call in calls} == {True, False}
