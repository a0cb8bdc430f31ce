"""Both sides of a case, holding the same weights, behind one way to run them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import flax_attn
import torch_ref
from flax_attn import convert
from flax_attn.parity.cases import Case

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What one side computed: outputs, and gradients of parameters and inputs under the cotangents of the pair."""

    outputs: Arrays
    gradients: Arrays


class Pair:
    """A case on both sides in float64, every parameter drawn at random and copied from PyTorch to Flax.

    JAX must have x64 enabled where a pair is used.
    """

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        self.random = np.random.default_rng(seed)
        self.torch = self._torch_module()
        self.flax = self._flax_module(jnp.float64)
        convert.load_state_dict(self.flax, self.torch.state_dict())
        self.inputs = [self.random.normal(size=shape) for shape in case.inputs]
        self.key = self.random.integers(0, 2**32, 2)
        self.train(False)

    def _torch_module(self) -> torch.nn.Module:
        module = self.case.build(torch_ref).double()
        with torch.no_grad():
            for parameter in module.parameters():  # biases and norm scales too: none keeps its start at 0 or 1
                parameter.copy_(torch.from_numpy(self.random.normal(size=parameter.shape) / parameter.shape[-1] ** 0.5))
        return module

    def _flax_module(self, dtype: Any) -> nnx.Module:
        variant = getattr(flax_attn, self.case.variant)
        accepted = inspect.signature(variant.__init__ if isinstance(variant, type) else variant).parameters
        rngs = nnx.Rngs(jax.random.key(self.seed, impl="unsafe_rbg"))  # quick to compile, and overwritten anyway
        numerics = {"param_dtype": dtype, "rngs": rngs}
        return self.case.build(flax_attn, **{name: value for name, value in numerics.items() if name in accepted})

    def train(self, mode: bool = True) -> None:
        """Switch both sides to train mode, or to eval mode."""
        (self.flax.train if mode else self.flax.eval)()
        self.torch.train(mode)

    @property
    def has_dropout(self) -> bool:
        """Whether train mode differs from eval mode."""
        return self.case.arguments.get("dropout", 0) > 0

    @property
    def has_parameters(self) -> bool:
        """Whether there is anything to copy and to train."""
        return any(True for _ in self.torch.parameters())

    @cached_property
    def truth(self) -> Run:
        """The PyTorch side in float64."""
        return self.run_torch(gradients=True)

    @cached_property
    def flax64(self) -> Run:
        """The Flax side in float64, compiled."""
        return self.run_flax()

    @cached_property
    def cotangents(self) -> Arrays:
        """A random cotangent for each output."""
        outputs = self.run_torch().outputs
        random = np.random.default_rng(self.seed + 1)
        return {name: random.normal(size=output.shape) for name, output in outputs.items()}

    def run_flax(self, dtype: str = "float64", inputs: list | None = None, gradients: bool = True, jit: bool = True):
        """Run the Flax side."""
        graph, params, rest = nnx.split(self.flax, nnx.Param, ...)
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        inputs = [jnp.asarray(x, dtype) for x in (self.inputs if inputs is None else inputs)]
        words = jnp.asarray(self.key, jnp.uint32)
        if not gradients:
            compute = jax.jit(self._outputs, static_argnums=0) if jit else self._outputs
            return Run(_numpy(compute(graph, params, rest, inputs, words)), {})
        cotangents = {name: jnp.asarray(c, dtype) for name, c in self.cotangents.items()}
        named, of_params, of_inputs = self.gradient(graph, params, rest, inputs, cotangents, words)
        named_gradients = convert.state_dict(nnx.merge(graph, of_params, rest))
        return Run(_numpy(named), _numpy(named_gradients | self._named_inputs(of_inputs)))

    def gradient(self, *arguments):
        """Return outputs, gradients of the parameters and gradients of the inputs, compiled once for each mode."""
        return self._compiled[self.torch.training and self.has_dropout](*arguments)

    @cached_property
    def _compiled(self):
        def weighted(params, inputs, graph, rest, cotangents, words):
            named = self._outputs(graph, params, rest, inputs, words)
            return sum((named[name] * c).sum() for name, c in cotangents.items()), named

        def gradient(graph, params, rest, inputs, cotangents, words):
            compute = jax.grad(weighted, argnums=(0, 1), has_aux=True)
            (of_params, of_inputs), named = compute(params, inputs, graph, rest, cotangents, words)
            return named, of_params, of_inputs

        # XLA puts the dropout function into every fusion that uses it, and LLVM takes seconds to optimise them all.
        levels = {False: {}, True: {"xla_backend_optimization_level": 0}}
        return {mode: jax.jit(gradient, static_argnums=0, compiler_options=level) for mode, level in levels.items()}

    def _outputs(self, graph, params, rest, inputs, words):
        return self.named(nnx.merge(graph, params, rest)(*inputs, **self.options(flax_attn, words)))

    def run_torch(self, dtype: str = "float64", inputs: list | None = None, gradients: bool = False) -> Run:
        """Run the PyTorch side."""
        kind = getattr(torch, dtype)
        module = copy.deepcopy(self.torch).to(kind)
        tensors = [torch.tensor(x, dtype=kind) for x in (self.inputs if inputs is None else inputs)]
        tensors = [tensor.requires_grad_(gradients) for tensor in tensors]
        with torch.set_grad_enabled(gradients):
            named = self.named(module(*tensors, **self.options(torch_ref, torch.from_numpy(self.key))))
        if not gradients:
            return Run(_numpy(named), {})
        total = torch.stack([(named[n] * torch.tensor(c, dtype=kind)).sum() for n, c in self.cotangents.items()]).sum()
        parameters = dict(module.named_parameters())
        of_all = torch.autograd.grad(total, [*parameters.values(), *tensors], materialize_grads=True)
        named_gradients = dict(zip(parameters, of_all, strict=False))
        return Run(_numpy(named), _numpy(named_gradients | self._named_inputs(of_all[len(parameters) :])))

    def options(self, package, dropout_key) -> dict[str, Any]:
        """Return the keyword arguments of the call, for `flax_attn` or `torch_ref`."""
        method = self.flax.__call__ if package is flax_attn else self.torch.forward
        accepted = inspect.signature(method).parameters
        extra = {"return_weights": True, "dropout_key": dropout_key}
        return dict(self.case.call(package)) | {name: value for name, value in extra.items() if name in accepted}

    def named(self, result) -> dict[str, Any]:
        """Return the outputs of a call by name."""
        return dict(zip(("output", "weights"), result if isinstance(result, tuple) else (result,), strict=False))

    def _named_inputs(self, gradients) -> dict[str, Any]:
        return {f"input {i}": gradient for i, gradient in enumerate(gradients)}


def _numpy(arrays) -> Arrays:
    return {name: convert.to_numpy(array).astype(np.float64) for name, array in arrays.items()}
