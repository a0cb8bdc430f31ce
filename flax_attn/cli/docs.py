"""`flax-attn docs`: write the tables of the documentation that follow from the code, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_attn.cli import common

NOTE = "<!-- Written by `flax-attn docs`. Do not edit. -->\n"
BEGIN, END = "<!-- flax-attn docs: begin -->\n", "<!-- flax-attn docs: end -->\n"


class VariantRow(NamedTuple):
    """A variant of the proof: its name, its class, and how it is built and called."""

    name: str
    cls: str
    arguments: str
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
        description="Write the tables of variants, faults and backends into the documentation of a clone.",
    )
    docs.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a file is out of date")
    docs.add_argument("--folder", default="docs", metavar="DIR", help="of the documentation (default docs)")
    docs.set_defaults(run=_docs)


def _docs(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    if not (folder / "backends.md").is_file():
        raise common.UsageError(f"--folder must hold the documentation of a clone; got {folder} without backends.md")
    pages = dict(_pages(folder))
    outdated = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in outdated:
        if options.check:
            print(f"flax-attn: {path} is out of date. Run `flax-attn docs` and commit the result", file=sys.stderr)
        else:
            path.write_text(pages[path])
            print(f"wrote {path}")
    return 1 if options.check and outdated else 0


def _pages(folder: Path) -> Iterator[tuple[Path, str]]:
    from flax_attn.backends.registry import markdown_table

    yield folder / "variants.md", variants_page(_variants())
    yield folder / "faults.md", faults_page(_faults())
    path = folder / "backends.md"
    try:
        yield path, between_markers(path.read_text(), markdown_table())
    except ValueError as error:
        raise common.UsageError(f"{path}: {error}") from None


def variants_page(rows: Sequence[VariantRow]) -> str:
    """Return the page of all variants."""
    return f"""{NOTE}
# Variants

The {len(rows)} variants that `flax-attn parity` proves equal to their PyTorch twins, with the arguments of their
constructors and calls. `--variant NAME` selects one, or all of a class.

{markdown(("variant", "class", "built with", "called with"), rows)}"""


def faults_page(rows: Sequence[FaultRow]) -> str:
    """Return the page of all faults."""
    return f"""{NOTE}
# Planted faults

The {len(rows)} known porting faults that are planted, one at a time, into the PyTorch module of a variant, and the
check that detects each first. [The proof](proof.md#the-checks-are-tested) has the command that plants them.

{markdown(("fault", "planted in", "detected by"), rows)}"""


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
        raise ValueError(f"the table must stand between one line {BEGIN.strip()} and one line {END.strip()}")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}"


def keywords(arguments: Mapping[str, Any]) -> str:
    """Return keyword arguments as they are written in code, without the defaults of dataclasses.

    Example:
        >>> from flax_attn import RoPE
        >>> keywords({"num_heads": 2, "rope": RoPE(base=5e5), "positions": np.arange(3)})
        '`num_heads=2, rope=RoPE(base=500000.0), positions=array(3)`'
    """
    return f"`{_listed(arguments)}`" if arguments else ""


def _listed(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in arguments.items())


def _value(value: Any) -> str:
    from flax_attn import Mask

    if is_dataclass(value) and not isinstance(value, Mask):  # a mask says more than its fields
        changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return f"{type(value).__name__}({_listed(changed)})"
    if isinstance(value, np.ndarray):
        return f"array({', '.join(map(str, value.shape))})"
    return "..." if callable(value) else repr(value)


def _variants() -> list[VariantRow]:
    import flax_attn
    from flax_attn.proof.variants import VARIANTS

    rows = []
    for variant in VARIANTS:
        arguments = {name: v(flax_attn) if callable(v) else v for name, v in variant.arguments.items()}
        called = keywords(variant.call(flax_attn))
        rows.append(VariantRow(f"`{variant.name}`", f"`{variant.module}`", keywords(arguments), called))
    return rows


def _faults() -> list[FaultRow]:
    from flax_attn.proof.faults import FAULTS

    return [FaultRow(fault.what.removesuffix("."), f"`{fault.variant.name}`", fault.check) for fault in FAULTS]
