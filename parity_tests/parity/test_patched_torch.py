"""A PyTorch whose functions have been replaced is no reference."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

from flax_attn.parity import PairingError, compare

X = [(3, 4)]
RULE = "is not the function of PyTorch, which is the reference: something has replaced it"


@pytest.mark.parametrize(
    ("place", "name", "value", "shown"),
    [
        (torch, "softmax", lambda x, dim: x, "torch.softmax"),
        (torch, "sin", torch.cos, "torch.sin"),
        (torch.nn.functional, "layer_norm", lambda x: x, "torch.nn.functional.layer_norm"),
        (torch.nn.functional, "gelu", partial(torch.mul, other=2), "torch.nn.functional.gelu"),
        (torch.linalg, "norm", lambda x: x, "torch.linalg.norm"),
    ],
)
def test_a_function_that_was_replaced_before_is_refused(monkeypatch, place, name, value, shown):
    # Neither side calls it: it need not be seen in use.
    monkeypatch.setattr(place, name, value)
    with pytest.raises(PairingError, match=f"^{shown} {RULE}"):
        compare(jnp.sin, torch.tanh, X)


def test_a_method_of_tensors_that_was_added_before_is_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: x, raising=False)
    with pytest.raises(PairingError, match=f"^torch.Tensor.softmax {RULE}"):
        compare(jnp.sin, torch.tanh, X)


def test_a_port_that_replaces_a_function_while_it_is_called_is_refused(monkeypatch):
    def patching(x):
        monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: x, raising=False)
        return jnp.sin(x)

    with pytest.raises(PairingError, match=f"^torch.Tensor.softmax {RULE}"):
        compare(patching, lambda x: x.softmax(-1), X, checks=["shapes", "forward"])


def test_a_replaced_function_of_pytorch_itself_is_seen_by_its_identity(monkeypatch):
    def patching(x):
        # Its module and its name are those of a function of PyTorch.
        monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.mish)
        return jax.nn.silu(x)

    with pytest.raises(PairingError, match=f"^torch.nn.functional.silu {RULE}"):
        compare(patching, lambda x: torch.nn.functional.silu(x), X, checks=["shapes", "forward"])
