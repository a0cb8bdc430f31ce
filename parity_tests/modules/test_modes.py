"""Train and eval mode without a shared key: each side draws its own."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn.parity.cases import CASES
from flax_attn.parity.pair import Pair

DROPPING = [case for case in CASES if case.arguments.get("dropout", 0) > 0]


@pytest.fixture(params=DROPPING, ids=lambda case: case.name)
def pair(request):
    return Pair(request.param)


def flax_output(pair):
    call = nnx.jit(lambda module, inputs: module(*inputs, **pair.case.call(flax_attn)))
    return lambda: np.asarray(call(pair.flax, [jnp.asarray(x) for x in pair.inputs]))


def test_flax_draws_a_fresh_key_for_each_call_and_none_in_eval_mode(pair):
    output = flax_output(pair)
    pair.train()
    first, second = output(), output()
    assert (first != second).any()
    pair.train(False)
    third, fourth = output(), output()
    assert (third == fourth).all()
    assert (third != first).any()


def test_torch_draws_from_its_generator_and_not_in_eval_mode(pair):
    def output(seed):
        torch.manual_seed(seed)
        inputs = [torch.from_numpy(x) for x in pair.inputs]
        return pair.torch(*inputs, **pair.case.call(torch_ref)).detach()

    pair.train()
    assert (output(1) == output(1)).all()
    assert (output(1) != output(2)).any()
    pair.train(False)
    assert (output(1) == output(2)).all()
