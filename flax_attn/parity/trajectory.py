"""Training on both sides: the same data, optimizer and dropout keys, and every loss and parameter afterwards."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import torch_ref
from flax_attn import convert
from flax_attn.parity.pair import Arrays, Pair

STEPS = 100
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def train(pair: Pair, steps: int = STEPS) -> tuple[Arrays, Arrays]:
    """Fit the output to a random target by AdamW, in train mode; return losses and final parameters of both sides."""
    random = np.random.default_rng(pair.seed + 2)
    target = random.normal(size=pair.truth.outputs["output"].shape)
    keys = random.integers(0, 2**32, (steps, 2))
    pair.train()
    try:
        return _train_flax(pair, target, keys), _train_torch(pair, target, keys)
    finally:
        pair.train(False)


def _train_flax(pair: Pair, target: np.ndarray, keys: np.ndarray) -> Arrays:
    graph, params, rest = nnx.split(pair.flax, nnx.Param, ...)
    optimizer = optax.adamw(ADAMW["lr"], *ADAMW["betas"], eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    inputs, losses = [jnp.asarray(x) for x in pair.inputs], []
    cotangents = {name: jnp.zeros_like(c) for name, c in pair.cotangents.items()}

    @jax.jit
    def update(params, state, gradient):
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for words in keys.astype(np.uint32):
        # The gradient is compiled for other cotangents already, so it is called twice: for the error, then with it.
        named, *_ = pair.gradient(graph, params, rest, inputs, cotangents, words)
        error = named["output"] - target
        fit = cotangents | {"output": 2 * error / error.size}
        _, gradient, _ = pair.gradient(graph, params, rest, inputs, fit, words)
        params, state = update(params, state, gradient)
        losses.append(float(jnp.square(error).mean()))
    return convert.state_dict(nnx.merge(graph, params, rest)) | {"loss": np.array(losses)}


def _train_torch(pair: Pair, target: np.ndarray, keys: np.ndarray) -> Arrays:
    module = copy.deepcopy(pair.torch)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    inputs, losses = [torch.from_numpy(x) for x in pair.inputs], []
    for words in torch.from_numpy(keys):
        optimizer.zero_grad()
        output = pair.named(module(*inputs, **pair.options(torch_ref, words)))["output"]
        loss = (output - torch.from_numpy(target)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value.detach().numpy() for name, value in module.named_parameters()} | {"loss": np.array(losses)}
