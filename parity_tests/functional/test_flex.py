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
from parity_tests.asserts import assert_results_near

B, N, K, T, H = 2, 4, 2, 24, 5
FAST = {"xla_backend_optimization_level": 0}
# Of an image of 4 x 6 patches.
WIDTH = 6
# Of jagged sequences, one after the other.
LENGTHS = np.array([5, 11, 8])
DRAW = np.random.default_rng(0)
# Arrays that functions of masks and scores read.
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
# Shapes of those that have gradients.
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


def attend(package, library, case, given, **options):
    """Return the output of either package."""
    qkv, arrays = split(library, given)
    mask = package.Mask.where(case.sees(arrays), case.offset) if case.sees else None
    score = case.score and case.score(arrays, library)
    return package.dot_product_attention(*qkv, mask=mask, score=score, **options)


def split(library, given):
    """Return query, key and value, and all arrays that a modification may read."""
    integers = {name: library.asarray(x) for name, x in INTEGERS.items()}
    return [given[name] for name in ("query", "key", "value")], given | integers


def in_flex(case, given):
    """Return the output of FlexAttention, `(b, t, n, h)`."""
    qkv, arrays = split(torch, given)
    score = case.score and case.score(arrays, torch)
    blocks = blocks_of(case, arrays) if case.sees else None
    heads_first = [x.transpose(1, 2) for x in qkv]
    return flex.flex_attention(*heads_first, score, blocks, enable_gqa=True).transpose(1, 2)


def blocks_of(case, arrays):
    """Return the mask of a modification for FlexAttention, which knows no offset."""
    sees = case.sees(arrays)
    moved = lambda b, n, i, j: sees(b, n, i + case.offset, j)  # noqa: E731
    return flex.create_block_mask(moved, B, N, T, T, device="cpu", BLOCK_SIZE=8)


def in_torch(attend, case):
    """Return the output, and the gradients by name."""
    given = {name: torch.tensor(x, requires_grad=True) for name, x in floats(case).items()}
    output = attend(case, given)
    gradients = torch.autograd.grad(output, list(given.values()), torch.tensor(COTANGENT))
    named = dict(zip(given, map(np.asarray, gradients), strict=True))
    return {"output": output.detach().numpy()}, named


def in_jax(case, backend):
    """Return the output, and the gradients by name."""

    @partial(jax.jit, compiler_options=FAST)
    def both(given):
        output, pull = jax.vjp(partial(attend, flax_attn, jnp, case, backend=backend), given)
        return {"output": output}, *pull(jnp.asarray(COTANGENT))

    # As users write functions.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(np.asarray, both(jax.tree.map(jnp.asarray, floats(case))))


@pytest.fixture
def eager(monkeypatch):
    """FlexAttention as it is defined, in float64.

    It refuses gradients on CPU, which only its compiled kernel lacks.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *arrays: None)


# PyTorch warns about its own tracing, and that it is not compiled.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("eager", "no_shape_checks")
@pytest.mark.parametrize("case", MODIFICATIONS.values(), ids=MODIFICATIONS)
def test_a_modification_is_that_of_flex_attention(case, monkeypatch):
    # So that there is more than one block.
    monkeypatch.setattr(load("blocked"), "block", 8)
    expected = in_torch(in_flex, case)
    ours = partial(attend, torch_ref, torch)
    assert_results_near(in_torch(ours, case), expected)
    assert_results_near(in_jax(case, "blocked"), expected)
