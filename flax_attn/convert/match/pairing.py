"""The result of `auto`: a layout that prints as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flax_attn.convert.entry import stored_names
from flax_attn.convert.rules import Layout, Rule, Shape


@dataclass(frozen=True)
class PairedTensor:
    """One row of a pairing.

    Args:
        kind: kind of the layer.
        rule: rule that pairs them, with full names.
        shapes: shapes of our parameters.
        shape: shape of what they make on the PyTorch side, as a whole.
        evidence: evidence for the pair: the `shape`, the `name`, a `number` in the name, the
            `order`, the `outputs`, or a `rule`.
        trainable: False for running statistics.
    """

    kind: str
    rule: Rule
    shapes: tuple[Shape, ...]
    shape: Shape
    evidence: str
    trainable: bool = True

    @property
    def ours(self) -> tuple[str, ...]:
        """The names on the JAX side, several where PyTorch holds them in one tensor."""
        return self.rule.ours

    @property
    def theirs(self) -> str:
        """The name on the PyTorch side; with `*` where one of ours is several there."""
        return self.rule.theirs

    @property
    def pattern(self) -> str:
        """The einops pattern from ours to theirs; `""` is the same array."""
        return self.rule.pattern

    @property
    def their_names(self) -> list[str]:
        """The names on the PyTorch side, several where one of ours is several there."""
        return stored_names(self.theirs, self.shape, self.rule.names)

    def cells(self) -> list[str]:
        """Return the row as text."""
        names = " + ".join(_short(self.ours))
        # Those of a list are too many to be named.
        theirs = _short(self.their_names) if self.rule.names else [self.theirs]
        # Parts are often of one shape, which is said once.
        shapes = " + ".join(map(str, dict.fromkeys(self.shapes)))
        return [
            " + ".join(theirs),
            self.kind,
            str(self.shape),
            names,
            shapes,
            self.rule.change or "same",
            self.evidence,
        ]


@dataclass(frozen=True)
class Pairing(Layout):
    """The paired parameters of two models: a `Layout`, made by `auto`, that prints as a table.

    Args:
        rules: rules, one for each tensor of the PyTorch side.
        ignored: regular expression for other names in its state dict.
        refuse: function that refuses submodules, as in a `Layout`; it refuses none.
        rows: paired tensors, in the order of the PyTorch side.
    """

    rows: tuple[PairedTensor, ...] = ()

    def __str__(self) -> str:
        statistics = sum(not row.trainable for row in self.rows)
        title = f"{len(self.rows) - statistics} parameters paired"
        if statistics:
            title += f", and {statistics} running statistics"
        heads = ["torch", "kind", "shape", "flax", "shape", "flax to torch", "settled by"]
        return "\n".join([title, *_table([heads, *(row.cells() for row in self.rows)])])


def _short(names: Sequence[str]) -> list[str]:
    """Return names of one module, its own name only once."""
    parent = names[0].rpartition(".")[0].rpartition(".")[0]
    return [names[0], *(name.removeprefix(parent + ".") for name in names[1:])]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    # Each column is as wide as its widest cell.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def transformation(axes: str, wanted: str, merged: Mapping[str, str]) -> str:
    """Return the einops pattern between two ways to lay out the axes of a layer.

    Example:
        >>> transformation("i n h", "o i", {"o": "(n h)"})
        'i n h -> (n h) i'
        >>> transformation("i o", "i o", {})
        ''
    """
    target = " ".join(merged.get(axis, axis) for axis in wanted.split())
    return "" if target == axes else f"{axes} -> {target}"
