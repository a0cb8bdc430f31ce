"""The cases of all backends against `torch_ref`.

The reference computes each of them, and `blocked` is compared over random calls.

That every backend equals the reference is proven in `tests/backends`.
"""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
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
from parity_tests.asserts import assert_gradients_near, assert_near


def _table():
    path = Path(__file__).parents[2] / "tests" / "backends" / "conformance.py"
    spec = importlib.util.spec_from_file_location("conformance_table", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Tests are not installed, so that it is no module that can be imported.
TABLE = _table()


def options(case, package, key, mask):
    dropout = {"dropout": package.KeyedDropout(case.rate, key)} if case.rate else {}
    return {"mask": mask, **case.options, **dropout}


def blocked(case):
    """Return the output and all gradients of the blocked backend in float64."""
    given = {name: jnp.asarray(x) for name, x in case.arrays.items()}
    mask = case.masked(flax_attn.Mask, jnp.asarray)
    compiled = jax.jit(partial(in_jax, case), compiler_options=TABLE.FAST)
    found = compiled(given, jnp.asarray(case.cotangent), TABLE.KEY, mask)
    return {name: np.array(x) for name, x in found.items()}


def in_jax(case, given, cotangent, key, mask):
    keywords = options(case, flax_attn, key, mask) | {"backend": "blocked"}
    attend = lambda given: flax_attn.dot_product_attention(**given, **keywords)  # noqa: E731
    output, pull = jax.vjp(attend, given)
    return {"output": output, **pull(cotangent)[0]}


def in_torch(case):
    """Return the output and all gradients of the PyTorch side."""
    given = {name: torch.tensor(x, requires_grad=True) for name, x in case.arrays.items()}
    mask = case.masked(torch_ref.Mask, torch.tensor)
    keywords = options(case, torch_ref, torch.tensor([3, 14]), mask)
    output = torch_ref.dot_product_attention(**given, **keywords)
    gradients = differentiated(output, list(given.values()), torch.tensor(case.cotangent))
    return {"output": output.detach().numpy(), **dict(zip(given, gradients, strict=True))}


def differentiated(output, leaves, cotangent):
    # What has no effect on the output has a gradient of 0, not None.
    found = torch.autograd.grad(output, leaves, cotangent, materialize_grads=True)
    return [gradient.numpy() for gradient in found]


def check(case, ours):
    theirs = in_torch(case)
    if case.nonfinite:
        for name, gradient in theirs.items():
            np.testing.assert_array_equal(np.isnan(ours[name]), np.isnan(gradient))
    assert_near({"output": ours.pop("output")}, {"output": theirs.pop("output")})
    assert_gradients_near(ours, theirs)


@pytest.mark.parametrize("case", TABLE.CASES.values(), ids=lambda case: case.name)
def test_the_reference_equals_pytorch(case):
    check(case, TABLE.reference_results(case, "float64"))


# How each part of a mask is made of what was drawn.
PARTS = {
    "causal": lambda Mask, x: Mask.causal(x["offset"]),
    "window": lambda Mask, x: Mask.window(x["left"], x["right"], x["offset"]),
    "prefix": lambda Mask, x: Mask.prefix(x["key"], x["offset"]),
    "lengths": lambda Mask, x: Mask.lengths(query=x["query"], key=x["key"]),
    "segments": lambda Mask, x: Mask.segments(x["query_ids"], x["key_ids"]),
    "dense": lambda Mask, x: Mask.dense(x["dense"]),
}


def one_or_two(least, most):
    """Return a strategy of one number for both rows, or of one for each."""
    each = st.integers(least, most)
    return each | st.lists(each, min_size=2, max_size=2).map(lambda x: np.array(x, np.int32))


def numbers(t, s):
    """Return a strategy of the numbers of a mask."""
    sides = dict.fromkeys(("left", "right"), st.none() | st.integers(0, s))
    counts = {"query": one_or_two(0, t), "key": one_or_two(0, s)}
    return st.fixed_dictionaries({"offset": one_or_two(-t, s), **counts, **sides})


def arrays_of(seed, t, s):
    random = np.random.default_rng(seed)
    # Few of them, so that queries see several keys.
    ids = {"query_ids": random.integers(0, 4, t), "key_ids": random.integers(0, 4, s)}
    return {**ids, "dense": random.random((2, 1, t, s)) < 0.6}


@st.composite
def parts(draw, t, s):
    """Draw one part of a mask, as a function of a package's `Mask` and of what makes arrays."""
    make = PARTS[draw(st.sampled_from(list(PARTS)))]
    drawn = draw(numbers(t, s)) | arrays_of(draw(st.integers(0, 2**16)), t, s)
    return partial(made, make, drawn)


def made(make, drawn, Mask, array):
    given = {name: array(x) if isinstance(x, np.ndarray) else x for name, x in drawn.items()}
    return make(Mask, given)


def conjunction(parts, Mask, array):
    whole = Mask()
    for part in parts:
        whole = whole & part(Mask, array)
    return whole


# Of the queries and of the keys, in a tile.
TILES = st.sampled_from(((16, 8), (8, 8), (32, 4), (12, 5)))
OPTIONS = st.fixed_dictionaries(
    {
        "hides": st.sampled_from((0.0, 0.0, 0.3)),
        "sinks": st.sampled_from((None, True)),
        "rate": st.sampled_from((0.0, 0.0, 0.3)),
        "scale": st.sampled_from((None, 0.3, 2.0)),
        "soft_cap": st.sampled_from((None, 1.5)),
    }
)


@st.composite
def cases(draw):
    t, s, k, g, h, v = (draw(st.integers(1, most)) for most in (40, 40, 2, 3, 5, 5))
    sizes = TABLE.Sizes(2, t, s, k * g, k, h, v)
    mask = partial(conjunction, draw(st.lists(parts(t, s), max_size=3)))
    name = f"random {draw(st.integers(0, 2**16))}"
    options = draw(OPTIONS) | {"bias": draw(st.none() | biases(sizes))}
    return TABLE.Case(name, mask, sizes, draw(TILES), **options)


@st.composite
def biases(draw, sizes):
    """Draw the shape of a bias, which broadcasts over any of its axes."""
    return tuple(size if draw(st.booleans()) else 1 for size in sizes.scores)


@pytest.mark.usefixtures("no_shape_checks")
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cases())
def test_blocked_equals_pytorch_over_random_calls(case):
    # It is the bias that hides.
    case = case if case.bias else replace(case, hides=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("blocked"), "block", case.tiles[0])
        patch.setattr(load("blocked"), "edge", case.tiles[1])
        check(case, blocked(case))
