"""Modules set to another backend against their PyTorch twins, by the same rules, in tiles of a few tokens."""

import pytest

import flax_attn
from flax_attn.backends.registry import load
from flax_attn.proof import prove
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


ROWS = [  # of what a module hands on one each: the backend itself is held to the contract elsewhere
    "multi_head_causal",
    "multi_head_gqa",
    "multi_head_cross",
    "multi_head_padding",
    "multi_head_packed_window",
    "multi_head_prefix_dense",
    "multi_head_alibi",
    "multi_head_rope_yarn_packed",
    "block_gpt2",
]


@pytest.mark.parametrize("case", select(ROWS), ids=lambda case: case.name)
def test_blocked_equals_torch(case, calls, monkeypatch):
    build = prove._flax_module

    def blocked_module(case):
        module = build(case)
        flax_attn.set_backend(module, "blocked")
        return module

    monkeypatch.setattr(prove, "_flax_module", blocked_module)
    pair = prove.pair_of(case)
    report = prove.prove(case, checks=["shapes", "forward", "gradients", "dropout"], pair=pair)
    assert report.passed, report.explain()
    assert {call.dropout is None for call in calls} == {True, False}
