"""Modules set to another backend against their PyTorch twins, by the same rules, in tiles of a few tokens."""

import pytest

import flax_attn
from flax_attn.backends.registry import load
<<<<<<< HEAD
from flax_attn.proof import prove as proof
=======
from flax_attn.proof import prove
>>>>>>> main
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


ROWS = [  # what modules hand on; the backend itself is proven to compute the formula elsewhere
    "multi_head_rope_yarn_packed",  # a mask, positions
    "block_gpt2",  # the key of dropout, through a block
]


@pytest.mark.parametrize("case", select(ROWS), ids=lambda case: case.name)
def test_blocked_equals_torch(case, calls, monkeypatch):
<<<<<<< HEAD
    build = proof._flax_module
=======
    build = prove._flax_module
>>>>>>> main

    def blocked_module(case):
        module = build(case)
        flax_attn.set_backend(module, "blocked")
        return module

<<<<<<< HEAD
    monkeypatch.setattr(proof, "_flax_module", blocked_module)
    report = proof.prove(case, checks=["shapes", "forward", "gradients", "dropout"])
=======
    monkeypatch.setattr(prove, "_flax_module", blocked_module)
    pair = prove.pair_of(case)
    report = prove.prove(case, checks=["shapes", "forward", "gradients", "dropout"], pair=pair)
>>>>>>> main
    assert report.passed, report.explain()
    assert {call.dropout is None for call in calls} == {True, False}
