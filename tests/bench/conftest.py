import numpy as np
import pytest

from flax_attn.bench.contest import Row
from flax_attn.bench.report import Report
from flax_attn.bench.work import Work

MACHINE = {"platform": "cpu", "processor": "an abacus", "cores": 2}


def grown(rival, power, scale, tokens=(128, 256, 512, 1024)):
    """Rows of a rival whose time grows with a power of the tokens, and memory with one less."""
    for t in tokens:
        seconds = tuple(scale * t**power * noise for noise in (0.9, 1.0, 1.0, 1.0, 1.3))
        work = Work(1, 8, t, 64, backward=True)
        yield Row("tokens", rival, work, temporaries=int(t ** (power - 1)), seconds=seconds, compile_seconds=0.5)


@pytest.fixture
def report():
    """A whole run: a curve of ours, one of a rival that ends early, a pair of the table, and one that is absent."""
    work, late = Work(4, 12, 256, 64), Work(1, 8, 2048, 64, backward=True)
    rows = (
        Row("attention", "ours auto", work, error=0.4, seconds=(0.5, 0.5, 0.5), compile_seconds=1.0, temporaries=2**21),
        Row("attention", "torch SDPA", work, error=0.5, seconds=(1.0, 1.0, 2.0)),
        Row("attention", "sloppy", work, "disagrees", "its error is 7 times the allowed one", np.inf),
        Row("attention", "attnax flash", work, "absent", "not installed: pip install attnax"),
        *grown("ours auto", 2, 1e-8),
        *grown("jax.nn", 3, 1e-8, tokens=(128, 256, 512)),
        Row("tokens", "jax.nn", late, "too large", "needs 9.0 GiB of temporaries, and the limit is 4.0 GiB"),
    )
    return Report("ours auto", "full", 1e11, MACHINE, rows)
