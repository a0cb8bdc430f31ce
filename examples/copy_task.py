"""One head or eight: a small causal model learns to copy a sequence, in JAX and in PyTorch.

    pip install "flax-attn[torch,viz]"
    python examples/copy_task.py --out docs/copy_task.png

    input    5 0 7 2 | 5 0 7        the model sees what is left of a place, and nothing else
    answer           5 0 7 2        the symbols are drawn at random: only attention can know them

Both models are equally wide and have as many parameters. Every batch is new, so that the accuracy
before a step is that on sequences never seen.

References:
    Graves et al. 2014, the copy task (arXiv:1410.5401).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tiny_model import Batch, Sizes, train_flax, train_torch, twins

from flax_attn.parity import Recipe, tolerance
from flax_attn.parity.cpu import on_cpu

SYMBOLS, LENGTH = 12, 15
SIZES = Sizes(vocab_size=SYMBOLS + 1, context_length=2 * LENGTH, d_model=32, num_layers=2)
RECIPE = Recipe(steps=250, learning_rate=3e-3, clip_norm=1.0, schedule="cosine", warmup=20)
COLOURS = {1: "#0072b2", 8: "#e69f00"}  # told apart by the colour-blind, too
STYLES = {1: "--", 8: ":"}


@dataclass(frozen=True)
class Curves:
    """Loss and accuracy of every step on both sides.

    Args:
        losses: `(steps, 2)`, in JAX and in PyTorch.
        accuracies: `(steps, 2)`, the share of symbols that are copied correctly.
    """

    losses: np.ndarray
    accuracies: np.ndarray

    @property
    def apart(self) -> float:
        """The largest relative difference of the losses."""
        ours, reference = self.losses.T
        return float(np.max(np.abs(ours - reference) / reference))

    def first(self, accuracy: float) -> int | None:
        """Return the first step at which JAX is as accurate as this, counted from 1."""
        reached = np.flatnonzero(self.accuracies[:, 0] >= accuracy)
        return int(reached[0]) + 1 if reached.size else None


def sequences(steps: int, b: int = 20, seed: int = 0) -> Iterator[Batch]:
    """Yield batches of symbols, a separator, and the same symbols again except the last."""
    random = np.random.default_rng(seed)
    separator = np.full((b, 1), SYMBOLS)
    for _ in range(steps):
        symbols = random.integers(0, SYMBOLS, (b, LENGTH))
        # The last symbol is a target, and no input: nothing comes after it.
        tokens = np.hstack([symbols, separator, symbols[:, :-1]])
        yield Batch(tokens, symbols, key=random.integers(0, 2**32, 2))


def train(num_heads: int, recipe: Recipe = RECIPE, seed: int = 0) -> Curves:
    """Train a model of that many heads on both sides at once."""
    ours, theirs = twins(replace(SIZES, num_heads=num_heads), seed)
    batches = list(sequences(recipe.steps, seed=seed))
    steps = zip(
        batches,
        train_flax(ours, recipe, batches),
        train_torch(theirs, recipe, batches),
        strict=True,
    )
    losses, accuracies = [], []
    # Step by step, so that both are there for every batch.
    for batch, *sides in track(steps, f"heads: {num_heads}", total=recipe.steps, transient=True):
        losses.append([loss for loss, _ in sides])
        accuracies.append([accuracy(logits, batch) for _, logits in sides])
    return Curves(np.array(losses), np.array(accuracies))


def accuracy(logits: np.ndarray, batch: Batch) -> float:
    """Return the share of symbols that are most likely where they are right."""
    return float(np.mean(logits.argmax(axis=-1) == batch.targets))


def plot(runs: dict[int, Curves]) -> Figure:
    """Draw the curves of both sides over each other, PyTorch dashed above JAX."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for num_heads, run in runs.items():
        heads = "1 head" if num_heads == 1 else f"{num_heads} heads"
        curves = run.losses.T, run.accuracies.T
        for panel, (ours, reference) in zip(panels, curves, strict=True):
            steps = np.arange(1, len(ours) + 1)
            # A thin line over a broad one: both show where they are the same.
            style = {"color": COLOURS[num_heads], "linewidth": 4, "alpha": 0.6}
            panel.plot(steps, ours, label=f"{heads}, JAX", **style)
            style = {"color": "black", "linewidth": 1, "linestyle": STYLES[num_heads]}
            panel.plot(steps, reference, label=f"{heads}, PyTorch", **style)
    guess = {"color": "grey", "linewidth": 1, "linestyle": "-", "label": "guessing"}
    panels[0].axhline(np.log(SYMBOLS), **guess)
    panels[1].axhline(1 / SYMBOLS, **guess)
    panels[0].set(xlabel="step", ylabel="loss, nats a symbol")
    panels[1].set(xlabel="step", ylabel="symbols repeated rightly")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(
        f"copying sequences of {LENGTH}, drawn from {SYMBOLS} symbols; width {SIZES.d_model}"
    )
    return figure


def table(runs: dict[int, Curves]) -> Table:
    """Return when each got how far, and how far the sides are apart."""
    found = Table(box=SIMPLE_HEAD)
    for heading in (
        "heads",
        "half are right",
        "99 % are right",
        "last 20 batches",
        "losses apart",
        "rule",
    ):
        found.add_column(heading, justify="right")
    for num_heads, run in runs.items():
        found.add_row(
            str(num_heads),
            step_of(run, 0.5),
            step_of(run, 0.99),
            f"{run.accuracies[-20:, 0].mean():.1%}",
            f"{run.apart:.1e}",
            f"{tolerance.TRAINING:.0e}",
        )
    return found


def step_of(run: Curves, share: float) -> str:
    """Return the step at which so large a share was right, in words."""
    step = run.first(share)
    return "never" if step is None else f"step {step}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Teach one head and eight to copy, in JAX and in PyTorch."
    )
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and sequences")
    parser.add_argument("--out", type=Path, help="where to draw it")
    options = parser.parse_args()
    with on_cpu():
        runs = {
            heads: train(heads, replace(RECIPE, steps=options.steps), options.seed)
            for heads in COLOURS
        }
    Console().print(table(runs))
    if options.out:
        plot(runs).savefig(options.out, dpi=150)
