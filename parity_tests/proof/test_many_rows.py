"""Compiled against eager at a size of real use, in the default proof."""

import numpy as np
import pytest

from flax_attn.parity.cpu import on_cpu
from flax_attn.proof.many_rows import many_rows, takes_many_rows
from flax_attn.proof.prove import pair_of, prove
from flax_attn.proof.variants import VARIANTS, select


@pytest.fixture
def pair():
    with on_cpu():
        (variant,) = select(["rms_norm"])
        yield pair_of(variant)


def test_one_row_of_each_class_takes_many_rows():
    chosen = [variant.module for variant in VARIANTS if takes_many_rows(variant)]
    assert sorted(chosen) == sorted({variant.module for variant in VARIANTS})


def test_the_default_proof_compares_many_rows():
    (variant,) = select(["rms_norm"])
    found = prove(variant).check("many rows")
    assert found is not None
    assert found.ran
    assert found.passed


def test_what_is_wrong_for_many_rows_alone_fails(pair, monkeypatch):
    run = pair.flax.run

    def wrong(spec):
        found = run(spec)
        # The inputs of every other check are smaller.
        many = len(found.outputs["output"]) > 1000
        if many and spec.optimized:
            found.outputs["output"] = found.outputs["output"] + 1
        return found

    monkeypatch.setattr(pair.flax, "run", wrong)
    found = many_rows(pair)
    assert found.ran
    assert not found.passed


def test_a_call_that_raises_fails(pair, monkeypatch):
    monkeypatch.setattr(pair.flax, "run", lambda spec: 1 / 0)
    found = many_rows(pair)
    assert found.error == np.inf
    assert "ZeroDivisionError" in found.note
