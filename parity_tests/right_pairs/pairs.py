"""A right pair, its sizes, and the tables of all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx


@dataclass(frozen=True)
class Size:
    """The sizes of a pair, which are pairwise different.

    Args:
        batch: number of examples.
        tokens: number of tokens.
        width: width of a token; a multiple of four times the number of heads.
        out: width of an output.
        heads: number of heads, and of groups of channels.
        pixels: height of an image; its width is two less.
        channels: number of channels, a multiple of the heads.
    """

    batch: int
    tokens: int
    width: int
    out: int
    heads: int
    pixels: int
    channels: int

    @property
    def sequence(self) -> tuple[int, int, int]:
        """The shape of tokens."""
        return self.batch, self.tokens, self.width

    @property
    def vectors(self) -> tuple[int, int]:
        """The shape of one token of each example."""
        return self.batch, self.width

    @property
    def states(self) -> tuple[int, int]:
        """The shape of the states of a recurrent cell."""
        return self.batch, self.out

    @property
    def memory(self) -> tuple[int, int, int]:
        """The shape of the tokens of an encoder."""
        # As many as in the sequence would hide keys that are taken for queries.
        return self.batch, self.tokens + 2, self.width

    @property
    def image(self) -> tuple[int, int, int, int]:
        """The shape of images, channels last."""
        # Not square, or swapped axes would stay unseen.
        return self.batch, self.pixels, self.pixels - 2, self.channels


# The largest has sums over a few thousand terms, where rounding in bfloat16 shows.
SIZES = {
    "small": Size(batch=2, tokens=5, width=12, out=7, heads=3, pixels=10, channels=6),
    "medium": Size(batch=3, tokens=32, width=16, out=11, heads=4, pixels=18, channels=8),
    "large": Size(batch=5, tokens=96, width=64, out=40, heads=8, pixels=34, channels=24),
}


@dataclass(frozen=True)
class Sides:
    """Both sides of a pair, as `compare` takes them.

    Args:
        flax: the JAX module.
        torch: the PyTorch module.
        inputs: inputs of both, by position.
        options: further arguments of `compare`.
    """

    flax: Any
    torch: Any
    inputs: list[Any]
    options: Mapping[str, Any] = field(default_factory=dict)


Build = Callable[[Size], Sides]


def rngs() -> nnx.Rngs:
    """Return the key of every module: the harness draws the parameters again."""
    return nnx.Rngs(0)


def channels_first(layer: Any, x: Any) -> Any:
    """Call a PyTorch layer on images, or on rows, whose channels are last."""
    # Without a copy PyTorch takes its kernels for channels that are last in memory.
    return layer(x.movedim(-1, 1).contiguous()).movedim(1, -1)


IMAGES = {"torch_call": channels_first}
