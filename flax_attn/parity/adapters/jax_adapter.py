"""The adapter of JAX: any module or function, compiled once for each shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_attn.convert.rules import Entry
from flax_attn.parity.adapters.adapter import (
    Arrays,
    Mode,
    Result,
    RunSpec,
    dtypes,
    float64,
    is_floating,
    kept_name,
    rounding_factors,
)
from flax_attn.parity.adapters.jax_parts import take_apart
from flax_attn.parity.adapters.module_adapter import ModuleAdapter, output_of
from flax_attn.parity.adapters.quick_jit import compiled, optimized
from flax_attn.parity.adapters.rounded_sums import with_rounded_sums
from flax_attn.parity.training import TrainingSpec


def _promoting(method: Callable) -> Callable:
    """Return a method that promotes dtypes as JAX does by default, where the module needs it.

    The process may have it otherwise: a layer such as `nnx.BatchNorm` mixes dtypes in train mode.
    """

    @wraps(method)
    def promoting(self: JaxAdapter, *arguments: Any, **options: Any) -> Any:
        if not self.mixes_dtypes:
            try:
                return method(self, *arguments, **options)
            except jax.dtypes.TypePromotionError:
                self.mixes_dtypes = True
        with jax.numpy_dtype_promotion("standard"):
            return method(self, *arguments, **options)

    return promoting


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

    Attributes:
        mixes_dtypes: whether the module has failed without JAX's default promotion of dtypes.
    """

    framework = "flax"
    mixes_dtypes = False

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
        self.module, self.entries = module, list(entries)
        self.device, self._place = device, place
        self._modes = {mode: take_apart(module, mode) for mode in get_args(Mode)}
        parts = self._modes["eval"]
        self._params: dict[str, Any] = dict(parts.params)
        self._statistics: dict[str, Any] = dict(parts.statistics)
        super().__init__(parts.call, call, cached_call, positional)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics, by their own names."""
        return {name: tuple(array.shape) for name, array in self.tensors.items()}

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
            # An entry is made of parameters or of statistics, never of both.
            own = self._params if entry.ours[0] in self._params else self._statistics
            own.update(entry.split(weights[entry.theirs]))

    def built(self, mode: Mode = "eval", dtype: str = "float64") -> Any:
        """Return the module with its parameters, in a dtype."""
        return self._build(self.arrays(self._params, dtype), self._state(mode, dtype), mode)

    @property
    def tensors(self) -> dict[str, Any]:
        """The parameters and running statistics, by their own names."""
        return {**self._params, **self._statistics}

    def built_of(self, tensors: Mapping[str, jax.Array]) -> Any:
        """Return the module in eval mode with these parameters and running statistics."""
        _, rest = self._state("eval", "float64")
        return self._modes["eval"].build(tensors, rest)

    def arrays(self, arrays: Mapping[str, Any], dtype: str = "float64") -> dict[str, jax.Array]:
        """Return inputs or parameters as JAX arrays, floating ones cast."""
        return {name: self._place(name, array) for name, array in _cast(arrays, dtype).items()}

    @_promoting
    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        if self.device is None or spec.dtype == "float64":
            return self._run(spec)
        # By default a GPU or TPU multiplies float32 in fewer digits.
        with jax.default_device(self.device), jax.default_matmul_precision("highest"):
            return self._run(spec)

    @_promoting
    def traced(self, spec: RunSpec) -> tuple[Any, list[jax.Array]]:
        """Return the jaxpr of what a float64 run compiles, and the arrays that it takes."""
        arguments = self.arguments(spec)
        if spec.cotangents is None:
            run = partial(self._outputs, mode=spec.mode)
        else:
            arguments = *arguments, self.arrays(spec.cotangents)
            run = partial(self._with_gradients, mode=spec.mode)
        return jax.make_jaxpr(run)(*arguments), jax.tree.leaves(arguments)

    def _run(self, spec: RunSpec) -> Result:
        arguments = self.arguments(spec)
        if spec.cotangents is None:
            before = None if spec.before is None else self.arrays(spec.before, spec.dtype)
            outputs = self._forward(spec)(*arguments, spec.mode, spec.cached, before)
            return Result(self._named(outputs), dtypes=dtypes(outputs))
        cotangents = self.arrays(spec.cotangents, spec.dtype)
        if spec.tangents is None:
            run = self._rounded_gradients if spec.rounded_sums else self._gradients
            outputs, gradients = run(*arguments, cotangents, mode=spec.mode)
            return Result(self._named(outputs), self._all(*gradients), dtypes=dtypes(outputs))
        along = self._tangents(spec.tangents, *arguments[:2])
        second = self._second(*arguments, cotangents, along)
        return Result({}, second=self._all(*second))

    @_promoting
    def program(self, spec: RunSpec) -> Any:
        """Return the jaxpr of a compiled run; where that has run, nothing is traced again."""
        arguments = self.arguments(spec)
        if spec.cotangents is None:
            return self._compiled.trace(*arguments, spec.mode, spec.cached).jaxpr
        cotangents = self.arrays(spec.cotangents, spec.dtype)
        return self._gradients.trace(*arguments, cotangents, mode=spec.mode).jaxpr

    def arguments(self, spec: RunSpec) -> tuple[Any, Any, Any, Any]:
        """Return what a run is given: parameters, inputs, other state and extras."""
        own, inputs = self._params, spec.inputs
        if spec.rounding_seed:
            factors = rounding_factors(spec.rounding_seed, float(jnp.finfo(spec.dtype).eps))
            own = _round_stochastically(own, factors)
            inputs = _round_stochastically(inputs, factors)
        params = self.arrays(own, spec.dtype)
        state = self._state(spec.mode, spec.dtype)
        return params, self.arrays(inputs, spec.dtype), state, _extras(spec.extras)

    @_promoting
    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters by shared names, and the losses as `loss`."""
        params = self.arrays(self._params)
        state = self._state(spec.mode, "float64")
        inputs = self.arrays(spec.inputs)
        zeros = self.arrays({name: np.zeros_like(value) for name, value in spec.targets.items()})
        fit, update, optimizer_state = self._training_step(spec, params)
        keys = [_extras({**spec.extras, "dropout_key": key}) for key in spec.keys]
        moves = self._moves_state(params, inputs, state, keys[0], spec.mode)
        losses = []
        for extras in keys:
            step = self._step if moves else self._gradients
            run = partial(step, params, inputs, state, extras, mode=spec.mode)
            # One compiled program gives the outputs first, then the gradients of their loss.
            outputs, *_ = run(zeros)
            loss, cotangents = fit(outputs)
            _, (gradients, _), *left = run(cotangents)
            # The next step begins with the state that this one leaves, as in PyTorch.
            state = left[0] if moves else state
            params, optimizer_state = update(params, optimizer_state, gradients)
            losses.append(loss)
        return self._shared(params) | {"loss": np.array(losses)}

    def _moves_state(self, params, inputs, state, extras, mode: Mode) -> bool:
        """Whether a call changes what the module keeps beside its parameters."""
        if not jax.tree.leaves(state):
            return False

        def left(params, inputs, state, extras):
            return self._stepped(params, inputs, state, extras, mode)[1]

        program = jax.make_jaxpr(left)(params, inputs, state, extras).jaxpr
        return any(result not in program.invars for result in program.outvars)

    def _training_step(
        self, spec: TrainingSpec, params: Mapping[str, jax.Array]
    ) -> tuple[Callable, Callable, Any]:
        """Return the loss with its gradients, the parameter update, and the optimizer state."""
        optimizer = spec.recipe.optax()
        targets = self.arrays(spec.targets)
        # What is not shared, or is frozen in PyTorch, is not trained here either.
        shared = set().union(*(entry.ours for entry in self._trained))

        def kept(values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: value for name, value in values.items() if name in shared}

        @compiled
        def fit(outputs):
            loss = jnp.zeros(())
            cotangents = {}
            for name, target in targets.items():
                # A module may return an output in another dtype than that of the run.
                output = output_of(outputs, name).astype(target.dtype)
                error = jnp.where(jnp.isnan(target), 0.0, output - target)
                loss += jnp.square(error).mean()
                cotangents[name] = 2 * error / error.size
            return loss, cotangents

        @compiled
        def update(params, state, gradients):
            # optax raises a float to the power of an integer count.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(kept(gradients), state, kept(params))
                trained: Any = optax.apply_updates(kept(params), updates)
            return {**params, **trained}, state

        return fit, update, compiled(optimizer.init)(kept(params))

    def _build(self, params, state, mode: Mode) -> Any:
        statistics, rest = state
        return self._modes[mode].build({**params, **statistics}, rest)

    def _outputs(
        self, params, inputs, state, extras, mode: Mode, cached: bool = False, before: Any = None
    ) -> dict[str, Any]:
        return self._stepped(params, inputs, state, extras, mode, cached, before)[0]

    def _stepped(
        self, params, inputs, state, extras, mode: Mode, cached: bool = False, before: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Return the outputs of a call, and the state that it leaves.

        In the mode of statistics, those that it leaves are outputs as well.
        """
        module = self._build(params, state, mode)
        if before is not None:
            self.call(module, before, extras)
        outputs = self.call(module, inputs, extras, cached)
        of_module = self._modes[mode].state
        left = state if of_module is None else of_module(module)
        if mode == "statistics":
            outputs |= {kept_name(name): array for name, array in left[0].items()}
        return outputs, left

    def _named(self, outputs: Mapping[str, Any]) -> Arrays:
        """Return outputs, statistics that a call leaves by their shared names."""
        arrays = float64(outputs)
        returned = [own for own in self._statistics if kept_name(own) in arrays]
        kept = {own: arrays.pop(kept_name(own)) for own in returned}
        for entry in self.entries:
            if entry.ours[0] in kept:
                arrays[kept_name(entry.theirs)] = entry.join(kept)
        return arrays

    def _weighted(self, params, floating, inputs, state, extras, cotangents, mode: Mode):
        outputs, left = self._stepped(params, {**inputs, **floating}, state, extras, mode)
        total = 0
        for name, cotangent in cotangents.items():
            # A module may return an output in another dtype than that of the run.
            output = output_of(outputs, name).astype(cotangent.dtype)
            total += jnp.sum(output * cotangent)
        return total, (outputs, left)

    def _forward(self, spec: RunSpec) -> Callable:
        if spec.eager:
            return self._outputs
        return self._optimized if spec.optimized else self._compiled

    def _compile(self, function: Callable, **options: Any) -> Any:
        return compiled(function, **options)

    @cached_property
    def _compiled(self) -> Any:
        return self._compile(self._outputs, static_argnames=("mode", "cached"))

    @cached_property
    def _optimized(self) -> Callable:
        return optimized(self._outputs, static_argnames=("mode", "cached"))

    @property
    def _differentiate(self) -> Callable:
        """Gradients of parameters and of floating inputs, the outputs, and the state after them."""
        return jax.grad(self._weighted, argnums=(0, 1), has_aux=True)

    def _with_gradients(self, params, inputs, state, extras, cotangents, mode: Mode):
        """Return the outputs, and the gradients of parameters and of floating inputs."""
        outputs, found, _ = self._with_state(params, inputs, state, extras, cotangents, mode)
        return outputs, found

    def _with_state(self, params, inputs, state, extras, cotangents, mode: Mode):
        """Return outputs, gradients, and the state that the call leaves."""
        rest = inputs, state, extras, cotangents, mode
        found, (outputs, left) = self._differentiate(params, _floating(inputs), *rest)
        return outputs, found, left

    @cached_property
    def _step(self) -> Any:
        return self._compile(self._with_state, static_argnames=("mode",))

    @cached_property
    def _gradients(self) -> Any:
        return self._compile(self._with_gradients, static_argnames=("mode",))

    @cached_property
    def _rounded_gradients(self) -> Any:
        rounded = with_rounded_sums(self._with_gradients)
        return self._compile(rounded, static_argnames=("mode",))

    @cached_property
    def _second(self) -> Callable:
        def second(params, inputs, state, extras, cotangents, tangents):
            def gradients(params, floating):
                rest = inputs, state, extras, cotangents, "eval"
                return self._differentiate(params, floating, *rest)[0]

            # Forward over reverse: it also differentiates kernels with a backward pass of their
            # own.
            return jax.jvp(gradients, (params, _floating(inputs)), tangents)[1]

        return self._compile(second)

    def _state(self, mode: Mode, dtype: str) -> tuple[dict[str, jax.Array], Any]:
        def cast(x: Any) -> Any:
            return jnp.asarray(x, dtype) if _is_floating(x) else x

        return _cast(self._statistics, dtype), jax.tree.map(cast, self._modes[mode].rest)

    def _tangents(self, tangents: Arrays, params, inputs):
        own = {}
        for entry in self._trained:
            own |= entry.split(tangents[entry.theirs])
        # A parameter that is not shared does not move.
        still = {name: np.zeros(p.shape, p.dtype) for name, p in params.items()}
        along = {name: jnp.asarray(own.get(name, zero)) for name, zero in still.items()}
        return along, {name: jnp.asarray(tangents[name]) for name in _floating(inputs)}

    def _all(self, of_params, of_inputs) -> Arrays:
        return self._shared(of_params) | float64(of_inputs)

    def _shared(self, params) -> Arrays:
        arrays = float64(params)
        return {entry.theirs: entry.join(arrays) for entry in self._trained}

    @property
    def _trained(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.trainable]


def _cast(arrays: Mapping[str, Any], dtype: str) -> dict[str, jax.Array]:
    return {name: _as_jax(array, dtype) for name, array in arrays.items()}


def _as_jax(value: Any, dtype: str) -> jax.Array:
    array = np.asarray(value)
    # NumPy casts, and device_put takes what it made, without compiling a program for each shape.
    if is_floating(array):
        array = array.astype(jnp.dtype(dtype))
    return jax.device_put(array)


def _round_stochastically(arrays: Mapping[str, Any], factors: Callable) -> Arrays:
    moved = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        moved[name] = array * factors(array.shape) if is_floating(array) else array
    return moved


def _floating(inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value for name, value in inputs.items() if _is_floating(value)}


def _is_floating(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def _extras(extras: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    # A key of dropout is unsigned in both frameworks.
    kinds = {"dropout_key": np.uint32}
    return {
        name: jax.device_put(np.array(value, kinds.get(name))) for name, value in extras.items()
    }
