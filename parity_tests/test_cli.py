import json

import pytest

from flax_attn.cli import main
from torch_ref.modules.linear import Linear


def test_parity_prints_the_table_and_writes_all_that_was_measured(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["parity", "--variant", "causal", "--variant", "rms_norm", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 variants equal their PyTorch twin" in shown
    report = json.loads(path.read_text())
    assert report["passed"]
    assert [case["variant"] for case in report["cases"]] == ["causal", "rms_norm"]
    names = [check["name"] for check in report["cases"][0]["checks"]]
    assert names == ["forward", "gradients", "float32", "jit = eager", "dropout", "unbatched", "layouts", "training"]
    assert 0 < report["cases"][0]["checks"][0]["error"] < 1e-14
    assert {"jax", "flax", "torch", "python"} <= report["environment"].keys()


def test_a_difference_is_printed_with_its_tensor_and_exits_with_1(monkeypatch, capsys):
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: forward(self, x) * (1 + 1e-9))
    assert main(["parity", "--variant", "self_attention"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown
    assert "self_attention: forward: error" in shown
    assert "0 of 1 variants" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "CausalAtention"], "no variant is called CausalAtention. Known are: CausalAttention, "),
        (["--json", "/no/such/folder/report.json"], "in a folder that exists"),
    ],
)
def test_bad_usage_comes_before_any_work(arguments, message, capsys):
    assert main(["parity", *arguments]) == 2
    assert message in capsys.readouterr().err
