"""Training under parity: one model in JAX and in PyTorch, compared after every step of a run.

    pip install "flax-attn[torch,viz]"
    python examples/trajectory.py --out docs/trajectory.png

Both learn to predict the next character of this project's licence: the same weights at the start,
the same batches, the same elements dropped, AdamW with warm-up, cosine decay and clipping. In
float64 only rounding may differ. `--defaults` leaves the weight decay at the default of each
framework, to show what that does to a run.

References:
    Loshchilov and Hutter 2019 (arXiv:1711.05101).
"""

import argparse
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optax
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from tiny_model import (
    LAYOUT,
    Batch,
    FlaxModel,
    Sizes,
    TorchModel,
    train_flax,
    train_torch,
    twins,
)

from flax_attn import convert
from flax_attn.parity import Recipe, tolerance
from flax_attn.parity.cpu import on_cpu

TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()
RECIPE = Recipe(
    steps=300, learning_rate=3e-3, weight_decay=0.1, clip_norm=1.0, schedule="cosine", warmup=20
)
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"  # told apart by the colour-blind, too


@dataclass(frozen=True)
class Trajectory:
    """The losses of every step, and the difference of the parameters after it.

    Args:
        ours: losses in JAX.
        reference: losses in PyTorch.
        parameters: largest relative difference over all parameters.
        where: name of the parameter with that difference.
    """

    ours: np.ndarray
    reference: np.ndarray
    parameters: np.ndarray
    where: list[str]

    @property
    def loss(self) -> np.ndarray:
        """The relative difference of the losses."""
        return np.abs(self.ours - self.reference) / self.reference


def characters(text: str, sizes: Sizes, steps: int, b: int = 8, seed: int = 0) -> Iterator[Batch]:
    """Yield batches of passages from a text, each with a key for dropout."""
    numbers = np.unique(list(text), return_inverse=True)[1]
    # Each passage is one longer than the context: its last character is a target alone.
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(numbers) - sizes.context_length, b)
        passages = numbers[starts[:, None] + np.arange(sizes.context_length + 1)]
        yield Batch(passages[:, :-1], passages[:, 1:], random.integers(0, 2**32, 2))


def train(ours: Recipe, theirs: Recipe, sizes: Sizes) -> Trajectory:
    """Train both sides at once, each by its recipe, and compare them after every step."""
    flax_model, torch_model = twins(sizes)
    batches = list(characters(TEXT, sizes, ours.steps))
    steps = zip(
        train_flax(flax_model, ours, batches),
        train_torch(torch_model, theirs, batches),
        strict=True,
    )
    steps = track(steps, "training both sides", total=ours.steps, transient=True)
    losses, references, parameters, where = [], [], [], []
    for (loss, _), (reference, _) in steps:
        worst, error = largest_difference(flax_model, torch_model)
        losses.append(loss)
        references.append(reference)
        parameters.append(error)
        where.append(worst)
    return Trajectory(np.array(losses), np.array(references), np.array(parameters), where)


def largest_difference(ours: FlaxModel, theirs: TorchModel) -> tuple[str, float]:
    """Return the parameter that differs most between both models, and by how much."""
    weights = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    errors = tolerance.relative(convert.state_dict(ours, LAYOUT), weights)
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst]


def with_default_decay(recipe: Recipe, optimizer: Callable) -> Recipe:
    """Return the recipe with the default weight decay of an optimizer."""
    # Of optax it is 1e-4, and of PyTorch 0.01: a run of many steps shows it.
    default = inspect.signature(optimizer).parameters["weight_decay"].default
    return replace(recipe, weight_decay=default)


def plot(trajectory: Trajectory) -> Figure:
    """Draw both losses, and on a log axis the loss and parameter differences with the rule."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, len(trajectory.reference) + 1)
    left.plot(steps, trajectory.ours, color=BLUE, linewidth=4, alpha=0.5, label="JAX")
    left.plot(
        steps, trajectory.reference, color="black", linewidth=1, linestyle="--", label="PyTorch"
    )
    left.set(xlabel="step", ylabel="loss, nats a character", title="the loss, on both sides")
    right.plot(steps, trajectory.parameters, color=ORANGE, label="parameters: the largest of all")
    right.plot(
        steps,
        trajectory.loss,
        ".",
        color=GREEN,
        markersize=3,
        label="loss, where not equal bit for bit",
    )
    right.axhline(
        tolerance.TRAINING,
        color="black",
        linestyle=":",
        label=f"the rule: {tolerance.TRAINING:.0e}",
    )
    right.set(
        yscale="log",
        xlabel="step",
        ylabel="relative difference",
        title="JAX against PyTorch, after every step",
    )
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


def report(trajectory: Trajectory) -> str:
    """Return the figures of a run, in three lines."""
    worst = int(trajectory.parameters.argmax())
    ours, reference = trajectory.ours, trajectory.reference
    lines = [
        f"{len(ours)} steps, loss {reference[0]:.4f} to {reference[-1]:.4f} in PyTorch and"
        f" {ours[0]:.4f} to {ours[-1]:.4f} in JAX",
        f"loss: relative difference at most {trajectory.loss.max():.1e}",
        f"parameters: at most {trajectory.parameters[worst]:.1e}, {trajectory.where[worst]} after"
        f" step {worst + 1}; the rule is {tolerance.TRAINING:.0e}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train in JAX and in PyTorch, and compare after every step."
    )
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument(
        "--defaults", action="store_true", help="each framework's own default of weight decay"
    )
    parser.add_argument("--out", type=Path, help="where to draw it")
    options = parser.parse_args()
    ours = theirs = replace(RECIPE, steps=options.steps)
    if options.defaults:
        ours, theirs = (
            with_default_decay(ours, optimizer) for optimizer in (optax.adamw, torch.optim.AdamW)
        )
    with on_cpu():
        run = train(
            ours, theirs, Sizes(len(set(TEXT)), context_length=40, num_layers=2, dropout=0.1)
        )
    Console().print(report(run), highlight=False, soft_wrap=True)
    if options.out:
        plot(run).savefig(options.out, dpi=150)
