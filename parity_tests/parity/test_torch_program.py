"""The PyTorch side as a program: its values are those of a run, its lines those of the user."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flax_attn.parity.trace.torch_program import copied, torch_program
from parity_tests.parity.lines import line_of, places

X = torch.tensor(np.random.default_rng(0).normal(size=(3, 4)))


def run(function, x=X, **sources):
    """Return the program of a function, or of a module, of one tensor with one output."""
    module = copied(function.double()) if isinstance(function, nn.Module) else function
    x = x.clone()

    def call(module):
        return {"output": module(x)}

    return torch_program(module, call, {"x": x, **sources})


# Functions that PyTorch has as one operation, or that write where they read.


def norms(x):
    x = F.layer_norm(x, (4,)) + F.group_norm(x, 2) + F.rms_norm(x, (4,))
    return F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double())


def activations(x):
    return F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.glu(x.repeat(1, 2)) + F.elu(x)


def written_in_place(x):
    found = torch.zeros(3, 4, dtype=torch.float64)
    found[:, :2] = x[:, 2:].sin()
    found[1].mul_(2)
    found.add_(x)
    return found * 3


def fused(x):
    q = x.reshape(1, 1, 3, 4)
    return F.scaled_dot_product_attention(q, q + 1, q, is_causal=True)


def grouped(x):
    q = x.reshape(1, 2, 2, 3)
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1] * 2, scale=0.3, enable_gqa=True)


def packed(x):
    torch.manual_seed(0)
    cell = nn.GRU(4, 5, batch_first=True).double()
    sequences = pack_padded_sequence(torch.stack([x, x + 1]), [2, 3], True, False)
    output, _ = cell(sequences)
    padded, _ = pad_packed_sequence(output, True)
    return padded


def convolved(x):
    image = x.reshape(1, 1, 3, 4)
    kernel = image[..., :2, :2]
    return F.max_pool2d(F.conv2d(image, kernel, padding=1, dilation=2), 2)


FUNCTIONS = (norms, activations, written_in_place, fused, grouped, packed, convolved)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_those_of_the_run(function):
    program = run(function)
    (output,) = program.outputs.values()
    wanted = function(X.clone()).detach()
    # Norms and fused attention are computed in parts here, in another order.
    np.testing.assert_allclose(output.value, wanted, rtol=1e-13, atol=1e-15)
    assert output in program.varying


def test_what_is_written_into_a_view_changes_the_whole():
    program = run(written_in_place)
    (sine,) = [node for node in program.nodes if node.operation == "sin"]
    assert program.outputs["output"] in program.downstream([sine])
    # Values are those of their time: what is written later does not change them.
    first = next(node for node in program.nodes if node.value.shape == (3, 4) and node.operands)
    np.testing.assert_array_equal(program.nodes[0].value, X)
    assert not np.array_equal(first.value, program.outputs["output"].value)


@pytest.mark.parametrize(
    ("function", "operation", "text"),
    [
        (norms, "rsqrt", None),
        (written_in_place, "sin", ".sin()"),
        (fused, "dot", "F.scaled"),
        (convolved, "conv", "F.conv2d"),
    ],
)
def test_lines_are_those_of_the_users_code(function, operation, text):
    found = places(run(function), operation)
    assert found
    assert {place.file for place in found} == {__file__}
    if text is not None:
        assert {place.line for place in found} == {line_of(function, text)}


def test_composed_operations_are_recorded_as_what_they_are_made_of():
    names = {node.operation for node in run(norms).nodes}
    assert {"rsqrt", "sub", "mul"} <= names
    assert not any("norm" in name for name in names)
    # Both kinds of GELU.
    assert {"erf", "tanh"} <= {node.operation for node in run(activations).nodes}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).sin()
        return x


@pytest.fixture
def stacked():
    """The program of `Stack` whose parameters are sources."""
    module = copied(Stack().double())
    sources = {f"parameter {name}": value for name, value in module.named_parameters()}
    return torch_program(module, lambda m: {"output": m(X)}, {"x": X, **sources})


def test_operations_have_the_path_of_their_module(stacked):
    assert [place.module for place in places(stacked, "dot")] == ["blocks.0", "blocks.1"]
    sines = places(stacked, "sin")
    assert [place.module for place in sines] == ["", ""]
    assert {place.line for place in sines} == {line_of(Stack, ".sin()")}


def test_parameters_have_their_names(stacked):
    names = [node.name for node in stacked.nodes if node.operation == "source"]
    assert "parameter blocks.1.weight" in names
    constants = [node for node in stacked.nodes if node.operation == "constant"]
    # A weight would be a matrix.
    assert not any(node.value.ndim == 2 for node in constants)


def gradient(x):
    leaf = x.clone().requires_grad_()
    hidden = leaf.sin()
    loss = (hidden * 2).sum()
    return torch.autograd.grad(loss, leaf)[0]


def test_backward_operations_stand_at_the_lines_of_the_forward_pass():
    program = run(gradient)
    np.testing.assert_allclose(program.outputs["output"].value, 2 * X.cos())
    # Only the gradient of the sine has a cosine.
    (place,) = places(program, "cos")
    assert place.line == line_of(gradient, ".sin()")


def test_a_module_is_copied_before_it_is_followed():
    module = Stack().double()
    run(module)
    # Hooks and eval mode are those of the copy.
    assert not module._forward_hooks
    assert module.training
