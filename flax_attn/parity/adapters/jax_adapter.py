"""The adapter of JAX: any module or function, compiled once for each shape and dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.convert.entry import Entry
from flax_attn.parity.adapters.adapter import (
    Arrays,
    Float32,
    Mode,
    Result,
    RunSpec,
    dtypes,
    float64,
    kept_name,
    rounding_factors,
)
from flax_attn.parity.adapters.jax_arrays import (
    JaxArrays,
    as_extras,
    cast,
    cast_tree,
    floating,
    is_floating_in_jax,
    round_stochastically,
    zeros_like,
)
from flax_attn.parity.adapters.jax_float32 import named_float32_as_float64
from flax_attn.parity.adapters.jax_parts import Parts, take_apart
from flax_attn.parity.adapters.jax_programs import Programs
from flax_attn.parity.adapters.jax_training import Training
from flax_attn.parity.adapters.module_adapter import ModuleAdapter
from flax_attn.parity.training import TrainingSpec

# A function of the name of an array and the array, which puts it where it belongs.
Placed = Callable[[str, jax.Array], jax.Array]


def _promoting(method: Callable) -> Callable:
    """Return a method that promotes dtypes as JAX does by default, where the module needs it.

    The process may have it otherwise: a layer such as `nnx.BatchNorm` mixes dtypes in train mode.
    """

    @wraps(method)
    def promoting(self: JaxAdapter, *arguments: Any, **options: Any) -> Any:
        if not self.mixes_dtypes:
            # Most modules run as the process has it, and one that fails does so at once.
            with suppress(jax.dtypes.TypePromotionError):
                return method(self, *arguments, **options)
            self.mixes_dtypes = True
        with jax.numpy_dtype_promotion("standard"):
            return method(self, *arguments, **options)

    return promoting


def _in_each_mode(module: Any) -> dict[Mode, Parts]:
    return {mode: take_apart(module, mode) for mode in get_args(Mode)}


def _cuts(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the whole entry of each parameter that is compared in pieces."""
    cuts = {}
    for entry in entries:
        if entry.whole is not None:
            cuts |= dict.fromkeys(entry.whole.ours, entry.whole)
    return cuts


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _any_float64(*trees: Any) -> bool:
    return any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(trees))


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
        float32: how a run in float64 reads float32.
    """

    framework = "flax"
    mixes_dtypes = False
    float32 = Float32.AS_WRITTEN

    def __init__(
        self,
        module: Any,
        call: Callable | None = None,
        cached_call: Callable | None = None,
        positional: bool = True,
        entries: Sequence[Entry] = (),
        device: Any = None,
        place: Placed = lambda name, array: array,
    ):
        self.module = module
        self.device = device
        self._place = place
        self._whole = _in_each_mode(module)
        self.share(entries)
        super().__init__(self._whole["eval"].call, call, cached_call, positional)

    def share(self, entries: Sequence[Entry]) -> None:
        """Take the pairs of parameters; those that are stored in pieces become their pieces."""
        self.entries = list(entries)
        self._cut()
        # Compiled programs put the pieces together as they were cut before.
        self.programs = Programs(self._stepped)
        parts = self._modes["eval"]
        # Copies: weights are loaded into them, and the module stays as it is.
        self._params: dict[str, Any] = dict(parts.params)
        self._statistics: dict[str, Any] = dict(parts.statistics)

    def _cut(self) -> None:
        cuts = _cuts(self.entries)
        self._modes = {mode: parts.cut(cuts) for mode, parts in self._whole.items()}

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics, none in pieces."""
        parts = self._whole["eval"]
        return _shapes({**parts.params, **parts.statistics})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics, by their own names."""
        return _shapes(self.tensors)

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
            split = entry.split(weights[entry.theirs])
            own.update(split)

    def calling(self, module: Any) -> JaxAdapter:
        """Return an adapter that calls another module, of the same parameters, in the same way."""
        other = copy.copy(self)
        other.module = module
        other.programs = Programs(other._stepped)
        other._whole = _in_each_mode(module)
        other._cut()
        return other

    def reading(self, float32: Float32) -> JaxAdapter:
        """Return an adapter of the same module whose runs in float64 read float32 in this way."""
        other = copy.copy(self)
        other.float32 = float32
        other.programs = Programs(other._stepped)
        return other

    @_promoting
    def makes_float32(self, spec: RunSpec) -> bool:
        """Whether a run in float64 computes something in float32."""
        trace = jax.make_jaxpr(partial(self.programs.outputs, mode=spec.mode))
        program = trace(*self.arguments(spec))
        return "f32[" in str(program)

    def built(self, mode: Mode = "eval", dtype: str = "float64") -> Any:
        """Return the module with its parameters, in a dtype."""
        params = self.arrays(self._params, dtype)
        return self._build(params, self._state(mode, dtype), mode)

    @property
    def constants(self) -> list[np.ndarray]:
        """What the module holds beside parameters and running statistics."""
        leaves = jax.tree.leaves(self._modes["eval"].rest)
        return [np.asarray(leaf) for leaf in leaves if is_floating_in_jax(leaf)]

    def set_constant(self, before: np.ndarray, after: np.ndarray) -> str:
        """Give all constants with some values other ones; return the name of one, or ""."""
        names = []

        def replaced(path: Any, leaf: Any) -> Any:
            if not is_floating_in_jax(leaf) or not np.array_equal(np.asarray(leaf), before):
                return leaf
            names.append(jax.tree_util.keystr(path, simple=True, separator="."))
            return jax.device_put(after)

        for mode, parts in self._whole.items():
            rest = jax.tree_util.tree_map_with_path(replaced, parts.rest)
            self._whole[mode] = parts._replace(rest=rest)
            self._modes[mode] = self._modes[mode]._replace(rest=rest)
        return names[0].removesuffix(".value") if names else ""

    @property
    def tensors(self) -> dict[str, Any]:
        """The parameters and running statistics, by their own names."""
        return {**self._params, **self._statistics}

    def built_of(self, tensors: Mapping[str, jax.Array]) -> Any:
        """Return the module in eval mode with these parameters and running statistics."""
        _, rest = self._state("eval", "float64")
        return self._modes["eval"].build(tensors, rest)

    def arrays(self, arrays: Mapping[str, Any], dtype: str = "float64") -> JaxArrays:
        """Return inputs or parameters as JAX arrays, floating ones cast."""
        found = cast(arrays, dtype)
        return {name: self._place(name, array) for name, array in found.items()}

    @_promoting
    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        if spec.dtype == "float64":
            return self._run(spec)
        if self.device is None:
            return self._run_lower(spec)
        # By default a GPU or TPU multiplies float32 in fewer digits.
        with jax.default_device(self.device), jax.default_matmul_precision("highest"):
            return self._run_lower(spec)

    @_promoting
    def begin(self, spec: RunSpec) -> None:
        """Begin to compile what `run` calls, beside what runs until then."""
        if spec.dtype == "float64" or self.device is None:
            program, arguments, options = self._call(spec)
            program.begin(*arguments, **options)

    def _run_lower(self, spec: RunSpec) -> Result:
        """Run once in a lower dtype, without float64 where the call does not take it beside that.

        With x64 enabled, what names no dtype is float64, which attention refuses beside float32.
        """
        try:
            return self._run(spec)
        except (TypeError, ValueError):
            with suppress(Exception), jax.enable_x64(False):
                return self._run(spec)
            raise

    @_promoting
    def traced(self, spec: RunSpec) -> tuple[Any, list[jax.Array]]:
        """Return the jaxpr of what a float64 run compiles, and the arrays that it takes."""
        programs, arguments = self.programs, self._with_cotangents(spec)
        function = programs.outputs if spec.cotangents is None else programs.gradients
        # The mode is of Python and no array.
        trace = jax.make_jaxpr(partial(function, mode=spec.mode))
        return trace(*arguments), jax.tree.leaves(arguments)

    @_promoting
    def program(self, spec: RunSpec) -> Any:
        """Return the jaxpr of a compiled run; where that has run, nothing is traced again."""
        arguments = self._with_cotangents(spec)
        if spec.cotangents is None:
            options = {"mode": spec.mode, "cached": spec.cached, "before": None}
            return self.programs.compiled_outputs.trace(*arguments, **options).jaxpr
        return self.programs.compiled_gradients.trace(*arguments, mode=spec.mode).jaxpr

    def arguments(self, spec: RunSpec) -> tuple[Any, Any, Any, Any]:
        """Return what a run is given: parameters, inputs, other state and extras."""
        own, given = self._rounded(spec) if spec.rounding_seed else (self._params, spec.inputs)
        params = self.arrays(own, spec.dtype)
        inputs = self.arrays(given, spec.dtype)
        state = self._state(spec.mode, spec.dtype)
        return params, inputs, state, self._taken(spec.extras)

    def _taken(self, extras: Mapping[str, Any]) -> JaxArrays:
        """Return the extras that a call takes: one that it does not take is another program."""
        known = frozenset().union(*(call.accepts for call in self._calls.values()))
        return as_extras({name: value for name, value in extras.items() if name in known})

    def _with_cotangents(self, spec: RunSpec) -> tuple[Any, ...]:
        """Return what a run is given, and the cotangents, if it computes gradients."""
        arguments = self.arguments(spec)
        if spec.cotangents is None:
            return arguments
        return *arguments, self.arrays(spec.cotangents, spec.dtype)

    def _rounded(self, spec: RunSpec) -> tuple[Arrays, Arrays]:
        """Return parameters and inputs that are rounded up or down at random."""
        eps = float(jnp.finfo(spec.dtype).eps)
        # One stream for both: parameters and inputs are not rounded alike.
        factors = rounding_factors(spec.rounding_seed, eps)
        params = round_stochastically(self._params, factors)
        return params, round_stochastically(spec.inputs, factors)

    @_promoting
    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters by shared names, and the losses as `loss`."""
        # What is not shared, or is frozen in PyTorch, is not trained here either.
        names = set().union(*(entry.ours for entry in self._trained))
        training = Training(self.programs, spec, self.arrays(spec.targets), names)
        state = self._state(spec.mode, "float64")
        start, inputs = self.arrays(self._params), self.arrays(spec.inputs)
        extras = [self._taken({**spec.extras, "dropout_key": key}) for key in spec.keys]
        params, losses = training.run(start, inputs, state, extras)
        return self._shared(params) | {"loss": np.array(losses)}

    def _run(self, spec: RunSpec) -> Result:
        program, arguments, options = self._call(spec)
        found = program(*arguments, **options)
        if spec.cotangents is None:
            return Result(self._named(found), dtypes=dtypes(found))
        if spec.tangents is not None:
            return Result({}, second=self._all(*found))
        outputs, gradients = found
        return Result(self._named(outputs), self._all(*gradients), dtypes=dtypes(outputs))

    def _call(self, spec: RunSpec) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the program of a run, what it is given, and its options."""
        arguments = self._with_cotangents(spec)
        if spec.cotangents is None:
            before = None
            if spec.before is not None:
                before = self.arrays(spec.before, spec.dtype)
            options = {"mode": spec.mode, "cached": spec.cached, "before": before}
            return self.programs.forward(spec), arguments, options
        if spec.tangents is None:
            return self.programs.backward(spec), arguments, {"mode": spec.mode}
        params, inputs, *_ = arguments
        along = self._tangents(spec.tangents, params, inputs)
        return self.programs.second, (*arguments, along), {}

    def _build(self, params, state, mode: Mode) -> Any:
        statistics, rest = state
        return self._modes[mode].build({**params, **statistics}, rest)

    def _stepped(
        self, params, inputs, state, extras, mode: Mode, cached: bool = False, before: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Return the outputs of a call, and the state that it leaves."""
        module = self._build(params, state, mode)
        with self.read_as(module) if _any_float64(params, inputs) else nullcontext():
            return self._called(module, inputs, state, extras, mode, cached, before)

    def read_as(self, module: Any) -> AbstractContextManager[None]:
        """Return the context of a call in float64, in which float32 is read as chosen."""
        if self.float32 is Float32.AS_WRITTEN:
            return nullcontext()
        call = self._calls[False].function
        parts = (module, call) if self.float32 is Float32.NAMED else ()
        return named_float32_as_float64(*parts)

    def _called(
        self,
        module: Any,
        inputs,
        state,
        extras,
        mode: Mode,
        cached: bool,
        before: Any,
    ) -> tuple[dict[str, Any], Any]:
        # In the mode of statistics, those that the call leaves are outputs as well.
        if before is not None:
            self.call(module, before, extras)
        outputs = self.call(module, inputs, extras, cached)
        of_module = self._modes[mode].state
        left = state if of_module is None else of_module(module)
        if mode == "statistics":
            statistics, _ = left
            outputs |= {kept_name(name): array for name, array in statistics.items()}
        return outputs, left

    def _named(self, outputs: Mapping[str, Any]) -> Arrays:
        """Return outputs, statistics that a call leaves by their shared names."""
        arrays = float64(outputs)
        # Outputs of another mode hold none.
        names = [name for name in self._statistics if kept_name(name) in arrays]
        kept = {name: arrays.pop(kept_name(name)) for name in names}
        entries = [entry for entry in self.entries if entry.ours[0] in kept]
        return arrays | {kept_name(entry.theirs): entry.join(kept) for entry in entries}

    def _state(self, mode: Mode, dtype: str) -> tuple[JaxArrays, Any]:
        return cast(self._statistics, dtype), cast_tree(self._modes[mode].rest, dtype)

    def _tangents(
        self, tangents: Arrays, params: JaxArrays, inputs: JaxArrays
    ) -> tuple[JaxArrays, JaxArrays]:
        """Return the tangents of parameters by our names, and of the inputs."""
        # A parameter that is not shared does not move.
        of_params = jax.tree.map(zeros_like, params)
        for entry in self._trained:
            moved = entry.split(tangents[entry.theirs])
            of_params |= jax.tree.map(jnp.asarray, moved)
        of_inputs = {name: jnp.asarray(tangents[name]) for name in floating(inputs)}
        return of_params, of_inputs

    def _all(self, of_params: JaxArrays, of_inputs: JaxArrays) -> Arrays:
        return self._shared(of_params) | float64(of_inputs)

    def _shared(self, params: JaxArrays) -> Arrays:
        arrays = float64(params)
        return {entry.theirs: entry.join(arrays) for entry in self._trained}

    @property
    def _trained(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.trainable]
