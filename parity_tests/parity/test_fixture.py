"""The pytest plugin, in a run of its own."""

import subprocess
import sys

TESTS = """
import torch
from flax import nnx

OPTIONS = {"layout": "torch", "checks": ["forward", "gradients"]}


def test_equal(parity):
    ours, theirs = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)
    assert parity(ours, theirs, [(4, 5, 3)], **OPTIONS).passed


def test_different(parity):
    doubled = lambda module, x: 2 * module(x)
    ours, theirs = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 2)
    parity(ours, theirs, [(4, 5, 3)], torch_call=doubled, **OPTIONS)


def test_unpaired(parity):
    parity(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 5), [(4, 5, 3)], **OPTIONS)
"""


def test_the_fixture_fails_the_tests_of_pairs_that_differ(tmp_path):
    (tmp_path / "test_port.py").write_text(TESTS)
    options = ["-q", "--parity-report", "pages"]
    # The second where it is not installed, but lies on the path.
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_flax_attn"]
    command = [sys.executable, "-m", "pytest", *options, *plugins]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "ParityError: test_different: the two sides differ" in run.stdout
    assert "forward: error 0.5 at 'output', the rule is 1e-12; worst element" in run.stdout
    assert "repeat: pytest 'test_port.py::test_different'" in run.stdout
    unpaired = "PairingError: the parameters of the two modules do not pair in this layout"
    assert unpaired in run.stdout
    # The traceback ends at the line of the test.
    assert "flax_attn/" not in run.stdout
    assert [page.name for page in (tmp_path / "pages").iterdir()] == ["test_different.html"]


def test_the_plugin_imports_nothing_before_its_fixture_is_used():
    code = "import sys, pytest_flax_attn; print({'jax', 'torch', 'flax_attn'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
