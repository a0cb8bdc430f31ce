"""Pairs of modules, and reports made by hand whose names contain markup of HTML and XML."""

import math
from functools import cache

import numpy as np
import pytest

from flax_attn.convert import LAYOUTS
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.check import Check
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.pair import Pair
from flax_attn.parity.report.report import Report
from flax_attn.parity.trace.difference import Difference, Step, difference
from flax_attn.parity.trace.hypothesis import Hypothesis, Side
from flax_attn.parity.trace.program import Place
from flax_attn.parity.weight_map import weight_map
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import select

# All characters that HTML, XML or a script could read as markup.
EVIL = """<b>a</b> & "b" 'c' </script>"""


def step(name, line, error):
    return Step(name, Place("port.py", line), error, (2, 3), "float64")


@pytest.fixture
def equal():
    # Exact, far below its rule, near it, and not run: each state of a check that fails nothing.
    checks = [
        Check("shapes", 0.0, 0.0, "output"),
        Check("forward", 2e-16, 1e-12, "output", errors={"output": 2e-16}),
        Check("float32", 0.5, 1.0, EVIL, f"does not feel {EVIL}", errors={EVIL: 0.5, "bias": 0.25}),
        Check("dropout", math.inf, 0.0, skipped="nothing is dropped"),
    ]
    return Report("equal", checks, environment={"jax": "0.10.2", EVIL: EVIL})


@pytest.fixture
def differing(equal):
    where = {"index": [1, 2], "flax": 0.5, "torch": 0.25}
    errors = {"output": 3e-4, "other": 1e-16}
    # NaN is larger than any rule, though no comparison of numbers says so.
    not_finite = {"bias": math.nan, "output": 1e-15}
    checks = [
        equal.checks[0],
        Check("forward", 3e-4, 1e-12, "output", errors=errors, where=where),
        Check("gradients", math.nan, 1e-11, "bias", errors=not_finite),
        equal.checks[3],
        Check("cache = full", math.inf, 0.0, skipped=f"no call: {EVIL}", wanted=True),
    ]
    steps = (step("norm", 1, 1e-16), step(f"att.{EVIL}", 2, 2e-5), step("out", 3, math.nan))
    flax = Side("", "x @ y", (Place("port.py", 2),))
    torch = Side("0.5", f"0.5 * x @ y of {EVIL}", (Place("source.py", 5), Place("source.py", 7)))
    found = Hypothesis("att", "product", "base", flax, torch, also=(EVIL,), note="a remark")
    return Report(
        EVIL,
        checks,
        notes=["a note"],
        seed=7,
        command="flax-attn parity x:y",
        difference=Difference((found,), (), steps),
    )


@pytest.fixture
def unrun(equal):
    return Report("unrun", [equal.checks[3]])


@pytest.fixture(scope="session")
def paired():
    """A function that pairs a JAX module with a PyTorch one, given the shapes of the inputs."""

    def pair(flax, theirs, *shapes, layout="torch_ref", flax_call=None, torch_call=None):
        ours = JaxAdapter(flax, flax_call)
        theirs = TorchAdapter(theirs, torch_call)
        # A function has no parameters to pair.
        if ours.shapes:
            rules = LAYOUTS.get(layout, layout)
            ours.entries = weight_map(flax, ours.shapes, theirs.shapes, rules)
        random = np.random.default_rng(0)
        inputs = {f"input {i}": random.normal(size=shape) for i, shape in enumerate(shapes)}
        return Pair(ours, theirs, inputs, ours.entries)

    return pair


@pytest.fixture
def differ(paired):
    """A function that finds where two modules or functions differ, given the shapes of inputs."""

    def find(flax, theirs, *shapes):
        with on_cpu():
            return difference(paired(flax, theirs, *shapes))

    return find


@pytest.fixture(scope="session")
def row():
    """A function that returns the pair of a variant, the same one each time."""
    return cache(lambda name: pair_of(*select([name])))
