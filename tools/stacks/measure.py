"""Measures one stack, in a process of its own: all ways in turns, the least time of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import psutil

from flax_attn.everywhere import core, everywhere
from flax_attn.functional.outputs import Outputs
from tools.stacks.models import MODELS, WIDTH

# As it is, under `everywhere`, and with a sum in the place of attention, which leaves all the rest.
WAYS = "without", "under", "rest"


def measure(library: str, tokens: int, training: bool, layers: int, turns: int) -> dict[str, Any]:
    """Return the seconds and the bytes of a program, each way.

    The bytes are those that XLA reserves beside weights, inputs and outputs. A program that takes
    more than the memory of the machine is not run. Without turns nothing is run.
    """
    x = jax.random.normal(jax.random.key(1), (1, tokens, WIDTH))
    forward, weights = MODELS[library](layers, x)
    run = _step(forward) if training else forward
    programs = {}
    found = {}
    # What is left without attention is asked of times alone.
    ways = WAYS if turns else WAYS[:2]
    for way in ways:
        program = _compiled(run, weights, x, way)
        memory = program.memory_analysis()
        programs[way] = program
        found[way] = {"bytes": memory.temp_size_in_bytes, "seconds": None}
    room = 0.8 * psutil.virtual_memory().total
    # In turns: what disturbs the machine for a while disturbs all ways.
    for way, program in list(programs.items()) * turns:
        own = found[way]
        if own["bytes"] < room:
            seconds = _seconds(program, weights, x)
            before = own["seconds"]
            own["seconds"] = seconds if before is None else min(before, seconds)
    return found


def _step(forward: Callable) -> Callable:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(forward(weights, x) ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(_updated, weights, gradients)

    return step


def _updated(weight: jax.Array, gradient: jax.Array) -> jax.Array:
    return weight - 1e-3 * gradient


def _compiled(run: Callable, weights: Any, x: jax.Array, way: str) -> Any:
    # A function of its own each time: JAX would find what it traced another way.
    own = jax.jit(lambda weights, x: run(weights, x))
    if way == "without":
        return own.lower(weights, x).compile()
    attend = core.attend_here if way == "under" else _sum
    with everywhere(strict=True) as report, patch.object(core, "attend_here", attend):
        program = own.lower(weights, x).compile()
    if not report.taken:
        raise RuntimeError("no call was computed by flax_attn")
    return program


def _sum(query: jax.Array, key: jax.Array, value: jax.Array, *others: Any, **options: Any) -> Any:
    # All three count: XLA would leave out the projection of one that does not.
    return Outputs(query + key + value)


def _seconds(program: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start
