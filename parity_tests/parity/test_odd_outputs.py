"""Outputs that are no floating arrays, and calls that do odd things."""

from collections import namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import PairingError, compare
from flax_attn.parity.report import document

Both = namedtuple("Both", "first second")
X = [(2, 3)]


@dataclass(frozen=True)
class Output:
    first: object
    second: object = None


def judge(ours, theirs, inputs=X, **options):
    return compare(ours, theirs, inputs, locate=False, **options)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: x > 0, lambda x: x > 0),
        (lambda x: (x > 0).astype(int), lambda x: (x > 0).long()),
        (lambda x: (x, x > 0), lambda x: (x, x > 0)),
        (jax.lax.complex, torch.complex),
        (lambda x, y: (x, jax.lax.complex(x, y)), lambda x, y: (x, torch.complex(x, y))),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.bfloat16()),
        (lambda x: Both(x, x + 1), lambda x: Both(x, x + 1)),
        (lambda x: Output(x, x + 1), lambda x: Output(x, x + 1)),
        (
            lambda x: {"a": [x, (x + 1, None)], "b": {}},
            lambda x: {"a": [x, (x + 1, None)], "b": {}},
        ),
        (lambda x: x, lambda x: x),
        (lambda x: jnp.sum(x), lambda x: x.sum()),
        (lambda x: (x[:0], x), lambda x: (x[:0], x)),
        (jax.lax.stop_gradient, lambda x: x.detach()),
        (lambda x: x * 2, lambda x: x.mul_(2)),
    ],
    ids=[
        *("booleans", "integers", "float and booleans", "complex", "float and complex", "bfloat16"),
        *("named tuple", "dataclass", "nested", "the input itself", "a number", "empty and not"),
        *("detached", "written in place"),
    ],
)
def test_right_pairs_are_equal(ours, theirs, request):
    report = judge(ours, theirs, X * (2 if "complex" in request.node.callspec.id else 1))
    assert report.passed, report.explain()
    assert report.check("forward").ran


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: x > 0, lambda x: x < 0),
        (lambda x: jnp.argmax(x), lambda x: (x < -9).sum() + 7),
        (lambda x: (x, x > 0), lambda x: (x, x < 0)),
        (lambda x: jax.lax.complex(x, x), lambda x: torch.complex(x, -x)),
        # In int8 the difference of these wraps to the number that has no absolute value.
        (
            lambda x: jnp.full(x.shape, 100, jnp.int8),
            lambda x: torch.full(x.shape, -28, dtype=torch.int8),
        ),
        (lambda x: jnp.full(3, 2**60, jnp.int64), lambda x: torch.full((3,), 2**60 + 1)),
        (lambda x: Both(x, x), lambda x: {"first": x, "second": x}),
        (lambda x: (x, x), lambda x: x),
    ],
    ids=["booleans", "counts", "beside floats", "complex", "int8", "int64", "names", "structure"],
)
def test_wrong_pairs_are_different(ours, theirs):
    report = judge(ours, theirs)
    assert report.differs
    assert not report.check("forward").passed
    assert str(report)
    document.text(document.document(report))


def test_other_names_are_said():
    report = judge(lambda x: {"logits": x}, lambda x: {"scores": x})
    match = "both must return outputs of the same names; there is no 'scores' among 'logits'"
    assert match in report.check("forward").note


def test_floats_of_integers_without_a_parameter_are_compared():
    ids = [np.arange(6).reshape(2, 3)]
    assert judge(lambda x: x.astype(float) / 2, lambda x: x.double() / 2, ids).passed
    assert judge(lambda x: x.astype(float) / 2, lambda x: x.double() / 4, ids).differs


def test_a_module_without_any_effect_of_its_parameters_is_compared():
    class Ours(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.lax.stop_gradient(self.inner(x))

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x).detach()

    report = judge(Ours(), Theirs().eval(), checks=["forward", "gradients", "second"])
    assert report.passed, report.explain()


@pytest.mark.parametrize(
    ("ours", "theirs", "match"),
    [
        (
            lambda x: "a",
            lambda x: "a",
            "an output is an array, .* the output is a str. Pass a call",
        ),
        (lambda x: (x, 1), lambda x: (x, 1), "an output is an array, .* 1 is a int. Pass a call"),
        (lambda x: True, lambda x: True, "an output is an array, .* the output is a bool"),
        (lambda x: Output("a"), lambda x: Output("a"), "dataclass of arrays; first is a str"),
        (lambda x: (y for y in x), lambda x: (y for y in x), "the output is a generator"),
        (lambda x: None, lambda x: None, "the torch module returns nothing to compare"),
        (lambda x: (), lambda x: (), "the torch module returns nothing to compare"),
        (lambda x: {}, lambda x: {}, "the torch module returns nothing to compare"),
        (
            lambda x: np.array(["a"]),
            lambda x: x,
            "arrays of numbers are compared; output has the dtype <U1",
        ),
        (
            lambda x: x,
            lambda x: x.numpy(),
            "the outputs of the PyTorch module are tensors; output is a ndarray",
        ),
        (
            lambda x: {"a.b": x, "a": {"b": x + 1}},
            lambda x: {"a.b": x + 5, "a": {"b": x + 1}},
            "two are called 'a.b'. Pass a call that returns them under different names",
        ),
        (lambda x: {0: x, "0": x}, lambda x: {0: x + 3, "0": x}, "two are called '0'"),
    ],
    ids=[
        *(
            "text",
            "an integer",
            "a boolean",
            "a dataclass",
            "a generator",
            "None",
            "no tuple",
            "no mapping",
        ),
        *("array of text", "numpy of PyTorch", "dots", "keys"),
    ],
)
def test_outputs_that_are_none_are_refused(ours, theirs, match):
    with pytest.raises(PairingError, match=match):
        judge(ours, theirs)


@pytest.mark.parametrize("raises", ["flax", "torch"])
def test_an_error_in_training_alone_is_a_failure_of_that_check(raises):
    class Ours(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x, dropout_key=None):
            if dropout_key is not None and raises == "flax":
                raise ValueError("not in training")
            return self.inner(x)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)

        def forward(self, x, dropout_key=None):
            if dropout_key is not None and raises == "torch":
                raise ValueError("not in training")
            return self.inner(x)

    check = judge(Ours(), Theirs().eval()).check("training")
    assert not check.passed
    assert check.note == f"{raises} raised ValueError: not in training"
