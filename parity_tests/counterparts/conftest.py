"""What the comparisons with the layers of other libraries share."""

import pytest

from flax_attn.parity import CHECKS


@pytest.fixture(autouse=True)
def promotion(usual_promotion):
    """Let the layers of other libraries promote as they do."""


class Checks:
    """Names of checks. What is asked for by name must run."""

    core = ("shapes", "weights", "forward", "gradients")
    # No input is a mask or ids, and few of the layers of PyTorch widen bfloat16 for a function.
    rare = ("masks", "ids", "precision")

    @classmethod
    def all_but(cls, *names):
        assert set(names) <= set(CHECKS)
        return [name for name in CHECKS if name not in (*names, *cls.rare)]


@pytest.fixture(scope="session")
def checks():
    return Checks
