"""The adapter of PyTorch: any module, or a function of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flax_attn.parity.adapters.adapter import (
    Arrays,
    ModuleAdapter,
    PairingError,
    Result,
    RunSpec,
    check_kind,
    dtypes,
    float64,
    is_floating,
    output_of,
)
from flax_attn.parity.training import TrainingSpec

STATISTICS = ("running_mean", "running_var", "selection_bias")


class TorchAdapter(ModuleAdapter):
    """The `Adapter` of a PyTorch module, on the CPU. The module that is passed is not changed.

    Args:
        module: an `nn.Module`, or a function of tensors.
        call: function that calls the module; None is `module(*inputs)`.
        cached_call: function that computes the same in steps with a cache; None if there is none.
        positional: whether inputs are passed by position.
    """

    framework = "torch"

    def __init__(
        self,
        module: Any,
        call: Callable | None = None,
        cached_call: Callable | None = None,
        positional: bool = True,
    ):
        rule = "the PyTorch module is an nn.Module or a function of tensors"
        check_kind(module, rule, {"flax": "Flax", "equinox": "Equinox"})
        self.module = (
            copy.deepcopy(module).double() if isinstance(module, torch.nn.Module) else module
        )
        method = module.forward if isinstance(module, torch.nn.Module) else module
        super().__init__(method, call, cached_call, positional)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and running statistics; of a shared parameter once."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors(self.module).items()}

    @property
    def frozen(self) -> set[str]:
        """The parameters without gradients, which are not trained; empty if all are without."""
        found = {
            name
            for name, parameter in self._parameters(self.module).items()
            if not parameter.requires_grad
        }
        return found if len(found) < len(self._parameters(self.module)) else set()

    def weights(self) -> Arrays:
        """Return parameters and running statistics in float64."""
        return float64(self._tensors(self.module))

    def load(self, weights: Arrays) -> None:
        """Set parameters and running statistics."""
        with torch.no_grad():
            for name, tensor in self._tensors(self.module).items():
                tensor.copy_(
                    torch.from_numpy(np.asarray(weights[name], order="C"))
                )  # a number stays one

    def arrays(
        self, arrays: Mapping[str, np.ndarray], dtype: str = "float64"
    ) -> dict[str, torch.Tensor]:
        """Return inputs as tensors, floating ones cast."""
        kind = getattr(torch, dtype)
        return {
            name: torch.tensor(a, dtype=kind if is_floating(a) else None)
            for name, a in arrays.items()
        }

    def run(self, spec: RunSpec) -> Result:
        """Run once."""
        module, differentiate = self._prepared(spec), spec.cotangents is not None
        inputs = self.arrays(spec.inputs)
        if spec.rounding_seed:
            _round_stochastically([*self._parameters(module).values(), *inputs.values()], spec)
        kind = getattr(torch, spec.dtype)
        module = module.to(kind) if isinstance(module, torch.nn.Module) else module
        inputs = {name: x.to(kind) if x.is_floating_point() else x for name, x in inputs.items()}
        for tensor in inputs.values():
            tensor.requires_grad_(differentiate and tensor.is_floating_point())
        with torch.set_grad_enabled(differentiate), _kernel(spec.tangents is not None):
            outputs = self.call(module, _copied(inputs), _extras(spec.extras), spec.cached)
            if spec.cotangents is None:
                return Result(float64(outputs), dtypes=dtypes(outputs))
            return self._gradients(module, inputs, outputs, spec)

    def _gradients(self, module, inputs, outputs, spec: RunSpec) -> Result:
        cotangents = self.arrays(spec.cotangents or {}, spec.dtype)
        weighted = ((output_of(outputs, name), c) for name, c in cotangents.items())
        total = torch.stack([(output * c.to(output.dtype)).sum() for output, c in weighted]).sum()
        leaves = {name: p for name, p in self._parameters(module).items() if p.requires_grad}
        leaves |= {n: x for n, x in inputs.items() if x.is_floating_point()}
        twice = spec.tangents is not None
        gradients = _differentiated(total, leaves, create_graph=twice)
        if spec.tangents is None:
            return Result(float64(outputs), float64(gradients), dtypes=dtypes(outputs))
        along = {name: torch.tensor(tangent) for name, tangent in spec.tangents.items()}
        products = [
            (g * along[n]).sum() for n, g in gradients.items() if n in along and g.requires_grad
        ]
        slope = (
            torch.stack(products).sum()
            if products
            else torch.zeros((), dtype=torch.float64, requires_grad=True)
        )
        return Result({}, second=float64(_differentiated(slope, leaves)))

    def train(self, spec: TrainingSpec) -> Arrays:
        """Train a copy; return the final parameters, and the losses as `loss`."""
        module = self._prepared(spec)
        optimizer, schedule = spec.recipe.torch(module.parameters())
        inputs, target, losses = self.arrays(spec.inputs), torch.from_numpy(spec.target), []
        for key in spec.keys:
            optimizer.zero_grad()
            extras = _extras({**spec.extras, "dropout_key": key})
            output = output_of(self.call(module, _copied(inputs), extras), spec.output)
            loss = (output - target).square().mean()
            if loss.requires_grad:  # else no parameter has an effect, and all gradients are 0
                loss.backward()
            spec.recipe.clip(module.parameters())
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        trained = {name: p for name, p in self._parameters(module).items() if p.requires_grad}
        return float64(trained) | {"loss": np.array(losses)}

    def call(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the outputs by name.

        Raises:
            PairingError: if one is no tensor.
        """
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
        if not isinstance(self.module, torch.nn.Module):
            return self.module
        module = copy.deepcopy(self.module)
        module.train(spec.train)
        return module if self.frozen else module.requires_grad_(True)

    @staticmethod
    def _parameters(module: Any) -> dict[str, torch.nn.Parameter]:
        return dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}

    @classmethod
    def _tensors(cls, module: Any) -> dict[str, torch.Tensor]:
        # Running statistics: of BatchNorm, of other norms that keep them, and of routers.
        buffers = dict(module.named_buffers()) if isinstance(module, torch.nn.Module) else {}
        statistics = {
            name: b for name, b in buffers.items() if name.rpartition(".")[2] in STATISTICS
        }
        return {**cls._parameters(module), **statistics}


@torch.no_grad()
def _round_stochastically(tensors: list[torch.Tensor], spec: RunSpec) -> None:
    # Each number moves by up to half a rounding, so that the cast that follows rounds it up or down
    # at random.
    random, eps = (
        np.random.default_rng(spec.rounding_seed),
        torch.finfo(getattr(torch, spec.dtype)).eps,
    )
    for tensor in (tensor for tensor in tensors if tensor.is_floating_point()):
        tensor.mul_(1 + eps * torch.tensor(random.uniform(-0.5, 0.5, tuple(tensor.shape))))


def _copied(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # A module may write into what it is given, which PyTorch refuses for what is differentiated.
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _differentiated(
    total: torch.Tensor, leaves: Mapping[str, torch.Tensor], create_graph: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradients by name, 0 where the total does not depend on any leaf."""
    if not (leaves and total.requires_grad):
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(
        total, [*leaves.values()], create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


@contextmanager
def _kernel(twice: bool):
    # The fused attention of torch has no second derivative; its plain formula has.
    if not twice:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _extras(extras: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(value, order="C")) for name, value in extras.items()}
