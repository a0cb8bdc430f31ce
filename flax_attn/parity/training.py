"""One optimizer for optax and for torch.optim, every hyper-parameter given to both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attn_spec.checks import check_choice
from flax_attn.parity.adapters.adapter import Arrays, Mode

if TYPE_CHECKING:
    import torch

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
SCHEDULES = ("constant", "cosine", "linear")
# torch.nn.utils.clip_grad_norm_ divides by the norm plus this.
_TORCH_CLIP = 1e-6


@dataclass(frozen=True)
class Recipe:
    """How both modules are trained.

    Args:
        optimizer: `"adamw"` (decoupled weight decay), `"adam"` (weight decay is L2) or `"sgd"`.
        steps: number of steps.
        learning_rate: peak learning rate of the schedule.
        betas: decay rates of the moments, for Adam and AdamW.
        eps: term added outside the root, for Adam and AdamW.
        momentum: momentum of SGD.
        weight_decay: weight decay of all three.
        clip_norm: largest global norm of the gradients, clipped as in torch; None does not clip.
        schedule: `"constant"`, or `"cosine"` or `"linear"` decay to 0 in `steps`.
        warmup: number of steps of linear growth before the schedule.

    Raises:
        ValueError: if the optimizer or the schedule is unknown, or `steps` is not positive.

    Example:
        >>> Recipe("sgd", steps=3, learning_rate=0.1, schedule="linear", warmup=1).rates()
        [0.1, 0.1, 0.05]

    References:
        Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    optimizer: str = "adamw"
    steps: int = 100
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 1e-2
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup: int = 0

    def __post_init__(self):
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.steps < 1:
            raise ValueError(f"steps must be a positive integer; got steps={self.steps}")

    def rates(self) -> list[float]:
        """Return the learning rate of every step."""
        return [self.learning_rate * self._factor(step) for step in range(self.steps)]

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1 - done if self.schedule == "linear" else 1.0

    def optax(self) -> optax.GradientTransformation:
        """Return the optimizer of optax; its count starts at 0."""
        clip = [] if self.clip_norm is None else [_clip(self.clip_norm)]
        rates = self.rates()
        rate = optax.scale_by_learning_rate(lambda count: jnp.asarray(rates)[count])
        return optax.chain(*clip, *self._optax_steps(), rate)

    def _optax_steps(self) -> list[optax.GradientTransformation]:
        decay = optax.add_decayed_weights(self.weight_decay)
        if self.optimizer == "sgd":
            return [decay, optax.trace(self.momentum)]
        moments = optax.scale_by_adam(*self.betas, eps=self.eps)
        # The decay of Adam is L2 and goes through the moments, that of AdamW does not.
        return [decay, moments] if self.optimizer == "adam" else [moments, decay]

    def torch(self, parameters: Iterable[torch.Tensor]) -> tuple[torch.optim.Optimizer, Any]:
        """Return the optimizer and the schedule of torch.optim."""
        import torch

        kind = getattr(torch.optim, OPTIMIZERS[self.optimizer])
        optimizer = kind(parameters, **self._torch_options())
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)

    def _torch_options(self) -> dict[str, Any]:
        # The rate is the peak: the schedule multiplies it.
        options = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            return {**options, "momentum": self.momentum}
        return {**options, "betas": self.betas, "eps": self.eps}

    def clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Scale the gradients of torch parameters as the recipe says."""
        if self.clip_norm is not None:
            import torch

            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def notes(self) -> list[str]:
        """Return a line for every default that differs between frameworks and a port must set.

        Example:
            >>> notes = Recipe("adamw").notes()
            >>> [x for x in notes if "weight_decay" in x]  # doctest: +NORMALIZE_WHITESPACE
            ['weight_decay is 0.0001 by default in optax.adamw and 0.01 in torch.optim.AdamW:
             both are given 0.01 here']
        """
        ours, theirs = _defaults(self.optimizer)
        given = asdict(self)
        lines = []
        for name in sorted(ours.keys() & theirs.keys()):
            # None and 0 both switch off what they are the default of.
            if (ours[name] or 0) == (theirs[name] or 0):
                continue
            lines.append(
                f"{name} is {ours[name]} by default in optax.{self.optimizer} and {theirs[name]} in"
                f" torch.optim.{OPTIMIZERS[self.optimizer]}: both are given {given.get(name)} here"
            )
        if self.clip_norm is not None:
            lines.append(
                "torch.nn.utils.clip_grad_norm_ divides by the norm + 1e-6,"
                " optax.clip_by_global_norm by the norm: both divide by the norm + 1e-6 here"
            )
        return lines


def _defaults(optimizer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    ours = _signature(getattr(optax, optimizer))
    theirs = _signature(getattr(torch.optim, OPTIMIZERS[optimizer]))
    if "b1" in ours:
        ours["betas"] = ours.pop("b1"), ours.pop("b2")
    return ours, theirs


def _signature(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _clip(most: float) -> optax.GradientTransformation:
    def update(updates, state, params=None):
        norm = optax.tree.norm(updates) + _TORCH_CLIP
        factor = jnp.minimum(1.0, most / norm)
        return jax.tree.map(lambda update: factor * update, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@dataclass(frozen=True)
class TrainingSpec:
    """Fit each floating output to a target; the loss is the sum of their mean squared errors.

    Args:
        name: name of the run; an export keeps the result under it.
        recipe: recipe of the optimizer.
        inputs: inputs of every step.
        extras: arguments of every call beside the inputs.
        targets: target of each output by name; an element that is NaN does not enter the loss.
        keys: `(steps, 2)`, the dropout key of every step.
        mode: mode of the modules.
        rounding_seed: seed of one rounding more of all parameters, after each step; 0 is none.
    """

    name: str
    recipe: Recipe
    inputs: Arrays
    extras: Mapping[str, np.ndarray]
    targets: Arrays
    keys: np.ndarray
    mode: Mode
    rounding_seed: int = 0
