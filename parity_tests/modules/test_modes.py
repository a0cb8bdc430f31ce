"""Train and eval mode without a shared key: each side draws its own."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn.proof.variants import VARIANTS

# One of each class.
DROPPING = {case.module: case for case in VARIANTS if case.dropout}.values()


def inputs_of(case, array):
    return [array(x) for x in case.draw(np.random.default_rng(0)).values()]


def four_outputs(case):
    """Yield the outputs of two calls in train mode, and of two in eval mode."""
    module = case.build(flax_attn, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    call = nnx.jit(lambda module, inputs: module(*inputs, **case.call(flax_attn)))
    for switch in (module.train, module.train, module.eval, module.eval):
        switch()
        # The module keeps the state of its streams.
        yield np.asarray(call(module, inputs_of(case, jnp.asarray)))


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_flax_draws_a_fresh_key_for_each_call_and_none_in_eval_mode(case):
    first, second, third, fourth = four_outputs(case)
    assert (first != second).any()
    assert (third == fourth).all()
    assert (third != first).any()


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_torch_draws_from_its_generator(case):
    module = case.build(torch_ref).double().train()
    first, again, other = (seeded(case, module, seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_torch_draws_nothing_in_eval_mode(case):
    module = case.build(torch_ref).double().eval()
    assert (seeded(case, module, 1) == seeded(case, module, 2)).all()


def seeded(case, module, seed):
    """Return the output of a call that draws from this seed, if it draws at all."""
    torch.manual_seed(seed)
    return module(*inputs_of(case, torch.from_numpy), **case.call(torch_ref)).detach()
