"""`flax-attn docs`: write the generated tables of the docs, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_attn.cli import common
from flax_attn.convert.replacing import replacing

NOTE = "<!-- Written by `flax-attn docs`. Do not edit. -->\n"
BEGIN, END = "<!-- flax-attn docs: begin -->\n", "<!-- flax-attn docs: end -->\n"


class VariantRow(NamedTuple):
    """A variant of the proof: its name, and how it is built and called."""

    name: str
    built: str
    call: str


class FaultRow(NamedTuple):
    """A planted fault: what goes wrong, in which variant, and which check detects it."""

    what: str
    variant: str
    check: str


def add(commands: Any) -> None:
    """Add the command."""
    docs = commands.add_parser(
        "docs",
        help="write the generated tables of the documentation",
        description=(
            "Write the tables of variants, faults and backends into the documentation of a clone."
        ),
    )
    docs.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and exit with 1 if a file is out of date",
    )
    docs.add_argument(
        "--folder", default="docs", metavar="DIR", help="of the documentation (default docs)"
    )
    docs.set_defaults(run=_docs)


def _docs(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    if not (folder / "backends.md").is_file():
        raise common.UsageError(
            f"--folder must hold the documentation of a clone; got {folder} without backends.md"
        )
    pages = dict(_pages(folder))
    outdated = [
        path
        for path, text in pages.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    for path in outdated:
        if options.check:
            print(
                f"flax-attn: {path} is out of date. Run `flax-attn docs` and commit the result",
                file=sys.stderr,
            )
        else:
            with replacing(path) as whole:
                whole.write_text(pages[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if options.check and outdated else 0


def _pages(folder: Path) -> Iterator[tuple[Path, str]]:
    from flax_attn.backends.registry import markdown_table

    yield folder / "variants.md", variants_page(_variants())
    yield folder / "faults.md", faults_page(_faults(), _mesh_faults())
    path = folder / "backends.md"
    try:
        yield path, between_markers(path.read_text("utf-8"), markdown_table())
    except ValueError as error:
        raise common.UsageError(f"{path}: {error}") from None


def variants_page(rows: Sequence[VariantRow]) -> str:
    """Return the page of all variants."""
    intro = (
        f"The {len(rows)} variants that `flax-attn parity` proves equal to their PyTorch twins: how"
        " each is built, in either\npackage, and which options its calls have. `--variant NAME`"
        " selects one, or all of a class."
    )
    return f"""{NOTE}
# Variants

{intro}

{markdown(("variant", "built as", "called with"), rows)}"""


def faults_page(rows: Sequence[FaultRow], on_mesh: Sequence[Sequence[str]]) -> str:
    """Return the page of all faults."""
    intro = (
        f"The {len(rows)} known porting faults that are planted, one at a time, into the PyTorch"
        " module of a variant, and the\ncheck that detects each first."
        " [The proof](proof.md#the-checks-are-tested) has the command that plants them."
    )
    mesh = (
        f"The {len(on_mesh)} that are planted into attention over tokens that are split among four"
        " devices, and what differs then\nfrom one device, its outputs and gradients in float64."
        " `tests/sharding/test_faults.py` plants them."
    )
    return f"""{NOTE}
# Planted faults

{intro}

{markdown(("fault", "planted in", "detected by"), rows)}
## On several devices

{mesh}

{markdown(("fault", "what differs"), on_mesh)}"""


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(markdown(("name", "size"), [("a|b", "2")]), end="")
        | name | size |
        | --- | --- |
        | a\|b | 2 |
    """
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = (columns, ["---"] * len(columns), *escaped)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def between_markers(page: str, table: str) -> str:
    """Return a page with the text between the two markers replaced by a table.

    Raises:
        ValueError: if a marker is missing or repeated.
    """
    if (page.count(BEGIN), page.count(END)) != (1, 1):
        raise ValueError(
            f"the table must stand between one line {BEGIN.strip()} and one line {END.strip()}"
        )
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}"


class Written:
    """A stand-in for a package, whose calls are written down instead of made.

    Example:
        >>> p = Written()
        >>> p.MultiHeadAttention(6, 8, rope=p.RoPE(500.0), q_norm=None)
        MultiHeadAttention(6, 8, rope=RoPE(500.0))
        >>> p.Mask.lengths(key=np.arange(3)) & p.Mask.causal()
        Mask.lengths(key=array(3)) & Mask.causal()
    """

    def __init__(self, text: str = ""):
        self._text = text

    def __getattr__(self, name: str) -> Written:
        if name.startswith("__"):  # what Python and numpy look for
            raise AttributeError(name)
        return Written(f"{self._text}.{name}" if self._text else name)

    def __call__(self, *arguments: Any, **options: Any) -> Written:
        named = (f"{name}={_value(value)}" for name, value in options.items() if value is not None)
        return Written(f"{self._text}({', '.join([*map(_value, arguments), *named])})")

    def __and__(self, other: Written) -> Written:
        return Written(f"{self} & {other}")

    def __repr__(self) -> str:
        return self._text


def _value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array({', '.join(map(str, value.shape))})"
    return "..." if callable(value) and not isinstance(value, Written) else repr(value)


def _variants() -> list[VariantRow]:
    from flax_attn.proof.variants import VARIANTS

    p = Written()
    return [VariantRow(f"`{v.name}`", f"`{v.make(p)}`", _call(v.call(p))) for v in VARIANTS]


def _call(options: Mapping[str, Any]) -> str:
    return (
        f"`{', '.join(f'{name}={_value(value)}' for name, value in options.items())}`"
        if options
        else ""
    )


def _faults() -> list[FaultRow]:
    from flax_attn.proof.faults import FAULTS

    return [
        FaultRow(fault.what.removesuffix("."), f"`{fault.variant.name}`", fault.check)
        for fault in FAULTS
    ]


def _mesh_faults() -> list[tuple[str, str]]:
    from flax_attn.proof.faults.mesh import FAULTS

    return [(fault.what.removesuffix("."), ", ".join(sorted(fault.wrong))) for fault in FAULTS]
