"""The cases of all backends against `torch_ref`.

The reference computes each of them, and `blocked` is compared over random calls.

That every backend equals the reference is proven in `tests/backends`.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flax_attn
import torch_ref
from flax_attn.backends.registry import load
from flax_attn.parity import tolerance


def _table():
    path = Path(__file__).parents[2] / "tests" / "backends" / "conformance.py"
    spec = importlib.util.spec_from_file_location("conformance_table", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = _table()


def options(case, package, key, mask):
    dropout = {"dropout": package.KeyedDropout(case.rate, key)} if case.rate else {}
    return {"mask": mask, **case.options, **dropout}


def blocked(case):
    """Return the output and all gradients of the blocked backend in float64."""
    given = {name: jnp.asarray(x) for name, x in case.arrays.items()}

    def both(given, cotangent, key, mask):
        keywords = options(case, flax_attn, key, mask) | {"backend": "blocked"}
        output, pull = jax.vjp(
            lambda given: flax_attn.dot_product_attention(**given, **keywords), given
        )
        return {"output": output, **pull(cotangent)[0]}

    mask = case.masked(flax_attn.Mask, jnp.asarray)
    found = jax.jit(both, compiler_options=TABLE.FAST)(
        given, jnp.asarray(case.cotangent), TABLE.KEY, mask
    )
    return {name: np.array(x) for name, x in found.items()}


def in_torch(case):
    """Return the output and all gradients of the PyTorch side."""
    given = {name: torch.tensor(x, requires_grad=True) for name, x in case.arrays.items()}
    mask = case.masked(torch_ref.Mask, torch.tensor)
    output = torch_ref.dot_product_attention(
        **given, **options(case, torch_ref, torch.tensor([3, 14]), mask)
    )
    gradients = torch.autograd.grad(
        output, list(given.values()), torch.tensor(case.cotangent), materialize_grads=True
    )
    return {
        name: x.detach().numpy()
        for name, x in zip(("output", *given), (output, *gradients), strict=True)
    }


def check(case, ours):
    theirs = in_torch(case)
    if case.nonfinite:
        for name, gradient in theirs.items():
            np.testing.assert_array_equal(np.isnan(ours[name]), np.isnan(gradient))
    forward = tolerance.relative({"output": ours.pop("output")}, {"output": theirs.pop("output")})
    assert forward["output"] <= tolerance.FORWARD
    backward = tolerance.gradient_errors(ours, theirs)
    assert max(backward.values(), default=0) <= tolerance.GRADIENT, backward


@pytest.mark.parametrize("case", TABLE.CASES.values(), ids=lambda case: case.name)
def test_the_reference_equals_pytorch(case):
    check(case, TABLE.reference_results(case, "float64"))


def offsets(draw, t, s):
    each = st.integers(-t, s)
    return draw(
        st.one_of(each, st.lists(each, min_size=2, max_size=2).map(lambda x: np.array(x, np.int32)))
    )


def counts(draw, most):
    each = st.integers(0, most)
    return draw(
        st.one_of(each, st.lists(each, min_size=2, max_size=2).map(lambda x: np.array(x, np.int32)))
    )


@st.composite
def parts(draw, t, s):
    """Draw one part of a mask, as a function of a package's `Mask` and of what makes arrays."""

    def as_array(value, array):
        return array(value) if isinstance(value, np.ndarray) else value

    kind = draw(st.sampled_from(("causal", "window", "prefix", "lengths", "segments", "dense")))
    offset, query, key = offsets(draw, t, s), counts(draw, t), counts(draw, s)
    left, right = (draw(st.none() | st.integers(0, s)) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids, dense = (
        (random.integers(0, 4, t), random.integers(0, 4, s)),
        random.random((2, 1, t, s)) < 0.6,
    )
    return {
        "causal": lambda Mask, array: Mask.causal(as_array(offset, array)),
        "window": lambda Mask, array: Mask.window(left, right, as_array(offset, array)),
        "prefix": lambda Mask, array: Mask.prefix(as_array(key, array), as_array(offset, array)),
        "lengths": lambda Mask, array: Mask.lengths(
            query=as_array(query, array), key=as_array(key, array)
        ),
        "segments": lambda Mask, array: Mask.segments(*map(array, ids)),
        "dense": lambda Mask, array: Mask.dense(array(dense)),
    }[kind]


@st.composite
def cases(draw):
    t, s, k, g, h, v = (draw(st.integers(1, most)) for most in (40, 40, 2, 3, 5, 5))
    sizes = TABLE.Sizes(2, t, s, k * g, k, h, v)
    masks = draw(st.lists(parts(t, s), max_size=3))

    def mask(Mask, array):
        whole = Mask()
        for part in masks:
            whole = whole & part(Mask, array)
        return whole

    shape = tuple(size if draw(st.booleans()) else 1 for size in sizes.scores)
    return TABLE.Case(
        f"random {draw(st.integers(0, 2**16))}",
        mask,
        sizes,
        draw(st.sampled_from(((16, 8), (8, 8), (32, 4), (12, 5)))),
        bias=draw(st.sampled_from((None, shape))),
        hides=draw(st.sampled_from((0.0, 0.3))) if draw(st.booleans()) else 0.0,
        sinks=draw(st.sampled_from((None, True))),
        rate=draw(st.sampled_from((0.0, 0.0, 0.3))),
        scale=draw(st.sampled_from((None, 0.3, 2.0))),
        soft_cap=draw(st.sampled_from((None, 1.5))),
    )


@pytest.mark.usefixtures("no_shape_checks")
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cases())
def test_blocked_equals_pytorch_over_random_calls(case):
    case = case if case.bias else replace(case, hides=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("blocked"), "block", case.tiles[0])
        patch.setattr(load("blocked"), "edge", case.tiles[1])
        check(case, blocked(case))
