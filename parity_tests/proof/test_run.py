"""Rows of the table from several processes."""

from unittest.mock import Mock

import pytest

from flax_attn.proof.run import ProofRun


def test_processes_report_rows_on_a_mesh_in_the_order_of_their_names():
    # The last of them has no axis that this mesh splits.
    names = ["embedding", "swiglu", "rms_norm"]
    watch = Mock()
    reports = ProofRun(mesh={"tensor": 2}).reports(names, 2, watch)
    assert watch.call_count == 3
    assert [report.name for report in reports] == names
    embedding, swiglu, norm = reports
    assert embedding.passed
    assert swiglu.passed
    assert not norm.passed
    assert "split over tensor" in embedding.notes
    reason = norm.check("mesh").skipped
    assert reason.startswith("nothing of it is split over this mesh")


@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"data": 2, "expert": 4}], ids=str)
def test_every_row_has_sizes_that_a_mesh_divides(mesh):
    import torch_ref

    for row in ProofRun(mesh=mesh).select(None):
        row.build(torch_ref)
