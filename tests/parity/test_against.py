"""A machine without torch repeats a comparison from what was recorded on one that has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from flax_attn.cli import main

FOLDER = Path(__file__).parents[1] / "data"
WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torch_ref"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked)
from flax_attn.cli import main
sys.exit(main(["parity", "--against", sys.argv[1]]))
"""


def test_the_comparison_is_repeated_where_there_is_no_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, str(FOLDER)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 of 1 variants equal their PyTorch twin" in run.stdout


def test_a_fault_on_the_flax_side_is_caught(monkeypatch, capsys):
    monkeypatch.setattr("flax_attn.modules.multi_head.rearrange", swapped_heads)
    assert main(["parity", "--against", str(FOLDER)]) == 1
    assert "multi_head_gqa: forward: error" in capsys.readouterr().out


def swapped_heads(x, pattern, **axes):
    from einops import rearrange

    return rearrange(
        x, pattern.replace("(n h)", "(h n)") if "k" not in pattern else pattern, **axes
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "causal"], "holds no causal; it holds multi_head_gqa"),
        (["--device", "quantum"], "no device of the platform 'quantum' here"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    assert main(["parity", "--against", str(FOLDER), *arguments]) == 64
    assert message in capsys.readouterr().err
