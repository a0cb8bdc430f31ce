"""The adapter of PyTorch: any module, or a function of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flax_attn.convert.match import torch_tree
from flax_attn.parity.adapters.adapter import (
    Arrays,
    Float32,
    PairingError,
    Result,
    RunSpec,
    Untested,
    dtypes,
    float64,
    kept_name,
    rounding_factors,
)
from flax_attn.parity.adapters.module_adapter import ModuleAdapter, check_kind, output_of
from flax_attn.parity.adapters.torch_dropout import WithoutDropout
from flax_attn.parity.adapters.torch_float32 import reading
from flax_attn.parity.adapters.torch_functions import TorchFunctions
from flax_attn.parity.adapters.torch_rounding import ONE_MORE, MoreRounding
from flax_attn.parity.adapters.torch_tensors import (
    Tensors,
    as_extras,
    as_tensors,
    cast,
    copied,
    copy_module,
    move,
    multiply,
    round_stochastically,
)
from flax_attn.parity.training import TrainingSpec

# The names of buffers that are loaded and stored like parameters.
STATISTICS = (*torch_tree.STATISTICS, "selection_bias")


class TorchAdapter(ModuleAdapter):
    """The `Adapter` of a PyTorch module, on the CPU. The module that is passed is not changed.

    Args:
        module: an `nn.Module`, or a function of tensors.
        call: function that calls the module; None is `module(*inputs)`.
        cached_call: function that computes the same in steps with a cache; None if there is none.
        positional: whether inputs are passed by position.

    Attributes:
        float32: how a call in float64 reads float32.
    """

    framework = "torch"
    float32 = Float32.AS_WRITTEN

    def __init__(
        self,
        module: Any,
        call: Callable | None = None,
        cached_call: Callable | None = None,
        positional: bool = True,
    ):
        rule = "the PyTorch module is an nn.Module or a function of tensors"
        check_kind(module, rule, {"flax": "Flax", "equinox": "Equinox"})
        self._functions = TorchFunctions()
        # Tensors that are no buffers, and have other values in float64, by module and name.
        self._attributes: dict[tuple[str, str], torch.Tensor] = {}
        self.module = module
        method = module
        if isinstance(module, torch.nn.Module):
            if call is None and type(module).forward is torch.nn.Module.forward:
                raise PairingError(
                    f"{rule}; got {type(module).__name__}, which has no forward. Define forward in"
                    " its class, or pass torch_call="
                )
            self.module = copy_module(module).double()
            method = module.forward
        super().__init__(method, call, cached_call, positional)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics; of a shared parameter once."""
        tensors = self._tensors(self.module)
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    @property
    def frozen(self) -> set[str]:
        """The parameters without gradients, which are not trained; empty if all are without."""
        parameters = self._parameters(self.module)
        frozen = {name for name, value in parameters.items() if not value.requires_grad}
        # Where all are frozen, training is compared as if none were.
        return frozen if len(frozen) < len(parameters) else set()

    @property
    def summed(self) -> dict[str, int]:
        """How many products each output of a convolution sums up, by the name of its weight.

        In all other weights, those of the last axis are summed up.
        """
        found: dict[str, int] = {}
        modules = self.module.named_modules() if isinstance(self.module, torch.nn.Module) else ()
        for path, module in modules:
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                name = f"{path}.weight" if path else "weight"
                found[name] = _summed(module)
        return found

    def weights(self) -> Arrays:
        """Return parameters and running statistics in float64."""
        return float64(self._tensors(self.module))

    def load(self, weights: Arrays) -> None:
        """Set parameters and running statistics."""
        with torch.no_grad():
            for name, tensor in self._tensors(self.module).items():
                # In NumPy a number stays one: ascontiguousarray would give it an axis.
                array = np.asarray(weights[name], order="C")
                tensor.copy_(torch.from_numpy(array))

    def copied_module(self) -> Any:
        """Return a copy of the module, for a run of its own."""
        return copy_module(self.module)

    @property
    def constants(self) -> list[np.ndarray]:
        """What the module holds beside parameters and running statistics."""
        return [tensor.numpy(force=True) for _, tensor in self._constants()]

    def set_constant(self, before: np.ndarray, after: np.ndarray) -> str:
        """Give all constants with some values other ones; return the name of one, or ""."""
        names = []
        for name, tensor in list(self._constants()):
            if not np.array_equal(tensor.numpy(force=True), before):
                continue
            names.append(name)
            path, _, own = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if own not in owner._buffers:
                # What is no buffer is not cast, and keeps its numbers in other runs.
                self._attributes[path, own] = tensor
            setattr(owner, own, torch.tensor(after))
        return names[0] if names else ""

    def _constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers and other tensors that are no parameters and no running statistics."""
        if not isinstance(self.module, torch.nn.Module):
            return
        for path, module in self.module.named_modules():
            tensors = {**module._buffers, **vars(module)}
            for own, value in tensors.items():
                name = f"{path}.{own}" if path else own
                is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
                if is_tensor and name not in self.shapes:
                    yield name, value

    def arrays(self, arrays: Mapping[str, np.ndarray], dtype: str = "float64") -> Tensors:
        """Return inputs as tensors, floating ones cast."""
        return as_tensors(arrays, dtype)

    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        module = self._prepared(spec)
        inputs = self.arrays(spec.inputs)
        if spec.rounding_seed:
            round_stochastically([*self._parameters(module).values(), *inputs.values()], spec)
        kind = getattr(torch, spec.dtype)
        if isinstance(module, torch.nn.Module):
            module = module.to(kind)
        inputs = cast(inputs, kind)
        if spec.step:
            move(self._parameters(module) | inputs, spec)
        if spec.cotangents is not None:
            for tensor in _floating(inputs).values():
                tensor.requires_grad_(True)
        with ExitStack() as stack:
            for context in _contexts(spec):
                stack.enter_context(context)
            if spec.dtype != "float64":
                stack.enter_context(self._as_written())
            outputs = self._outputs(module, inputs, spec)
            if spec.cotangents is None:
                return Result(float64(outputs), dtypes=dtypes(outputs))
            return self._gradients(module, inputs, outputs, spec)

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        kept = self.float32
        self.float32 = Float32.AS_WRITTEN
        try:
            yield
        finally:
            self.float32 = kept

    def _outputs(self, module: Any, inputs: Tensors, spec: RunSpec) -> Tensors:
        random = torch.get_rng_state()
        extras = as_extras(spec.extras)
        if spec.before is not None:
            before = self.arrays(spec.before, spec.dtype)
            self.call(module, before, extras)
        outputs = self.call(module, copied(inputs), extras, spec.cached)
        if spec.mode == "statistics":
            _check_mode(module, random)
            outputs |= self._kept(module)
        return outputs

    def _gradients(self, module: Any, inputs: Tensors, outputs: Tensors, spec: RunSpec) -> Result:
        total = _total(outputs, self.arrays(spec.cotangents or {}, spec.dtype))
        leaves = self._trained(module) | _floating(inputs)
        if spec.tangents is None or spec.step:
            gradients = _differentiated(total, leaves)
            return Result(float64(outputs), float64(gradients), dtypes=dtypes(outputs))
        return Result({}, second=_second(total, leaves, spec.tangents))

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters, and the losses as `loss`."""
        module = self._prepared(spec)
        trained = self._trained(module)
        parameters = trained.values()
        recipe = spec.recipe
        factors = rounding_factors(spec.rounding_seed, ONE_MORE)
        optimizer, schedule = recipe.torch(parameters)
        inputs = self.arrays(spec.inputs)
        targets = self.arrays(spec.targets)
        losses = []
        for key in spec.keys:
            given = {**spec.extras, "dropout_key": key}
            extras = as_extras(given)
            own = copied(inputs)
            outputs = self.call(module, own, extras)
            loss = _loss(outputs, targets)
            losses.append(loss.item())
            _set_gradients(loss, trained)
            recipe.clip(parameters)
            optimizer.step()
            schedule.step()
            if spec.rounding_seed:
                multiply(parameters, factors)
        learned = float64(trained)
        found = {"loss": np.array(losses)}
        return learned | found

    def call(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the outputs by name.

        Raises:
            PairingError: if one is no tensor.
        """
        with reading(self.float32):
            outputs = super().call(*arguments, **options)
        for name, output in outputs.items():
            if not isinstance(output, torch.Tensor):
                raise PairingError(
                    f"the outputs of the PyTorch module are tensors; {name} is a"
                    f" {type(output).__name__}. Pass torch_call= that returns tensors, or leaves"
                    " it out"
                )
        return outputs

    def _prepared(self, spec: RunSpec | TrainingSpec) -> Any:
        self._functions.check()
        if not isinstance(self.module, torch.nn.Module):
            return self.module
        # Each run has its own copy: it may change buffers, and is cast.
        module = self.copied_module()
        module.train(spec.mode != "eval")
        if getattr(spec, "dtype", "float64") != "float64":
            for (path, name), value in self._attributes.items():
                setattr(module.get_submodule(path), name, value)
        return module if self.frozen else module.requires_grad_(True)

    @staticmethod
    def _parameters(module: Any) -> dict[str, torch.nn.Parameter]:
        return dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}

    @classmethod
    def _trained(cls, module: Any) -> dict[str, torch.Tensor]:
        parameters = cls._parameters(module)
        return {name: value for name, value in parameters.items() if value.requires_grad}

    @classmethod
    def _kept(cls, module: Any) -> dict[str, torch.Tensor]:
        """Return the running statistics by the names of outputs."""
        own = cls._parameters(module)
        tensors = cls._tensors(module)
        return {kept_name(name): tensors[name] for name in tensors if name not in own}

    @classmethod
    def _tensors(cls, module: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {**cls._parameters(module)}
        buffers = module.named_buffers() if isinstance(module, torch.nn.Module) else ()
        for name, buffer in buffers:
            # Running statistics: of BatchNorm, of other norms that keep them, and of routers.
            if name.rpartition(".")[2] in STATISTICS:
                tensors[name] = buffer
        return tensors


def _summed(convolution: Any) -> int:
    """Return how many products each output of a convolution sums up, at most."""
    inputs = convolution.in_channels // convolution.groups
    taps = math.prod(convolution.kernel_size)
    if convolution.transposed:
        # Of the taps of a kernel, one in each stride meets an output.
        taps = max(1, taps // math.prod(convolution.stride))
    return inputs * taps


def _check_mode(module: Any, random: torch.Tensor) -> None:
    """Raise where a call cannot be compared in train mode without dropout."""
    if isinstance(module, torch.nn.Module) and not module.training:
        raise Untested("the call of PyTorch leaves train mode by itself")
    if not torch.equal(torch.get_rng_state(), random):
        raise Untested("PyTorch draws random numbers in train mode beside those of dropout")


def _set_gradients(loss: torch.Tensor, trained: Tensors) -> None:
    # 0 where there is none: the optimizer would skip None, and optax decays such weights.
    for name, gradient in _differentiated(loss, trained).items():
        trained[name].grad = gradient


def _loss(outputs: Mapping[str, torch.Tensor], targets: Tensors) -> torch.Tensor:
    """Return the sum of the mean squared errors, of elements whose target is not NaN."""
    losses = []
    for name, target in targets.items():
        error = output_of(outputs, name, target.shape) - target
        known = error.masked_fill(target.isnan(), 0)
        losses.append(known.square().mean())
    return torch.stack(losses).sum()


def _total(outputs: Mapping[str, torch.Tensor], cotangents: Tensors) -> torch.Tensor:
    """Return the sum of the products of outputs and cotangents."""
    terms = []
    for name, cotangent in cotangents.items():
        output = output_of(outputs, name, cotangent.shape)
        # A module may return an output in another dtype than that of the run.
        products = output * cotangent.to(output.dtype)
        terms.append(products.sum())
    return torch.stack(terms).sum()


def _floating(inputs: Tensors) -> Tensors:
    return {name: x for name, x in inputs.items() if x.is_floating_point()}


def _second(total: torch.Tensor, leaves: Tensors, tangents: Arrays) -> Arrays:
    gradients = _differentiated(total, leaves, create_graph=True)
    slope = _slope(gradients, tangents)
    return float64(_differentiated(slope, leaves))


def _slope(gradients: Mapping[str, torch.Tensor], tangents: Arrays) -> torch.Tensor:
    """Return the sum of the products of gradients and tangents."""
    # A number to begin with: no gradient may depend on any of the leaves.
    total = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for name, gradient in gradients.items():
        if name in tangents and gradient.requires_grad:
            total = total + (gradient * torch.tensor(tangents[name])).sum()
    return total


def _differentiated(
    total: torch.Tensor, leaves: Mapping[str, torch.Tensor], create_graph: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradients by name, 0 where the total does not depend on any leaf."""
    if not leaves or not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    # What the total does not depend on has a gradient of 0, not None.
    found = torch.autograd.grad(
        total, [*leaves.values()], create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def _contexts(spec: RunSpec) -> Iterator[AbstractContextManager]:
    """Yield what a run takes place in, the outermost first."""
    # In train mode a module may draw from the stream of the process, which stays as it is.
    yield torch.random.fork_rng(devices=[], enabled=spec.mode != "eval")
    yield torch.set_grad_enabled(spec.cotangents is not None)
    if spec.tangents is not None:
        # The fused attention of torch has no second derivative; its plain formula has.
        yield sdpa_kernel(SDPBackend.MATH)
    if spec.rounding_seed and spec.dtype == "float64":
        yield MoreRounding(spec.rounding_seed)
    if spec.mode == "statistics":
        yield WithoutDropout()
