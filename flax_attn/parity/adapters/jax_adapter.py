"""The JAX side: any module behind the specs, compiled once a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_attn.convert.rules import Entry
from flax_attn.parity.adapters.adapter import Arrays, ModuleAdapter, Result, RunSpec, dtypes, float64, is_floating
from flax_attn.parity.adapters.jax_parts import take_apart
from flax_attn.parity.training import TrainingSpec


class JaxAdapter(ModuleAdapter):
    """A `Adapter` of JAX. JAX must have x64 enabled where it is used.

    Args:
        module: whatever `take_apart` takes.
        call: how to call it; None is `module(*inputs)`.
        cached_call: how to compute the same in steps, if it can.
        positional: whether inputs are passed by position.
        entries: how its parameters become those of the other side; none are shared where this is empty.
        device: that runs the dtypes below float64, with products in full precision; None is the CPU.
    """

    framework = "flax"

    def __init__(
        self,
        module: Any,
        call: Callable | None = None,
        cached_call: Callable | None = None,
        positional: bool = True,
        entries: Sequence[Entry] = (),
        device: Any = None,
    ):
        self.module, self.entries, self.device = module, list(entries), device
        self._modes = {train: take_apart(module, train) for train in (False, True)}
        self._params = dict(self._modes[False].params)
        super().__init__(self._modes[False].call, call, cached_call, positional)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by their own names."""
        return {name: tuple(param.shape) for name, param in self._params.items()}

    def weights(self) -> Arrays:
        """Return the parameters in float64, by shared names."""
        return self._shared(self._params)

    def load(self, weights: Arrays) -> None:
        """Set the parameters, by shared names."""
        for entry in self.entries:
            self._params |= {name: jnp.asarray(a) for name, a in entry.split(weights[entry.theirs]).items()}

    def built(self, train: bool = False, dtype: str = "float64") -> Any:
        """Return the module with its parameters, in a dtype."""
        return self._modes[train].build(self._cast(self._params, dtype), self._rest(train, dtype))

    def arrays(self, arrays: Mapping[str, np.ndarray], dtype: str = "float64") -> dict[str, jax.Array]:
        """Return inputs as arrays of JAX, floating ones cast."""
        return {name: jnp.asarray(a, dtype if is_floating(a) else None) for name, a in arrays.items()}

    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        if self.device is None or spec.dtype == "float64":
            return self._run(spec)
        with jax.default_device(self.device), jax.default_matmul_precision("highest"):
            return self._run(spec)

    def _run(self, spec: RunSpec) -> Result:
        params, rest = self._cast(self._params, spec.dtype), self._rest(spec.train, spec.dtype)
        inputs, extras = self.arrays(spec.inputs, spec.dtype), _extras(spec.extras)
        if spec.cotangents is None:
            run = self._outputs if spec.eager else self._forward
            outputs = run(params, inputs, rest, extras, spec.train, spec.cached)
            return Result(float64(outputs), dtypes=dtypes(outputs))
        cotangents = self.arrays(spec.cotangents, spec.dtype)
        if spec.tangents is None:
            outputs, gradients = self.gradient(params, inputs, rest, extras, cotangents, spec.train)
            return Result(float64(outputs), self._all(*gradients), dtypes=dtypes(outputs))
        along = self._tangents(spec.tangents, params, inputs)
        return Result({}, second=self._all(*self._second(params, inputs, rest, extras, cotangents, along)))

    def gradient(self, params, inputs, rest, extras, cotangents, train: bool):
        """Return outputs, and gradients of parameters and of floating inputs; compiled once for each mode."""
        return self._gradients[train](params, inputs, rest, extras, cotangents)

    def _outputs(self, params, inputs, rest, extras, train: bool, cached: bool = False) -> dict[str, Any]:
        return self.call(self._modes[train].build(params, rest), inputs, extras, cached)

    @cached_property
    def _forward(self):
        return jax.jit(self._outputs, static_argnames=("train", "cached"))

    def _weighted(self, train: bool):
        def weighted(params, floating, inputs, rest, extras, cotangents):
            outputs = self._outputs(params, {**inputs, **floating}, rest, extras, train)
            return sum(jnp.sum(outputs[name].astype(c.dtype) * c) for name, c in cotangents.items()), outputs

        return jax.grad(weighted, argnums=(0, 1), has_aux=True)

    @cached_property
    def _gradients(self):
        def gradient(train: bool):
            def run(params, inputs, rest, extras, cotangents):
                gradients, outputs = self._weighted(train)(params, _floating(inputs), inputs, rest, extras, cotangents)
                return outputs, gradients

            return run

        # XLA puts the dropout function into every fusion that uses it, and LLVM takes seconds to optimise them all.
        levels = {False: {}, True: {"xla_backend_optimization_level": 0}}
        return {train: jax.jit(gradient(train), compiler_options=level) for train, level in levels.items()}

    @cached_property
    def _second(self):
        def second(params, inputs, rest, extras, cotangents, tangents):
            def gradients(params, floating):
                return self._weighted(False)(params, floating, inputs, rest, extras, cotangents)[0]

            # Forward over reverse: kernels with a backward pass of their own can be differentiated once more that way.
            return jax.jvp(gradients, (params, _floating(inputs)), tangents)[1]

        return jax.jit(second)

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters by shared names, and the losses as `loss`."""
        params, rest = self._cast(self._params, "float64"), self._rest(spec.train, "float64")
        optimizer, inputs, losses = spec.recipe.optax(), self.arrays(spec.inputs), []
        zeros = {name: jnp.zeros_like(value) for name, value in self.arrays(spec.cotangents).items()}
        target = jnp.asarray(spec.target)
        frozen = frozenset(params) - {name for entry in self.entries for name in entry.ours}

        @jax.jit
        def update(params, state, gradient):
            with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
                updates, state = optimizer.update(gradient, state, params)
                return optax.apply_updates(params, updates), state

        def kept(values):
            return {name: value for name, value in values.items() if name not in frozen}

        state = optimizer.init(kept(params))
        for words in spec.keys:
            # The gradient is compiled for other cotangents already, so it is called twice: for the error, then with it.
            extras = _extras({**spec.extras, "dropout_key": words})
            outputs, _ = self.gradient(params, inputs, rest, extras, zeros, spec.train)
            error = outputs[spec.output] - target
            fit = zeros | {spec.output: 2 * error / error.size}
            _, (gradient, _) = self.gradient(params, inputs, rest, extras, fit, spec.train)
            new, state = update(kept(params), state, kept(gradient))
            params |= dict(new)
            losses.append(float(jnp.square(error).mean()))
        return self._shared(params) | {"loss": np.array(losses)}

    def _cast(self, params, dtype: str) -> dict[str, jax.Array]:
        return {name: jnp.asarray(p, dtype if _is_floating(p) else None) for name, p in params.items()}

    def _rest(self, train: bool, dtype: str) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if _is_floating(x) else x, self._modes[train].rest)

    def _tangents(self, tangents: Arrays, params, inputs):
        own = {}
        for entry in self.entries:
            own |= entry.split(tangents[entry.theirs])
        of_params = {name: jnp.asarray(own[name]) if name in own else jnp.zeros_like(p) for name, p in params.items()}
        return of_params, {name: jnp.asarray(tangents[name]) for name in _floating(inputs)}

    def _all(self, of_params, of_inputs) -> Arrays:
        return self._shared(of_params) | float64(of_inputs)

    def _shared(self, params) -> Arrays:
        arrays = float64(params)
        return {entry.theirs: entry.join(arrays) for entry in self.entries}


def _floating(inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value for name, value in inputs.items() if _is_floating(value)}


def _is_floating(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def _extras(extras: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    kinds = {"dropout_key": jnp.uint32}
    return {name: jnp.asarray(value, kinds.get(name)) for name, value in extras.items()}
