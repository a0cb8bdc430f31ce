import json

import pytest

from flax_attn.cli import main

SIZES = ["--topology", "cpu:8", "--mesh", "data=4,fsdp=2", "--batch", "8", "--tokens", "16"]

pytestmark = pytest.mark.usefixtures("dtype_promotion")


def test_a_plan_is_printed_and_written(folder, tmp_path, capsys):
    path = tmp_path / "plan.json"
    memory = ["--memory", "1", "--json", str(path)]
    assert main(["plan", "--model", str(folder), *SIZES, "--train", "--remat", *memory]) == 0
    shown = capsys.readouterr().out
    assert (
        "small: training with remat, 8 x 16 tokens in bfloat16, on cpu:8, data=4, fsdp=2" in shown
    )
    assert "fits, free" in shown
    assert "all-reduce" in shown
    assert json.loads(path.read_text())["fits"] is True


def test_a_plan_is_a_line_of_a_table(folder, capsys):
    assert main(["plan", "--model", str(folder), *SIZES, "--generate", "--markdown"]) == 0
    heading, _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| small | 16 | 8 | cpu:8 | data=4, fsdp=2 | no |")
    assert line.count("|") == heading.count("|")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "llama9"}, "got 'llama9', which is none of them"),
        ({"--topology": "v5e:256"}, "chips of v5e are counted along 2 dimensions"),
        ({"--mesh": "data=3"}, "must multiply to the 8 devices of cpu:8; got data=3 = 3"),
        ({"--batch": "3"}, "the batch must be divisible by data=4 * fsdp=2 of the mesh; got 3"),
        ({"--backend": "blokced"}, "backend must be one of 'auto', "),
        ({"--json": "/nowhere/plan.json"}, "cannot write /nowhere/plan.json"),
    ],
)
def test_bad_usage_is_one_line(folder, change, message, capsys):
    options = dict(zip(SIZES[::2], SIZES[1::2], strict=True)) | {"--model": str(folder)} | change
    assert main(["plan", *(text for pair in options.items() for text in pair), "--train"]) == 64
    assert message in capsys.readouterr().err


def test_what_describes_tpus_is_named_where_it_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setattr("flax_attn.aot.tpu.find_spec", lambda name: None)
    sizes = ["--topology", "v5e:2x4", *SIZES[2:]]
    assert main(["plan", "--model", str(folder), *sizes, "--train"]) == 64
    assert "pip install 'jax[tpu]'" in capsys.readouterr().err
