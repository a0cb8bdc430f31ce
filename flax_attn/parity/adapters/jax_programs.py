"""The programs of a JAX module: its outputs, its gradients, and what they are compiled to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn.parity.adapters.adapter import Mode, RunSpec
from flax_attn.parity.adapters.jax_arrays import JaxArrays, floating
from flax_attn.parity.adapters.module_adapter import output_of
from flax_attn.parity.adapters.quick_jit import compiled, optimized
from flax_attn.parity.adapters.rounded_sums import with_rounded_sums


class Programs:
    """The functions of arrays that an adapter runs; each is compiled once for a shape and dtype.

    Args:
        call: function of parameters, inputs, state, extras, mode, and what `outputs` takes more,
            that returns the outputs of a call, and the state that it leaves.
        compiler: function that compiles a function.
    """

    def __init__(
        self, call: Callable[..., tuple[dict[str, Any], Any]], compiler: Callable = compiled
    ):
        self._call = call
        self._compile = compiler

    def outputs(
        self, params, inputs, state, extras, mode: Mode, cached: bool = False, before: Any = None
    ) -> dict[str, Any]:
        """Return the outputs, not compiled."""
        outputs, _ = self._call(params, inputs, state, extras, mode, cached, before)
        return outputs

    def gradients(self, params, inputs, state, extras, cotangents, mode: Mode) -> tuple[Any, Any]:
        """Return outputs, and gradients of parameters and of floating inputs, not compiled."""
        outputs, found, _ = self._with_state(params, inputs, state, extras, cotangents, mode)
        return outputs, found

    def forward(self, spec: RunSpec) -> Callable:
        """Return `outputs` as a run asks for it."""
        if spec.eager:
            return self.outputs
        return self.optimized_outputs if spec.optimized else self.compiled_outputs

    def backward(self, spec: RunSpec) -> Callable:
        """Return `gradients` as a run asks for it."""
        return self.rounded_gradients if spec.rounded_sums else self.compiled_gradients

    @cached_property
    def compiled_outputs(self) -> Any:
        """`outputs`, compiled as fast as can be."""
        return self._compile(self.outputs, static_argnames=("mode", "cached"))

    @cached_property
    def optimized_outputs(self) -> Any:
        """`outputs`, compiled as users compile them."""
        return optimized(self.outputs, static_argnames=("mode", "cached"))

    @cached_property
    def compiled_gradients(self) -> Any:
        """`gradients`, compiled."""
        return self._compile(self.gradients, static_argnames=("mode",))

    @cached_property
    def rounded_gradients(self) -> Any:
        """`gradients`, with each sum that JAX adds to the program rounded once."""
        rounded = with_rounded_sums(self.gradients)
        return self._compile(rounded, static_argnames=("mode",))

    @cached_property
    def step(self) -> Any:
        """`gradients`, with the state that the call leaves."""
        return self._compile(self._with_state, static_argnames=("mode",))

    @cached_property
    def second(self) -> Any:
        """Derivatives of the gradients along tangents of parameters and floating inputs."""
        return self._compile(self._second)

    def moves_state(self, params, inputs, state, extras, mode: Mode) -> bool:
        """Whether a call changes what the module keeps beside its parameters."""
        if not jax.tree.leaves(state):
            return False

        def left(params, inputs, state, extras):
            return self._call(params, inputs, state, extras, mode)[1]

        # What is not changed is returned as it was given.
        program = jax.make_jaxpr(left)(params, inputs, state, extras).jaxpr
        return any(result not in program.invars for result in program.outvars)

    def _with_state(self, params, inputs, state, extras, cotangents, mode: Mode):
        rest = inputs, state, extras, cotangents, mode
        found, (outputs, left) = self._differentiate(params, floating(inputs), *rest)
        return outputs, found, left

    @property
    def _differentiate(self) -> Callable:
        return jax.grad(self._weighted, argnums=(0, 1), has_aux=True)

    def _weighted(
        self,
        params,
        differentiated: JaxArrays,
        inputs: JaxArrays,
        state,
        extras,
        cotangents: Mapping[str, jax.Array],
        mode: Mode,
    ):
        """Return the sum of the products of outputs and cotangents, with outputs and state."""
        outputs, left = self._call(params, {**inputs, **differentiated}, state, extras, mode)
        total = 0
        for name, cotangent in cotangents.items():
            # A module may return an output in another dtype than that of the run.
            output = output_of(outputs, name, cotangent.shape).astype(cotangent.dtype)
            total += jnp.sum(output * cotangent)
        return total, (outputs, left)

    def _second(self, params, inputs, state, extras, cotangents, tangents):
        def gradients(params, differentiated):
            rest = inputs, state, extras, cotangents, "eval"
            found, _ = self._differentiate(params, differentiated, *rest)
            return found

        # Forward over reverse: it also differentiates kernels with a backward pass of their own.
        _, derivatives = jax.jvp(gradients, (params, floating(inputs)), tangents)
        return derivatives
