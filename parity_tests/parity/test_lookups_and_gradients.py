"""Causes in embeddings, in casts of inputs and in parameters that one side does not train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.convert import Layout, Rule
from flax_attn.parity import compare

IDS = np.array([[3, 5, 1, 1], [2, 4, 6, 1]])
LINEAR = [Rule(("kernel",), "weight", "i o -> o i"), Rule(("bias",), "bias")]


class FlaxTypes(nnx.Module):
    """An embedding of tokens and one of types.

    The types are those of another sentence than PyTorch's, or counted from 1.
    """

    def __init__(self, types):
        self.tokens, self.types = (nnx.Embed(n, 6, rngs=nnx.Rngs(0)) for n in (7, 5))
        self.wanted = tuple(types)

    def __call__(self, ids):
        return self.tokens(ids) + self.types(jnp.broadcast_to(jnp.array(self.wanted), ids.shape))


class TorchTypes(torch.nn.Module):
    def __init__(self, types, padding=None):
        super().__init__()
        self.tokens, self.types = (
            torch.nn.Embedding(7, 6, padding_idx=padding),
            torch.nn.Embedding(5, 6),
        )
        self.wanted = types

    def forward(self, ids):
        return self.tokens(ids) + self.types(torch.tensor(self.wanted).expand(ids.shape))


def compared(flax, theirs, *inputs, **options):
    return compare(flax, theirs.eval(), list(inputs), checks=["forward", "gradients"], **options)


@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [
        (
            [1] * 4,
            [0] * 4,
            (
                "types: flax has row 1 of its table everywhere, torch has row 0 of its table"
                " everywhere"
            ),
        ),
        (
            [1, 2, 3, 4],
            [0, 1, 2, 3],
            "types: flax has row 1 of its table at (0, 0), torch has row 0 of its table at (0, 0)",
        ),
        (
            [0, 1, 3, 3],
            [0, 1, 2, 3],
            "types: flax has row 3 of its table at (0, 2), torch has row 2 of its table at (0, 2)",
        ),
    ],
    ids=["type", "offset", "one"],
)
def test_other_rows_of_an_embedding_are_named(ours, theirs, cause):
    report = compared(FlaxTypes(ours), TorchTypes(theirs), IDS)
    assert not report.passed
    assert report.causes == [cause]


def test_a_row_without_gradient_is_named():
    report = compared(FlaxTypes([0] * 4), TorchTypes([0] * 4, padding=1), IDS)
    assert report.check("forward").passed
    assert report.causes == [
        "tokens.weight: torch has no gradient in row 1, as of padding_idx, flax has one"
    ]


class Stopped(nnx.Linear):
    def __call__(self, x):
        return x @ jax.lax.stop_gradient(self.kernel.get_value()) + self.bias.get_value()[None]


def test_a_parameter_without_gradient_is_named():
    report = compared(Stopped(6, 4, rngs=nnx.Rngs(0)), torch.nn.Linear(6, 4), (3, 6), layout=LINEAR)
    assert report.check("forward").passed
    assert report.causes == ["weight: flax has no gradient, torch has one"]


def test_other_gradients_are_not_named_so():
    class Doubled(nnx.Linear):
        def __call__(self, x):
            kernel = self.kernel.get_value()
            return x @ (2 * kernel - jax.lax.stop_gradient(kernel)) + self.bias.get_value()[None]

    report = compared(Doubled(6, 4, rngs=nnx.Rngs(0)), torch.nn.Linear(6, 4), (3, 6), layout=LINEAR)
    assert report.check("forward").passed
    assert not report.check("gradients").passed
    assert report.causes == []


class CastImages(nnx.Module):
    """It casts its images to float32, and moves the channels to the end."""

    def __init__(self):
        self.conv = nnx.Conv(
            3, 4, (2, 2), padding="VALID", param_dtype=jnp.float64, rngs=nnx.Rngs(0)
        )

    def __call__(self, images):
        return self.conv(jnp.moveaxis(images.astype(jnp.float32), 1, -1).astype(jnp.float64))


class TorchImages(torch.nn.Module):
    def __init__(self, change=lambda images: images):
        super().__init__()
        self.conv, self.change = torch.nn.Conv2d(3, 4, 2), change

    def forward(self, images):
        return self.conv(self.change(images)).movedim(1, -1)


def test_a_cast_of_an_input_is_named():
    report = compared(CastImages(), TorchImages(), (2, 3, 5, 4))
    assert not report.check("forward").passed
    assert report.causes == [
        "the whole module, input of conv: flax has numbers of float32, torch of float64"
    ]


@pytest.mark.parametrize(
    "change",
    [lambda images: images.float().double() * 1.001, lambda images: images * 1.001],
    ids=["both", "flax"],
)
def test_a_cast_that_does_not_explain_the_difference_is_not_named(change):
    report = compared(CastImages(), TorchImages(change), (2, 3, 5, 4))
    assert not report.check("forward").passed
    assert report.causes == [
        "the whole module, input of conv: flax has input, torch has input * 1.001"
    ]


def test_a_parameter_that_torch_does_not_train_is_shared_and_not_trained():
    theirs = torch.nn.Linear(6, 4)
    theirs.weight.requires_grad_(False)
    ours = Stopped(6, 4, rngs=nnx.Rngs(0))
    report = compare(
        ours,
        theirs.eval(),
        [(3, 6)],
        layout=LINEAR,
        checks=["forward", "gradients", "second", "training"],
    )
    assert report.passed, report
    assert "weight" in report.pair.weights
    assert "weight" not in report.check("gradients").errors
    theirs.requires_grad_(False)  # all of them, as one does to evaluate: nothing is meant by it
    assert "weight" in compared(ours, theirs, (3, 6), layout=LINEAR).check("gradients").errors


class TorchScaled(torch.nn.Module):
    """A temperature that is a number, and a table that Flax has not as a parameter."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = (
            torch.nn.Parameter(torch.tensor(value)) for value in (2.0, [3.0, 4.0])
        )

    def forward(self, x):
        return x * self.scale + self.table


class FlaxScaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        return x * self.scale.get_value() + jnp.array([[3.0, 4.0]])


def test_a_parameter_that_is_a_number_is_loaded_and_an_ignored_one_keeps_its_value():
    layout = Layout((Rule(("scale",), "scale"),), ignored="table")
    report = compared(FlaxScaled(), TorchScaled(), (3, 2), layout=layout)
    assert report.passed, report
    assert report.pair.weights["scale"].shape == ()
    assert report.pair.weights["table"].tolist() == [3.0, 4.0]


def test_the_first_output_is_the_same_of_both_whatever_their_order():
    def ours(x):
        return {"a": x + 1, "b": x[:, :2]}

    def theirs(x):
        return {"b": x[:, :2], "a": x + 1.5}

    report = compare(ours, theirs, [(3, 4)], layout=None, checks=["forward"])
    assert [node.shape for node in report.divergence.nodes if node.name == "."] == [(3, 4)]
    assert np.isfinite(report.divergence.first.error)
