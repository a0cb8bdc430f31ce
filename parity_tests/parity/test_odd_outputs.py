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


def nested(x):
    return {"a": [x, (x + 1, None)], "b": {}}


RIGHT = {
    "booleans": (lambda x: x > 0, lambda x: x > 0),
    "integers": (lambda x: (x > 0).astype(int), lambda x: (x > 0).long()),
    "float and booleans": (lambda x: (x, x > 0), lambda x: (x, x > 0)),
    "complex": (jax.lax.complex, torch.complex),
    "float and complex": (
        lambda x, y: (x, jax.lax.complex(x, y)),
        lambda x, y: (x, torch.complex(x, y)),
    ),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16), lambda x: x.bfloat16()),
    "named tuple": (lambda x: Both(x, x + 1), lambda x: Both(x, x + 1)),
    "dataclass": (lambda x: Output(x, x + 1), lambda x: Output(x, x + 1)),
    "nested": (nested, nested),
    "the input itself": (lambda x: x, lambda x: x),
    "a number": (lambda x: jnp.sum(x), lambda x: x.sum()),
    "empty and not": (lambda x: (x[:0], x), lambda x: (x[:0], x)),
    "detached": (jax.lax.stop_gradient, lambda x: x.detach()),
    # The inputs of the next check must not be what this one left.
    "written in place": (lambda x: x * 2, lambda x: x.mul_(2)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_pairs_are_equal(case):
    # Complex numbers are made of two inputs.
    inputs = X * 2 if "complex" in case else X
    report = judge(*RIGHT[case], inputs)
    assert report.passed, report.explain()
    assert report.check("forward").ran


WRONG = {
    "booleans": (lambda x: x > 0, lambda x: x < 0),
    "counts": (lambda x: jnp.argmax(x), lambda x: (x < -9).sum() + 7),
    "beside floats": (lambda x: (x, x > 0), lambda x: (x, x < 0)),
    "complex": (lambda x: jax.lax.complex(x, x), lambda x: torch.complex(x, -x)),
    # In int8 the difference of these wraps to the number that has no absolute value.
    "int8": (
        lambda x: jnp.full(x.shape, 100, jnp.int8),
        lambda x: torch.full(x.shape, -28, dtype=torch.int8),
    ),
    # In float64 both are the same number.
    "int64": (lambda x: jnp.full(3, 2**60, jnp.int64), lambda x: torch.full((3,), 2**60 + 1)),
    "names": (lambda x: Both(x, x), lambda x: {"first": x, "second": x}),
    "structure": (lambda x: (x, x), lambda x: x),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_are_different(case):
    report = judge(*WRONG[case])
    assert report.differs
    assert not report.check("forward").passed
    # Each can be written, too: numbers that JSON lacks would raise here.
    assert str(report)
    document.text(document.document(report))


def test_other_names_are_said():
    report = judge(lambda x: {"logits": x}, lambda x: {"scores": x})
    match = "both must return outputs of the same names; there is no 'scores' among 'logits'"
    assert match in report.check("forward").note


def test_floats_of_integers_without_a_parameter_are_compared():
    def halves(x):
        return x.astype(float) / 2

    ids = [np.arange(6).reshape(2, 3)]
    assert judge(halves, lambda x: x.double() / 2, ids).passed
    assert judge(halves, lambda x: x.double() / 4, ids).differs


class Inner(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class TorchInner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)


def test_a_module_without_any_effect_of_its_parameters_is_compared():
    class Ours(Inner):
        def __call__(self, x):
            return jax.lax.stop_gradient(self.inner(x))

    class Theirs(TorchInner):
        def forward(self, x):
            return self.inner(x).detach()

    report = judge(Ours(), Theirs().eval(), checks=["forward", "gradients", "second"])
    assert report.passed, report.explain()


NOTHING = "the torch module returns nothing to compare"
# Of these both sides return the same.
NO_OUTPUTS = {
    "text": (lambda x: "a", "an output is an array, .* the output is a str. Pass a call"),
    "an integer": (lambda x: (x, 1), "an output is an array, .* 1 is a int. Pass a call"),
    "a boolean": (lambda x: True, "an output is an array, .* the output is a bool"),
    "a dataclass": (lambda x: Output("a"), "dataclass of arrays; first is a str"),
    "a generator": (lambda x: (y for y in x), "the output is a generator"),
    "None": (lambda x: None, NOTHING),
    "no tuple": (lambda x: (), NOTHING),
    "no mapping": (lambda x: {}, NOTHING),
}
REFUSED = {
    "array of text": (
        lambda x: np.array(["a"]),
        lambda x: x,
        "arrays of numbers are compared; output has the dtype <U1",
    ),
    "numpy of PyTorch": (
        lambda x: x,
        lambda x: x.numpy(),
        "the outputs of the PyTorch module are tensors; output is a ndarray",
    ),
    # Under one name only the second of each would be compared, and the first differs.
    "dots": (
        lambda x: {"a.b": x, "a": {"b": x + 1}},
        lambda x: {"a.b": x + 5, "a": {"b": x + 1}},
        "two are called 'a.b'. Pass a call that returns them under different names",
    ),
    "keys": (
        lambda x: {0: x, "0": x},
        lambda x: {0: x + 3, "0": x},
        "two are called '0'",
    ),
    **{case: (function, function, match) for case, (function, match) in NO_OUTPUTS.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_are_none_are_refused(case):
    ours, theirs, match = REFUSED[case]
    with pytest.raises(PairingError, match=match):
        judge(ours, theirs)


@pytest.mark.parametrize("raises", ["flax", "torch"])
def test_an_error_in_training_alone_is_a_failure_of_that_check(raises):
    # A key is given in training only.
    class Ours(Inner):
        def __call__(self, x, dropout_key=None):
            if dropout_key is not None and raises == "flax":
                raise ValueError("not in training")
            return self.inner(x)

    class Theirs(TorchInner):
        def forward(self, x, dropout_key=None):
            if dropout_key is not None and raises == "torch":
                raise ValueError("not in training")
            return self.inner(x)

    check = judge(Ours(), Theirs().eval()).check("training")
    assert not check.passed
    assert check.note == f"{raises} raised ValueError: not in training"
