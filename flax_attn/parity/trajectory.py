"""Training on both sides: the same data, the same optimizer, and every loss and parameter afterwards."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.parity.pair import Arrays, Pair

STEPS = 100
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def train(pair: Pair, steps: int = STEPS) -> tuple[Arrays, Arrays]:
    """Fit the output to a random target by AdamW; return losses and final parameters of Flax and of PyTorch."""
    target = np.random.default_rng(pair.seed + 2).normal(size=pair.truth.outputs["output"].shape)
    return _train_flax(pair, target, steps), _train_torch(pair, target, steps)


def _train_flax(pair: Pair, target: np.ndarray, steps: int) -> Arrays:
    graph, params, rest = nnx.split(pair.flax, nnx.Param, ...)
    optimizer = optax.adamw(ADAMW["lr"], *ADAMW["betas"], eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    inputs = [jnp.asarray(x) for x in pair.inputs]

    def loss(params):
        output = pair.named(nnx.merge(graph, params, rest)(*inputs, **pair.options(flax_attn)))["output"]
        return jnp.square(output - target).mean()

    def step(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def run(params):
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
        return params, losses

    params, losses = run(params)
    return convert.state_dict(nnx.merge(graph, params, rest)) | {"loss": np.asarray(losses)}


def _train_torch(pair: Pair, target: np.ndarray, steps: int) -> Arrays:
    module = copy.deepcopy(pair.torch)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    inputs, losses = [torch.from_numpy(x) for x in pair.inputs], []
    for _ in range(steps):
        optimizer.zero_grad()
        output = pair.named(module(*inputs, **pair.options(torch_ref)))["output"]
        loss = (output - torch.from_numpy(target)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value.detach().numpy() for name, value in module.named_parameters()} | {"loss": np.array(losses)}
