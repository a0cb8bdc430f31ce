"""Published modifications of attention, in both packages, against PyTorch's FlexAttention.

Outputs and gradients are compared.

Each is written once, as in the FlexAttention paper and its collection of examples, for either
framework.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex

import flax_attn
import torch_ref
from flax_attn.backends.registry import load
from flax_attn.parity import tolerance

B, N, K, T, H = 2, 4, 2, 24, 5
FAST = {"xla_backend_optimization_level": 0}
WIDTH = 6  # of an image of 4 x 6 patches
LENGTHS = np.array([5, 11, 8])  # of jagged sequences, one after the other
DRAW = np.random.default_rng(0)
INTEGERS = {
    "documents": np.sort(DRAW.integers(0, 4, (B, T)), axis=1),
    "prefix": np.array([7, 0]),
    "sequence": np.repeat(np.arange(3), LENGTHS),
    "begins": np.cumsum(LENGTHS) - LENGTHS,
    "parent": np.array([0, *(DRAW.integers(0, i) for i in range(1, T))]),
    "reach": np.array([3, 24, 9, 1]),
    "modality": DRAW.integers(0, 2, (B, T)),
    "global": np.arange(T) % 9 == 0,
}
BUCKETS = np.asarray(
    torch_ref.t5_buckets(np.arange(T), np.arange(T), num_buckets=8, max_distance=20)
)
FLOATS = {"slopes": (N,), "relative": (N, 2 * T), "buckets": (N, 8), "gate": (B, N, T)}


def ancestors():
    """Return the nodes between each node of a tree of drafts and the root, itself included."""
    seen = np.eye(T, dtype=bool)
    for i in range(1, T):
        seen[i] |= seen[INTEGERS["parent"][i]]
    return seen


INTEGERS |= {"ancestors": ancestors(), "bucket": BUCKETS}


@dataclass(frozen=True)
class Modification:
    """One modification.

    Args:
        sees: function of a mask, from arrays by name; None shows all.
        score: function of a score, from arrays and the library with `where` and `tanh`; None
            leaves it.
        captured: names of arrays in the function of a score that have gradients.
        offset: offset of the queries.
    """

    sees: Callable | None = None
    score: Callable | None = None
    captured: tuple[str, ...] = ()
    offset: int = 0


def patches_near(i, j):
    return (abs(i // WIDTH - j // WIDTH) <= 1) & (abs(i % WIDTH - j % WIDTH) <= 2)


CAUSAL = lambda a: lambda b, n, i, j: i >= j  # noqa: E731
MODIFICATIONS = {
    "causal": Modification(CAUSAL),
    "causal by the score": Modification(
        None, lambda a, x: lambda s, b, n, i, j: x.where(i >= j, s, -np.inf)
    ),
    "ALiBi": Modification(
        CAUSAL, lambda a, x: lambda s, b, n, i, j: s + a["slopes"][n] * (j - i), ("slopes",)
    ),
    "T5 bias": Modification(
        None,
        lambda a, x: lambda s, b, n, i, j: s + a["buckets"][n, a["bucket"][i, j]],
        ("buckets",),
    ),
    "relative positions": Modification(
        CAUSAL, lambda a, x: lambda s, b, n, i, j: s + a["relative"][n, j - i + T], ("relative",)
    ),
    "soft cap": Modification(CAUSAL, lambda a, x: lambda s, b, n, i, j: 1.5 * x.tanh(s / 1.5)),
    "tanh": Modification(None, lambda a, x: lambda s, b, n, i, j: x.tanh(s)),
    "gated": Modification(
        CAUSAL,
        lambda a, x: lambda s, b, n, i, j: s * a["gate"][b, n, i] + a["gate"][b, n, j],
        ("gate",),
    ),
    "ALiBi under a soft cap": Modification(
        CAUSAL,
        lambda a, x: lambda s, b, n, i, j: 2.0 * x.tanh((s + a["slopes"][n] * (j - i)) / 2.0),
        ("slopes",),
    ),
    "documents": Modification(
        lambda a: lambda b, n, i, j: (i >= j) & (a["documents"][b, i] == a["documents"][b, j])
    ),
    "prefix": Modification(lambda a: lambda b, n, i, j: (i >= j) | (j < a["prefix"][b])),
    "sliding": Modification(lambda a: lambda b, n, i, j: (i >= j) & (i - j < 7)),
    "sliding, each head its own": Modification(
        lambda a: lambda b, n, i, j: (i >= j) & (i - j < a["reach"][n])
    ),
    "dilated": Modification(lambda a: lambda b, n, i, j: (abs(i - j) < 10) & ((i - j) % 3 == 0)),
    "neighbourhood": Modification(lambda a: lambda b, n, i, j: patches_near(i, j)),
    "strided": Modification(
        lambda a: lambda b, n, i, j: (i >= j) & ((i // 4 == j // 4) | (j % 4 == 3))
    ),
    "global and local": Modification(
        lambda a: lambda b, n, i, j: (abs(i - j) < 3) | a["global"][i] | a["global"][j],
    ),
    "jagged": Modification(
        lambda a: (
            lambda b, n, i, j: (
                (a["sequence"][i] == a["sequence"][j])
                & (i - a["begins"][a["sequence"][i]] >= j - a["begins"][a["sequence"][j]])
            )
        )
    ),
    "tree of drafts": Modification(lambda a: lambda b, n, i, j: a["ancestors"][i, j]),
    "images open, text causal": Modification(
        lambda a: (
            lambda b, n, i, j: (i >= j) | ((a["modality"][b, i] == 1) & (a["modality"][b, j] == 1))
        )
    ),
    "rows that see nothing": Modification(
        lambda a: lambda b, n, i, j: (i >= j) & ((i + b) % 5 > 0)
    ),
    "later queries": Modification(
        lambda a: lambda b, n, i, j: (i >= j) & (i - j < 12),
        offset=5,
    ),
}


def floats(case):
    draw = np.random.default_rng(1).normal
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, H)}
    shapes |= {name: FLOATS[name] for name in case.captured}
    return {name: draw(size=shape) for name, shape in shapes.items()}


COTANGENT = np.random.default_rng(2).normal(size=(B, T, N, H))


def attend(package, library, case, integers, given, **options):
    """Return the output of either package."""
    arrays = given | integers
    qkv = [given[name] for name in ("query", "key", "value")]
    mask = package.Mask.where(case.sees(arrays), case.offset) if case.sees else None
    return package.dot_product_attention(
        *qkv, mask=mask, score=case.score and case.score(arrays, library), **options
    )


def in_flex(case, given):
    """Return the output of FlexAttention, `(b, t, n, h)`."""
    arrays = given | {name: torch.tensor(x) for name, x in INTEGERS.items()}
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    blocks = None
    if case.sees:
        sees = case.sees(arrays)
        moved = lambda b, n, i, j: sees(b, n, i + case.offset, j)  # noqa: E731
        blocks = flex.create_block_mask(moved, B, N, T, T, device="cpu", BLOCK_SIZE=8)
    score = case.score and case.score(arrays, torch)
    return flex.flex_attention(q, k, v, score, blocks, enable_gqa=True).transpose(1, 2)


def in_torch(attend, case):
    given = {name: torch.tensor(x, requires_grad=True) for name, x in floats(case).items()}
    output = attend(case, given)
    gradients = torch.autograd.grad(output, list(given.values()), torch.tensor(COTANGENT))
    return {
        name: x.detach().numpy()
        for name, x in zip(("output", *given), (output, *gradients), strict=True)
    }


def in_jax(case, backend):
    @partial(jax.jit, compiler_options=FAST)
    def both(given):
        integers = {name: jnp.asarray(x) for name, x in INTEGERS.items()}
        output, pull = jax.vjp(
            partial(attend, flax_attn, jnp, case, integers, backend=backend), given
        )
        return {"output": output, **pull(jnp.asarray(COTANGENT))[0]}

    with jax.numpy_dtype_promotion("standard"):  # as users write functions
        return both(jax.tree.map(jnp.asarray, floats(case)))


def assert_equal(found, expected):
    names = {"output"}
    errors = tolerance.relative(
        *({name: np.asarray(x[name]) for name in names} for x in (found, expected))
    )
    assert errors["output"] <= tolerance.FORWARD
    slopes = tolerance.gradient_errors(
        *({n: np.asarray(x[n]) for n in x if n not in names} for x in (found, expected))
    )
    assert max(slopes.values()) <= tolerance.GRADIENT, slopes


@pytest.fixture
def eager(monkeypatch):
    """FlexAttention as it is defined, in float64.

    It refuses gradients on CPU, which only its compiled kernel lacks.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *arrays: None)


@pytest.mark.usefixtures("eager", "no_shape_checks")
@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of PyTorch about its own tracing, and that it is not compiled
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_a_modification_is_that_of_flex_attention(name, monkeypatch):
    case = MODIFICATIONS[name]
    monkeypatch.setattr(load("blocked"), "block", 8)
    expected = in_torch(in_flex, case)
    integers = {key: torch.tensor(x) for key, x in INTEGERS.items()}
    assert_equal(
        in_torch(lambda case, given: attend(torch_ref, torch, case, integers, given), case),
        expected,
    )
    assert_equal(in_jax(case, "blocked"), expected)
