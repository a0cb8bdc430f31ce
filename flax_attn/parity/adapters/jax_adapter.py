"""The adapter of JAX: any module or function, compiled once for each shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_attn.convert.rules import Entry
from flax_attn.parity.adapters.adapter import (
    Arrays,
    ModuleAdapter,
    Result,
    RunSpec,
    dtypes,
    float64,
    is_floating,
    output_of,
)
from flax_attn.parity.adapters.jax_parts import take_apart
from flax_attn.parity.training import TrainingSpec

# Each program runs a few times on small arrays, so nearly all of the time is spent in compiling it.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_FEWER_KERNELS = {"xla_cpu_use_fusion_emitters": False}  # known to some versions of XLA alone


class JaxAdapter(ModuleAdapter):
    """The `Adapter` of a JAX module. JAX must have x64 enabled where it is used.

    Args:
        module: an NNX module, a bound Linen module, an Equinox module or a function of arrays.
        call: function that calls the module; None is `module(*inputs)`.
        cached_call: function that computes the same in steps with a cache; None if there is none.
        positional: whether inputs are passed by position.
        entries: pairs of parameters with the other framework; empty where none are shared.
        device: device that runs the dtypes below float64, with products in full precision; None is
            the CPU.
        place: function that takes the name and the array of a parameter or input, and returns the
            array placed on a mesh.
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
        place: Callable[[str, jax.Array], jax.Array] = lambda name, array: array,
    ):
        self.module, self.entries, self.device, self._place = module, list(entries), device, place
        self._modes = {train: take_apart(module, train) for train in (False, True)}
        self._params, self._statistics = (
            dict(self._modes[False].params),
            dict(self._modes[False].statistics),
        )
        super().__init__(self._modes[False].call, call, cached_call, positional)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics, by their own names."""
        return {
            name: tuple(array.shape) for name, array in {**self._params, **self._statistics}.items()
        }

    @property
    def statistics(self) -> list[str]:
        """The names of the running statistics."""
        return list(self._statistics)

    def weights(self) -> Arrays:
        """Return parameters and running statistics in float64, by shared names."""
        arrays = float64({**self._params, **self._statistics})
        return {entry.theirs: entry.join(arrays) for entry in self.entries}

    def load(self, weights: Arrays) -> None:
        """Set parameters and running statistics, by shared names."""
        for entry in self.entries:
            own = self._params if entry.ours[0] in self._params else self._statistics
            own |= {
                name: np.asarray(array)
                for name, array in entry.split(weights[entry.theirs]).items()
            }

    def built(self, train: bool = False, dtype: str = "float64") -> Any:
        """Return the module with its parameters, in a dtype."""
        return self._build(self.arrays(self._params, dtype), self._state(train, dtype), train)

    def arrays(self, arrays: Mapping[str, Any], dtype: str = "float64") -> dict[str, jax.Array]:
        """Return inputs or parameters as JAX arrays, floating ones cast."""
        return {name: self._place(name, array) for name, array in _cast(arrays, dtype).items()}

    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        if self.device is None or spec.dtype == "float64":
            return self._run(spec)
        with jax.default_device(self.device), jax.default_matmul_precision("highest"):
            return self._run(spec)

    def _run(self, spec: RunSpec) -> Result:
        own, inputs = self._params, spec.inputs
        if spec.rounding_seed:
            own, inputs = _round_stochastically(own, inputs, spec)
        params, state = self.arrays(own, spec.dtype), self._state(spec.train, spec.dtype)
        inputs, extras = self.arrays(inputs, spec.dtype), _extras(spec.extras)
        if spec.cotangents is None:
            run = self._outputs if spec.eager else self._forward
            outputs = run(params, inputs, state, extras, spec.train, spec.cached)
            return Result(float64(outputs), dtypes=dtypes(outputs))
        cotangents = self.arrays(spec.cotangents, spec.dtype)
        if spec.tangents is None:
            outputs, gradients = self._gradients(
                params, inputs, state, extras, cotangents, train=spec.train
            )
            return Result(float64(outputs), self._all(*gradients), dtypes=dtypes(outputs))
        along = self._tangents(spec.tangents, params, inputs)
        return Result(
            {}, second=self._all(*self._second(params, inputs, state, extras, cotangents, along))
        )

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters by shared names, and the losses as `loss`."""
        params, state = self.arrays(self._params), self._state(spec.train, "float64")
        inputs, losses = self.arrays(spec.inputs), []
        fit, update, optimizer_state = self._training_step(spec, params)
        zeros = self.arrays({name: np.zeros_like(value) for name, value in spec.cotangents.items()})
        for key in spec.keys:
            extras = _extras({**spec.extras, "dropout_key": key})
            run = partial(self._gradients, params, inputs, state, extras, train=spec.train)
            loss, cotangent = fit(run(zeros)[0][spec.output])
            _, (gradients, _) = run({**zeros, spec.output: cotangent})
            params, optimizer_state = update(params, optimizer_state, gradients)
            losses.append(loss)
        return self._shared(params) | {"loss": np.array(losses)}

    def _training_step(
        self, spec: TrainingSpec, params: Mapping[str, jax.Array]
    ) -> tuple[Callable, Callable, Any]:
        """Return the loss with its gradient, the parameter update, and the optimizer state."""
        optimizer, target = spec.recipe.optax(), jnp.asarray(spec.target)
        shared = {name for entry in self.entries if entry.trainable for name in entry.ours}

        def kept(values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: value for name, value in values.items() if name in shared}

        @_compiled
        def fit(output):
            error = output - target
            return jnp.square(error).mean(), 2 * error / error.size

        @_compiled
        def update(params, state, gradients):
            with jax.numpy_dtype_promotion(
                "standard"
            ):  # optax raises a float to the power of an integer count
                updates, state = optimizer.update(kept(gradients), state, kept(params))
                trained: Any = optax.apply_updates(kept(params), updates)
                return {**params, **trained}, state

        return fit, update, _compiled(optimizer.init)(kept(params))

    def _build(self, params, state, train: bool) -> Any:
        statistics, rest = state
        return self._modes[train].build({**params, **statistics}, rest)

    def _outputs(
        self, params, inputs, state, extras, train: bool, cached: bool = False
    ) -> dict[str, Any]:
        return self.call(self._build(params, state, train), inputs, extras, cached)

    def _weighted(self, params, floating, inputs, state, extras, cotangents, train: bool):
        outputs = self._outputs(params, {**inputs, **floating}, state, extras, train)
        terms = (
            jnp.sum(output_of(outputs, name).astype(c.dtype) * c) for name, c in cotangents.items()
        )
        return sum(terms), outputs

    @cached_property
    def _forward(self) -> Callable:
        return _compiled(self._outputs, static_argnames=("train", "cached"))

    @cached_property
    def _gradients(self) -> Callable:
        """Outputs, and gradients of parameters and of floating inputs."""

        def gradients(params, inputs, state, extras, cotangents, train):
            differentiate = jax.grad(self._weighted, argnums=(0, 1), has_aux=True)
            found, outputs = differentiate(
                params, _floating(inputs), inputs, state, extras, cotangents, train
            )
            return outputs, found

        return _compiled(gradients, static_argnames=("train",))

    @cached_property
    def _second(self) -> Callable:
        def second(params, inputs, state, extras, cotangents, tangents):
            def gradients(params, floating):
                differentiate = jax.grad(self._weighted, argnums=(0, 1), has_aux=True)
                return differentiate(params, floating, inputs, state, extras, cotangents, False)[0]

            # Forward over reverse: it also differentiates kernels with a backward pass of their
            # own.
            return jax.jvp(gradients, (params, _floating(inputs)), tangents)[1]

        return _compiled(second)

    def _state(self, train: bool, dtype: str) -> tuple[dict[str, jax.Array], Any]:
        return _cast(self._statistics, dtype), jax.tree.map(
            lambda x: jnp.asarray(x, dtype) if _is_floating(x) else x, self._modes[train].rest
        )

    def _tangents(self, tangents: Arrays, params, inputs):
        own = {}
        for entry in (entry for entry in self.entries if entry.trainable):
            own |= entry.split(tangents[entry.theirs])
        of_params = {
            name: jnp.asarray(own.get(name, np.zeros(p.shape, p.dtype)))
            for name, p in params.items()
        }
        return of_params, {name: jnp.asarray(tangents[name]) for name in _floating(inputs)}

    def _all(self, of_params, of_inputs) -> Arrays:
        return self._shared(of_params) | float64(of_inputs)

    def _shared(self, params) -> Arrays:
        arrays = float64(params)
        return {entry.theirs: entry.join(arrays) for entry in self.entries if entry.trainable}


def _compiled(function: Callable, **options: Any) -> Callable:
    """Return `jax.jit(function)`, compiled quickly on a CPU."""
    on_cpu = jax.jit(function, compiler_options=_compiler_options(), **options)
    anywhere = jax.jit(function, **options)

    def run(*arguments: Any, **keywords: Any) -> Any:
        device = jax.config.values["jax_default_device"]
        return (on_cpu if device is None or device.platform == "cpu" else anywhere)(
            *arguments, **keywords
        )

    return run


@cache
def _compiler_options() -> dict[str, Any]:
    options = {**_QUICK_TO_COMPILE, **_FEWER_KERNELS}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:  # this version of XLA has no such option
        return _QUICK_TO_COMPILE
    return options


def _cast(arrays: Mapping[str, Any], dtype: str) -> dict[str, jax.Array]:
    # NumPy casts, and device_put takes what it made, without compiling a program for each shape.
    found = {}
    for name, given in arrays.items():
        array = np.asarray(given)
        cast = array.astype(jnp.dtype(dtype) if is_floating(array) else array.dtype)
        found[name] = jax.device_put(cast)
    return found


def _round_stochastically(params: Mapping[str, Any], inputs: Arrays, spec: RunSpec) -> list[Arrays]:
    # Each number moves by up to half a rounding, so that the cast that follows rounds it up or down
    # at random.
    random, eps = np.random.default_rng(spec.rounding_seed), float(jnp.finfo(spec.dtype).eps)

    def moved(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return (
            array * (1 + eps * random.uniform(-0.5, 0.5, array.shape))
            if is_floating(array)
            else array
        )

    return [{name: moved(array) for name, array in arrays.items()} for arrays in (params, inputs)]


def _floating(inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value for name, value in inputs.items() if _is_floating(value)}


def _is_floating(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def _extras(extras: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    kinds = {"dropout_key": np.uint32}
    return {
        name: jax.device_put(np.array(value, kinds.get(name))) for name, value in extras.items()
    }
