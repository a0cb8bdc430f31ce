"""Which tests are run of which target, and what may change in them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Tests of a target.

    Args:
        target: name of the target.
        package: package on PyPI.
        origin: where its tests are: `"wheel"`, `"sdist"`, or `"checkout"` where neither has them.
        files: files of tests, seen from there.
        keyword: expression that chooses some of the tests, as for `pytest -k`.
        expected: tests that pass without and not with, with the reason.
    """

    target: str
    package: str
    origin: str
    files: tuple[str, ...]
    keyword: str = ""
    expected: dict[str, str] = field(default_factory=dict)


_LAYERS = "keras/src/layers/attention"

SUITES = (
    Suite("jax.nn", "jax", "checkout", ("tests/nn_test.py",), "DotProductAttention"),
    Suite("nnx", "flax", "sdist", ("tests/nnx/nn/attention_test.py",)),
    Suite("linen", "flax", "sdist", ("tests/linen/linen_attention_test.py",)),
    Suite(
        "keras",
        "keras",
        "wheel",
        (
            f"{_LAYERS}/multi_head_attention_test.py",
            f"{_LAYERS}/grouped_query_attention_test.py",
            f"{_LAYERS}/attention_test.py",
            "keras/src/ops/nn_test.py",
        ),
        "attention",
    ),
    Suite(
        "equinox", "equinox", "checkout", ("tests/test_nn.py", "tests/test_shared.py"), "attention"
    ),
    Suite("haiku", "dm-haiku", "wheel", ("haiku/_src/attention_test.py",)),
)
