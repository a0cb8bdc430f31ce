"""Rows of the table from several processes."""

import pytest

from flax_attn.proof.run import ProofRun


def test_processes_report_rows_on_a_mesh_in_the_order_of_their_names():
    # The last of them has no axis that this mesh splits.
    names = ["embedding", "swiglu", "rms_norm"]
    seen = []
    run = ProofRun(mesh={"tensor": 2})
    reports = run.reports(names, 2, lambda: seen.append(None))
    assert [report.name for report in reports] == names
    assert len(seen) == 3
    assert [report.passed for report in reports] == [True, True, False]
    assert "split over tensor" in reports[0].notes
    assert reports[2].check("mesh").skipped.startswith("nothing of it is split over this mesh")


@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"data": 2, "expert": 4}], ids=str)
def test_every_row_has_sizes_that_a_mesh_divides(mesh):
    import torch_ref

    for row in ProofRun(mesh=mesh).select(None):
        row.build(torch_ref)
