"""The training of a JAX module by optax, in as few compiled programs as can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_attn.parity.adapters.jax_arrays import JaxArrays, zeros_like
from flax_attn.parity.adapters.jax_programs import Programs
from flax_attn.parity.adapters.module_adapter import output_of
from flax_attn.parity.adapters.quick_jit import compiled
from flax_attn.parity.training import TrainingSpec


class Training:
    """The steps of a training: gradients, loss and optimizer are compiled each.

    Args:
        programs: programs of the module.
        spec: what is trained, and how.
        targets: targets by name of the output; NaN is none.
        trained: names of the parameters that are trained.
    """

    def __init__(
        self,
        programs: Programs,
        spec: TrainingSpec,
        targets: JaxArrays,
        trained: Collection[str],
    ):
        self._programs = programs
        self._spec = spec
        self._targets = targets
        self._names = trained
        self._optimizer = spec.recipe.optax()
        self._loss_of = compiled(self._loss)
        self._zeros = {name: zeros_like(target) for name, target in targets.items()}

    def run(
        self, params: JaxArrays, inputs: JaxArrays, state: Any, extras: Sequence[JaxArrays]
    ) -> tuple[JaxArrays, list]:
        """Return the parameters after all steps, and the loss of each.

        Args:
            params: parameters at the start.
            inputs: inputs of every step.
            state: state of the module at the start.
            extras: what each step is given beside them.
        """
        spec, programs = self._spec, self._programs
        moves = programs.moves_state(params, inputs, state, extras[0], spec.mode)
        # Where there is no state, the program of the gradients has been compiled already.
        step = programs.step if moves else programs.compiled_gradients
        update = compiled(self._update)
        optimizer_state = compiled(self._optimizer.init)(self._trained(params))
        losses = []
        for own in extras:
            run = partial(step, params, inputs, state, own, mode=spec.mode)
            loss, gradients, *left = self._differentiated(run)
            losses.append(loss)
            if moves:
                # The next step begins with the state that this one leaves, as in PyTorch.
                (state,) = left
            params, optimizer_state = update(params, optimizer_state, gradients)
        return params, losses

    def _differentiated(self, run: Callable) -> tuple[Any, ...]:
        """Return the loss of a step, its gradients, and the state that the step leaves, if any."""
        # One compiled program gives the outputs first, then the gradients of their loss.
        outputs, *_ = run(self._zeros)
        loss, cotangents = self._loss_of(outputs)
        _, (gradients, _), *left = run(cotangents)
        return loss, gradients, *left

    def _loss(self, outputs: Mapping[str, Any]) -> tuple[jax.Array, JaxArrays]:
        """Return the sum of the mean squared errors, with its gradients by the outputs."""
        loss, cotangents = jnp.zeros(()), {}
        for name, target in self._targets.items():
            error = _error(output_of(outputs, name, target.shape), target)
            loss += jnp.square(error).mean()
            cotangents[name] = 2 * error / error.size
        return loss, cotangents

    def _update(self, params: JaxArrays, state: Any, gradients: JaxArrays) -> tuple[JaxArrays, Any]:
        """Return the parameters and the state of the optimizer after a step."""
        own = self._trained(params)
        # optax raises a float to the power of an integer count.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = self._optimizer.update(self._trained(gradients), state, own)
            moved: Any = optax.apply_updates(own, updates)
        return {**params, **moved}, state

    def _trained(self, values: JaxArrays) -> JaxArrays:
        return {name: value for name, value in values.items() if name in self._names}


def _error(output: jax.Array, target: jax.Array) -> jax.Array:
    # A module may return an output in another dtype than that of the run.
    difference = output.astype(target.dtype) - target
    return jnp.where(jnp.isnan(target), 0.0, difference)
