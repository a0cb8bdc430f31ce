"""Calls of backends on random numbers, and their gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import Mask
from flax_attn.backends.call import Call

NAMES = ("query", "key", "value", "bias")
OPTIONS = {"scale": 0.3, "soft_cap": None, "sinks": None, "dropout": None, "precision": None}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make_call(*shapes, mask=None, bias=None, dtype=jnp.float32, **options):
    """Return a call of random arrays, given the shapes of query, key and value."""
    (b, t, n, _), (_, s, _, _), _ = shapes
    mask = (Mask() if mask is None else mask).resolve(b, n, t, s)
    arrays = [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    return Call(*arrays, bias, mask, **OPTIONS | options)


def both_ways(attend, call):
    """Return the output, and the gradients of all arrays under a random cotangent."""
    arrays = {name: getattr(call, name) for name in NAMES if getattr(call, name) is not None}

    @jax.jit
    def run(arrays):
        output, pull = jax.vjp(lambda arrays: attend(replace(call, **arrays)), arrays)
        (gradients,) = pull(draw(*output.shape, seed=4, dtype=output.dtype))
        return {"output": output, **gradients}

    return run(arrays)
