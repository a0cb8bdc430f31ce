"""A whole run: from the options of the command line to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from flax_attn.backends.registry import check_backend
from flax_attn.bench import plan
from flax_attn.bench.contest import Contest, hold
from flax_attn.bench.report import Report, machine
from flax_attn.bench.rivals import matrix_limit

PRODUCT = {"cpu": 2048}  # a size that takes a moment; larger on an accelerator


def run(
    shapes: Sequence[plan.Shape] = (),
    backends: Sequence[str] = (),
    rounds: int = 7,
    quick: bool = False,
    progress: Callable[[Sequence[Contest], Contest], None] = lambda contests, contest: None,
) -> Report:
    """Hold all contests and return what they found.

    Args:
        shapes: `(b, n, t, h)`, instead of the table and of all sections but the first.
        backends: ours, the first being the one that ratios are about; none is the usual ones of the platform.
        rounds: turns of each contender.
        quick: small shapes.
        progress: told of each contest before it is held.

    Raises:
        ValueError: if a backend is unknown.
    """
    platform = jax.default_backend()
    for backend in backends:
        check_backend(backend)
    backends = backends or plan.BACKENDS[platform]
    name = "given" if shapes else "quick" if quick else "full"
    sizes = {"given": plan.Sizes(tuple(shapes)), "quick": plan.QUICK, "full": plan.FULL}[name]
    contests, rows = plan.contests(sizes, backends, platform), []
    limit = matrix_limit(plan.DTYPES[platform], PRODUCT.get(platform, 8192))
    for contest in contests:
        progress(contests, contest)
        rows += hold(contest, rounds, rows)
    limit = max(limit, matrix_limit(plan.DTYPES[platform], PRODUCT.get(platform, 8192)))
    return Report(f"ours {backends[0]}", name, limit, machine(), tuple(rows))
