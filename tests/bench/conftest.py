import numpy as np
import pytest

from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.report import BenchmarkReport
from flax_attn.bench.workload import Workload

MACHINE = {"platform": "cpu", "processor": "an abacus", "cores": 2}


def grown(name, power, scale, tokens=(128, 256, 512, 1024)):
    """Yield rows whose time grows as tokens**power, and memory as tokens**(power - 1)."""
    for t in tokens:
        seconds = tuple(scale * t**power * noise for noise in (0.9, 1.0, 1.0, 1.0, 1.3))
        work = Workload(1, 8, t, 64, backward=True)
        yield Measurement(
            "tokens",
            name,
            work,
            temporaries=int(t ** (power - 1)),
            seconds=seconds,
            compile_seconds=0.5,
        )


@pytest.fixture
def report():
    """Return a full run: two curves, one short, a pair of the table, and a missing library."""
    work, late = Workload(4, 12, 256, 64), Workload(1, 8, 2048, 64, backward=True)
    rows = (
        Measurement(
            "attention",
            "ours auto",
            work,
            error=0.4,
            seconds=(0.5, 0.5, 0.5),
            compile_seconds=1.0,
            temporaries=2**21,
        ),
        Measurement("attention", "torch SDPA", work, error=0.5, seconds=(1.0, 1.0, 2.0)),
        Measurement(
            "attention", "sloppy", work, "disagrees", "its error is 7 times the allowed one", np.inf
        ),
        Measurement("attention", "attnax flash", work, "not installed", "pip install attnax"),
        *grown("ours auto", 2, 1e-8),
        *grown("jax.nn", 3, 1e-8, tokens=(128, 256, 512)),
        Measurement(
            "tokens",
            "jax.nn",
            late,
            "too large",
            "needs 9.0 GiB of temporaries, and the limit is 4.0 GiB",
        ),
    )
    return BenchmarkReport("ours auto", "full", 1e11, MACHINE, rows)
