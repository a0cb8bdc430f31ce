"""Modules set to another backend against their PyTorch twins, by the same rules, in tiles of a few tokens."""

import pytest

import flax_attn
from flax_attn.backends import blocked
from flax_attn.parity import ladder
from flax_attn.parity.cases import select
from flax_attn.parity.pair import Pair


@pytest.fixture
def calls(monkeypatch):
    """Cut into small tiles, and keep the calls that reach the backend."""
    found, attend = [], blocked.attend
    monkeypatch.setattr(blocked, "_BLOCK", 4)
    monkeypatch.setattr(blocked, "_STRIP", 2)
    monkeypatch.setattr(blocked, "attend", lambda call: (found.append(call), attend(call))[1])
    return found


@pytest.mark.parametrize("case", select(["MultiHeadAttention", "TransformerBlock"]), ids=lambda case: case.name)
def test_blocked_equals_torch(case, calls):
    pair = Pair(case)
    flax_attn.set_backend(pair.flax, "blocked")
    checks = [rung(pair) for rung in (ladder.forward, ladder.gradients, ladder.dropout)]
    assert not [check for check in checks if check is None or not check.passed]
    assert {call.dropout is None for call in calls} == {True, False}
