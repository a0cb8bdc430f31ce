"""`flax-attn show`: attention maps, shapes of all intermediates of a layer, the environment."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

import flax_attn
from flax_attn.cli import common

EXAMPLE = "Your journey starts with one step"


def add(commands: Any) -> None:
    """Add the command."""
    show = commands.add_parser(
        "show",
        help="draw attention maps, or print the shapes inside a layer",
        description=(
            "Run the words of a text through one attention layer with random weights. `flax-attn"
            " show environment` prints what results depend on: versions, devices, settings, and"
            " wrong results that this installation of JAX is known for."
        ),
    )
    show.add_argument("what", nargs="?", choices=["environment"], help="versions and settings")
    show.add_argument("--text", default=EXAMPLE, help=f"words, a token each (default {EXAMPLE!r})")
    show.add_argument(
        "--out", metavar="FILE", help="write the attention maps to FILE (.png, .svg, .pdf)"
    )
    show.add_argument(
        "--shapes", action="store_true", help="print every intermediate of the layer with its shape"
    )
    show.add_argument("--heads", type=int, default=4, help="number of heads (default 4)")
    show.add_argument(
        "--kv-heads", type=int, help="number of key/value heads (default: as many as heads)"
    )
    show.add_argument("--width", type=int, default=32, help="model width (default 32)")
    show.add_argument(
        "--no-causal", action="store_true", help="let every token attend to every other"
    )
    show.add_argument(
        "--seed", type=common.seed, default=0, help="of the weights and embeddings (default 0)"
    )
    show.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    if options.what:
        _print_environment()
        return 0
    if not (options.out or options.shapes):
        raise common.UsageError(
            "say what to show: --out FILE for the attention maps, --shapes for the shapes, or both"
        )
    # The pictures are drawn last, and a mistake in the name is told first.
    common.check_writable(options.out)
    if options.out and not Path(options.out).suffix:
        raise common.UsageError(
            f"cannot write {options.out}: its suffix says the format, such as .png, .svg or .pdf"
        )
    with common.usage_errors(ValueError):
        layer, tokens, embeddings = _example(options)
    if options.shapes:
        _print_steps(layer, tokens, embeddings)
    if options.out:
        _draw(layer, tokens, embeddings, options)
    return 0


def _print_environment() -> None:
    from flax_attn import native
    from flax_attn.parity.report.report import environment

    for name, value in environment().items():
        print(f"{name}: {value}")
    print(f"native kernels: {', '.join(native.levels()) or native.missing()}")


def _example(options: argparse.Namespace) -> tuple[Any, list[str], Any]:
    import jax
    from flax import nnx

    tokens = options.text.split()
    if not tokens:
        raise common.UsageError("--text must hold at least one word")
    layer = flax_attn.MultiHeadAttention(
        options.width,
        options.width,
        len(tokens),
        0.0,
        options.heads,
        num_kv_heads=options.kv_heads,
        causal=not options.no_causal,
        rngs=nnx.Rngs(options.seed),
    )
    # A word that comes twice has one vector, as in a model; three times the usual deviation makes
    # the maps of random weights less even.
    vocabulary = sorted(set(tokens))
    table = 3 * jax.random.normal(jax.random.key(options.seed), (len(vocabulary), options.width))
    return layer, tokens, table[jax.numpy.array([vocabulary.index(token) for token in tokens])]


def _print_steps(layer: Any, tokens: list[str], embeddings: Any) -> None:
    from attn_spec.axes import AXES
    from flax_attn.steps import steps

    rows = Table(
        "step", "axes", "shape", "meaning", title=f"{type(layer).__name__} on {len(tokens)} tokens"
    )
    # A batch of one: the axes are named as in any call.
    rows.add_row("input", "b t d", str((1, *embeddings.shape)), "one vector per token")
    for step in steps(layer, embeddings[None]):
        rows.add_row(step.name, step.axes, str(step.shape), step.meaning)
    console = common.console(110)
    console.print(rows)
    for letter, meaning in AXES.items():
        console.print(f"{letter}  {meaning}", style="dim", highlight=False)


def _draw(layer: Any, tokens: list[str], embeddings: Any, options: argparse.Namespace) -> None:
    from flax_attn.viz import plot_attention

    weights = layer.attend(embeddings, return_weights=True).weights
    title = f"{type(layer).__name__}, random weights and embeddings (seed {options.seed})"
    common.save_figure(lambda: plot_attention(weights, tokens, title=title), options.out)
