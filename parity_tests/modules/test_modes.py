"""Train and eval mode without a shared key: each side draws its own."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn.proof.variants import VARIANTS

DROPPING = list(
    {case.module: case for case in VARIANTS if case.dropout}.values()
)  # one of each class


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_flax_draws_a_fresh_key_for_each_call_and_none_in_eval_mode(case):
    module = case.build(flax_attn, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    inputs = [jnp.asarray(x) for x in case.draw(np.random.default_rng(0)).values()]
    call = nnx.jit(lambda module, inputs: module(*inputs, **case.call(flax_attn)))

    def output():
        return np.asarray(call(module, inputs))

    module.train()
    first, second = output(), output()
    assert (first != second).any()
    module.eval()
    third, fourth = output(), output()
    assert (third == fourth).all()
    assert (third != first).any()


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_torch_draws_from_its_generator_and_not_in_eval_mode(case):
    module = case.build(torch_ref).double()
    inputs = [torch.from_numpy(x) for x in case.draw(np.random.default_rng(0)).values()]

    def output(seed):
        torch.manual_seed(seed)
        return module(*inputs, **case.call(torch_ref)).detach()

    module.train()
    assert (output(1) == output(1)).all()
    assert (output(1) != output(2)).any()
    module.eval()
    assert (output(1) == output(2)).all()
